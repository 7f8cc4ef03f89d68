"""GPT-2 by itself: generation, batches, modes, errors."""

import copy
import dataclasses
import gc
import pickle
import weakref

import numpy
import pytest
from devices import memory
from fakes import fake_facts
from gpt2_models import TINY, decodes, device, each_device, modes, prompts, tiny
from wrong_calls import CHOICE, INTEGER, check_refused

from cupyflash.models.gpt2 import Gpt2, Gpt2Config, Sampling, layers, model
from cupyflash.models.gpt2.decoder import Room
from cupyflash.testing import assert_close_to_float64, to_numpy64

RAGGED = (7, 1, 30, 12)


@each_device()
@pytest.mark.parametrize("lengths", [(9,), (5, 5, 5), RAGGED], ids=str)
def test_steps_are_a_prefill_of_what_came(target, lengths):
    """Greedy tokens, every way to decode, equal those from the logits of whole sequences."""
    gpt2, given = tiny(target), prompts(*lengths)
    for decode in decodes(target):
        found = gpt2.generate(given, 20, decode=decode)
        whole = [prompt + new for prompt, new in zip(given, found)]
        for prompt, new, logits in zip(given, found, gpt2.logits(whole)):
            greedy = to_numpy64(logits).argmax(1)[len(prompt) - 1 : -1]
            assert new == greedy.tolist() and len(set(new)) > 3


@each_device()
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_k=20, top_p=0.8, seed=5)])
def test_batches_equal_single_runs(target, sampling):
    """Prompts of other lengths beside it change nothing; the first row draws the same numbers."""
    gpt2, given = tiny(target), prompts(*RAGGED)
    batch = gpt2.generate(given, 25, sampling)
    for i in range(len(given) if sampling.temperature == 0 else 1):
        assert gpt2.generate([given[i]], 25, sampling) == [batch[i]]


@each_device()
def test_logits_of_a_batch_equal_those_of_single_runs(target):
    gpt2, given = tiny(target), prompts(*RAGGED)
    for prompt, logits in zip(given, gpt2.logits(given)):
        (alone,) = gpt2.logits([prompt])
        assert logits.shape == (len(prompt), 101) and logits.dtype == "float32"
        exact = to_numpy64(alone)
        # The same model twice in float32: products of a batch may order their sums otherwise.
        numpy.testing.assert_allclose(to_numpy64(logits), exact, atol=1e-5 * abs(exact).max())


@each_device()
@pytest.mark.parametrize("lengths", [(33, 33), RAGGED], ids=str)
def test_modes_agree(target, lengths):
    """Naive and flash attention, separate and fused operations: prefill and steps."""
    for dtype in ("float32", "float16"):
        given, exact, baseline = prompts(*lengths), None, None
        for mode in modes(target):
            gpt2 = tiny(target, dtype, mode)
            found = numpy.concatenate([to_numpy64(x) for x in gpt2.logits(given)])
            exact = found if exact is None else exact
            baseline = exact * (1 + 8 * numpy.finfo(dtype).eps)  # 12 roundings a block
            assert_close_to_float64(found, exact, baseline, dtype, mode, terms=8.0)
            if dtype == "float32":
                tokens = gpt2.generate(given, 10, decode="eager")
                assert tokens == tiny(target).generate(given, 10)


@each_device()
def test_seeds(target):
    gpt2, given = tiny(target), prompts(4, 9)
    run = lambda seed: gpt2.generate(given, 30, Sampling(2.0, seed=seed))
    assert run(1) == run(1) != run(2)


@each_device()
def test_end_of_text(target):
    """Nothing after it, itself neither; the other sequence goes on."""
    gpt2, given = tiny(target), prompts(4, 9)
    free = gpt2.generate(given, 30)
    end = free[0][11]
    expected = [x[: x.index(end)] if end in x else x for x in free]
    assert gpt2.generate(given, 30, end_of_text=end) == expected
    config = dataclasses.replace(TINY, end_of_text=end)
    stops = Gpt2(config, gpt2.weights)
    assert stops.generate(given, 30) == expected
    assert stops.generate(given, 30, end_of_text=-1) == free
    steps = list(stops.stream(given, 30))
    assert [x for x, _ in steps if x is not None] == expected[0]
    assert len(steps) <= 1 + max(map(len, expected))


@each_device()
def test_the_context_ends_a_text(target):
    """The last token is not embedded, so that a prompt that fills the context gets one."""
    gpt2, given = tiny(target), prompts(127, 128, 120, 3)
    last = [int(to_numpy64(x)[-1].argmax()) for x in gpt2.logits(given)]
    for decode in decodes(target):
        found = gpt2.generate(given, 200, decode=decode)
        assert [len(x) for x in found] == [2, 1, 9, 126]
        assert [x[0] for x in found] == last
        assert found[2] == gpt2.generate(given[2:3], 9)[0]
        assert gpt2.generate(given[1:2], 5, decode=decode) == [found[1]]


@each_device()
def test_several_ends_of_text(target):
    """Whichever comes first; also those of a config.json."""
    gpt2, given = tiny(target), prompts(4, 9)
    free = gpt2.generate(given, 30)
    ends = free[0][11], free[1][5]
    cut = lambda x: x[: min([x.index(end) for end in ends if end in x], default=30)]
    expected = [cut(x) for x in free]
    assert gpt2.generate(given, 30, end_of_text=ends) == expected != free
    assert gpt2.generate(given, 30, end_of_text=list(map(numpy.int32, ends))) == expected
    stops = Gpt2(dataclasses.replace(TINY, end_of_text=ends), gpt2.weights)
    assert stops.generate(given, 30) == expected
    assert stops.generate(given, 30, end_of_text=()) == free
    assert stops.generate(given, 30, end_of_text=-1) == free


class Letters:
    """Tokens as text: of one and of two bytes."""

    def decode(self, tokens):
        return "".join(chr(0x41 + token) for token in tokens)


@each_device()
def test_stop_strings(target):
    """The text ends with the token that completes one; a prompt does not count."""
    gpt2, given, letters = tiny(target), prompts(4, 9), Letters()
    free = gpt2.generate(given, 30)
    texts = [letters.decode(x) for x in free]
    strings = texts[0][6:9], texts[1][3:5]
    lengths = [min(x.find(s) + len(s) if s in x else 30 for s in strings) for x in texts]
    assert min(lengths) < 10
    found = gpt2.generate(given, 30, stop_strings=strings, tokenizer=letters)
    assert found == [x[:n] for x, n in zip(free, lengths)]
    alone = gpt2.generate(given[:1], 30, stop_strings=strings[0], tokenizer=letters)
    assert letters.decode(alone[0]).endswith(strings[0])
    steps = list(gpt2.stream(given, 30, stop_strings=strings, tokenizer=letters))
    assert [x for x, _ in steps if x is not None] == found[0]
    assert len(steps) == max(lengths)


@each_device()
def test_no_seed(target):
    """Each call draws its own; the steps of a call differ anyway."""
    gpt2, given = tiny(target), prompts(4, 9)
    runs = [gpt2.generate(given, 30, Sampling(2.0, seed=None)) for _ in range(3)]
    assert len({str(run) for run in runs}) == 3 and len(set(runs[0][0])) > 5


@each_device()
def test_streams_beside_each_other_and_left_alone(target):
    gpt2, given = tiny(target), prompts(5)
    (whole,) = gpt2.generate(given, 12)
    first, second = (gpt2.stream(given, 12) for _ in range(2))
    pairs = list(zip(first, second))
    assert [a for (a,), _ in pairs] == [b for _, (b,) in pairs] == whole
    left = gpt2.stream(given, 12)
    next(left)
    left.close()
    assert gpt2.generate(given, 12) == [whole]


@each_device()
def test_logits_that_are_not_finite(target):
    gpt2 = tiny(target)
    gpt2.weights.final_norm[1][3] = numpy.nan
    with pytest.raises(RuntimeError, match="logits must be finite.*prompt 0 at new token 0"):
        gpt2.generate(prompts(5), 3)


@each_device()
def test_a_request_with_nan_leaves_nothing_behind(target):
    """Its cache is used again; what lies past the end of the next sequence must not count."""
    for mode in modes(target):
        for decode in decodes(target) if mode == "fused" else ("eager",):
            gpt2, given = tiny(target, mode=mode), prompts(5)
            expected = gpt2.generate(given, 10, decode=decode)
            (run,) = gpt2._idle.values()
            row = gpt2.weights.position_embedding[50].copy()
            gpt2.weights.position_embedding[50] = numpy.nan
            with pytest.raises(RuntimeError, match="logits must be finite"):
                gpt2.generate(prompts(60), 10, decode=decode)
            assert numpy.isnan(to_numpy64(run.pool.v)).any()
            gpt2.weights.position_embedding[50] = row
            assert gpt2.generate(given, 10, decode=decode) == expected, (mode, decode)
            assert gpt2.generate([*given, *prompts(3)], 10, decode=decode)[0] == expected[0]


SIZES = {
    "head_dim 256": {"heads": 2, "width": 512},
    "65 layers": {"layers": 65},
    "inner width 99": {"inner": 99},
    "head_dim 8, inner width 4": {"heads": 8, "inner": 4},
}


@each_device()
@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_the_persistent_kernel_does_not_take(target, size):
    """The defaults find another way; who asks for that kernel is told why not."""
    config = dataclasses.replace(TINY, **SIZES[size])
    for dtype in ("float32", "float16"):
        gpt2, given = tiny(target, dtype, config=config), prompts(7)
        (found,) = gpt2.generate(given, 4)
        assert len(found) == 4
        assert [found] == gpt2.generate(given, 4, decode="eager")
        with pytest.raises(NotImplementedError, match="^stream: decode='persistent' cannot run"):
            gpt2.stream(given, 12, decode="persistent")


@each_device()
def test_dropped_models_are_dropped(target):
    """Nobody waits for the garbage collector; memory is what it was before."""
    used = lambda: memory(target)
    given = prompts(5)

    def run():
        gpt2 = tiny(target)
        for decode in decodes(target):
            gpt2.generate(given, 3, decode=decode)
        next(gpt2.stream(given, 3))
        return weakref.ref(gpt2), weakref.ref(gpt2.weights.head_weight)

    run()
    before = used()
    gc.disable()
    try:
        dropped = [x for _ in range(20) for x in run()]
        assert not any(x() is not None for x in dropped)
    finally:
        gc.enable()
    assert used() <= before


@each_device()
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_model(target, way):
    """After runs, which have left their memory to the next one."""
    gpt2, given = tiny(target), prompts(5)
    expected = [gpt2.generate(given, 6, decode=decode) for decode in decodes(target)]
    again = copy.deepcopy(gpt2) if way == "deepcopy" else pickle.loads(pickle.dumps(gpt2))
    assert again.weights.head_weight is not gpt2.weights.head_weight
    for block in gpt2.weights.blocks:
        block.up_weight[...] = 0
    assert [again.generate(given, 6, decode=decode) for decode in decodes(target)] == expected


def bad(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_bad_requests():
    """Raised by the call, not by the first token; nothing has been computed."""
    gpt2 = Gpt2.random(TINY, device="cpu")
    gpt2.weights = None  # nothing may look at them
    ok = [[1, 2]]
    stream = lambda *args, **options: lambda: gpt2.stream(*args, **options)
    bad(ValueError, "^stream: prompts must be", stream([], 3))
    bad(ValueError, "^stream: prompts must be", stream("text", 3))
    bad(ValueError, "prompt 0 must be a sequence of tokens, got 1", stream([1, 2], 3))
    bad(ValueError, "prompt 1 must have at least one token", stream([[1], []], 3))
    bad(ValueError, "prompt 0 .*at most 128 tokens.*context has, got 129", stream([[1] * 129], 3))
    for tokens in ([101], [-1], [1.5], ["a"], [[1]]):
        bad(ValueError, "prompt 0 must be integers from 0 to 100", stream([tokens], 3))
    for count in (0, -1, 2**31):
        bad(ValueError, "max_new_tokens must be", stream(ok, count))
    for count in (1.5, True):
        bad(TypeError, "max_new_tokens must be", stream(ok, count))
    bad(TypeError, "sampling must be a Sampling, got 0.5", stream(ok, 3, 0.5))
    bad(ValueError, "decode must be auto.*'fast'", stream(ok, 3, decode="fast"))
    bad(ValueError, "'graph' needs a GPU", stream(ok, 3, decode="graph"))
    naive = Gpt2.random(TINY, device="cpu", mode="naive")
    bad(ValueError, "needs mode 'fused'", lambda: naive.stream(ok, 3, decode="persistent"))
    bad(ValueError, "^logits: .*at most 128", lambda: gpt2.logits([[1] * 129]))


@each_device()
def test_wrong_calls_of_generate(target):
    gpt2, given = tiny(target), [[1, 2], [3]]
    wrong = (None, 3, "text", b"text", {}, {0: [1]}, object(), [], (), numpy.array(3), [[]])
    wrong += ([None], [3], ["text"], [[1.5]], [["a"]], [[101]], [[-1]], [[[1]]], [[True]], [[None]])
    wrong += ([[1], []], [[1], [1] * 129], [[1], {0: 1}], numpy.zeros((2, 2)), [[1, [2, 3]]])
    array = target.array(numpy.array([[1.0, 2.0]], "float32"))
    kinds = {
        "prompts": (*wrong, array, lambda: 3),
        "max_new_tokens": (*INTEGER, None, 0, -1, 2.0),
        "sampling": (None, 0.5, "greedy", (0.0, 0, 1.0, 0), Sampling, {}),
        "end_of_text": (
            "text", 1.5, True, -2, 101, 2**70, [1.5], [None], ["a"], [101], {}, object(), [[1]],
        ),
        "stop_strings": (None, 3, b"a", [b"a"], "", [""], ["a", ""], [3], {}, object(), {"a": 1}),
        "tokenizer": (None, 3, "gpt2", Letters, object()),
        "decode": (*CHOICE, None, "Eager", ("eager",), *(() if target.gpu else ["graph"])),
    }  # fmt: skip
    good = {"prompts": given, "max_new_tokens": 3, "sampling": Sampling(1.0), "end_of_text": 5}
    good |= {"stop_strings": ["xyz"], "tokenizer": Letters(), "decode": "eager"}
    check_refused(gpt2.generate, good, kinds, least=85)
    many = prompts(*[3] * 9)
    bad(ValueError, "^generate: decode='persistent' takes at most 8 prompts, got 9",
        lambda: gpt2.generate(many, 1, decode="persistent"))  # fmt: skip
    check_refused(gpt2.logits, {"prompts": given}, {"prompts": wrong}, least=20)


def test_bad_models():
    bad(ValueError, "^Gpt2: size must be one of tiny, small.*'huge'", lambda: Gpt2.random("huge"))
    bad(ValueError, "mode must be", lambda: Gpt2.random("tiny", device="cpu", mode="slow"))
    bad(ValueError, "device must be", lambda: Gpt2.random("tiny", device="tpu"))
    bad(ValueError, "dtype must be", lambda: Gpt2.random("tiny", dtype="int8"))
    bad(ValueError, "width / heads", lambda: Gpt2Config(layers=1, heads=3, width=64))
    bad(ValueError, "layers must be", lambda: Gpt2Config(layers=0, heads=3, width=24))
    bad(ValueError, "layers must be .* at most 10000, got 1000", lambda: Gpt2Config(10**30, 3, 24))
    bad(ValueError, "width must be a positive integer", lambda: Gpt2Config(1, 3, None))
    for eps in (0, -1e-5, 1, float("nan"), True, "1e-5", None):
        bad(ValueError, "^Gpt2Config: eps must be", lambda eps=eps: Gpt2Config(1, 3, 24, eps=eps))
    for end in (1.5, -1, True, "</s>", (7, 1.5)):
        match = "^Gpt2Config: end_of_text must be a token or a list"
        bad(ValueError, match, lambda end=end: Gpt2Config(1, 3, 24, end_of_text=end))


@each_device()
def test_running_out_of_memory_names_what_fits(target, monkeypatch):
    """Ahead by the estimate, and where the allocator fails; both leave the model usable."""
    gpt2, given = tiny(target), prompts(9, 4)
    expected = gpt2.generate(given, 5)
    fake_facts(monkeypatch, model, free_memory=2**20)
    gpt2._idle.clear()
    match = r"batch 2 of length 128 needs .* would fit"
    bad(MemoryError, match, lambda: gpt2.generate(given, 120))
    monkeypatch.undo()

    def full(*arguments, **options):
        raise MemoryError("no more")

    monkeypatch.setattr(layers, "cached_attention", full)
    bad(MemoryError, match, lambda: gpt2.generate(given, 120))
    monkeypatch.undo()
    assert gpt2.generate(given, 5) == expected


def test_what_fits_fits():
    """The batch and the length that the message names pass the estimate, the next larger do not."""
    room = lambda batch, length: Room(TINY, 2, batch, length, 10**7, False)
    text = room(100, 1000).text(10**7)
    words = text.split()
    batch, length = int(words[words.index("used:") + 2]), int(words[words.index("or") + 2])
    assert room(batch, 1000).needed <= 10**7 < room(batch + 1, 1000).needed
    assert room(100, length).needed <= 10**7 < room(100, length + 1).needed


@pytest.mark.parametrize(("size", "millions"), [("small", 124), ("medium", 355), ("xl", 1558)])
def test_published_sizes(size, millions):
    from cupyflash.models.gpt2.config import SIZES

    assert round(SIZES[size].parameters / 1e6) == millions


@each_device()
def test_random_weights_repeat(target):
    a, b, c = (Gpt2.random("tiny", device=device(target), seed=x) for x in (1, 1, 2))
    values = [to_numpy64(x.weights.blocks[1].up_weight) for x in (a, b, c)]
    assert (values[0] == values[1]).all() and (values[0] != values[2]).any()
    assert abs(values[0].std() / 0.02 - 1) < 0.05 and values[0].shape == (256, 64)
