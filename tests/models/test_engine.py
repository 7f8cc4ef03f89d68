"""The engine: requests beside each other get what they get alone; on every library."""

import collections
import concurrent.futures
import gc
import sys
import time
import types
import weakref

import numpy
import pytest
from arrays import integers, normal, stored
from devices import delay
from gpt2_models import each_device, prompts, tiny
from matrix import each_library
from targets import TARGETS
from wrong_calls import INTEGER, check_refused

import cupyflash
from cupyflash.models.engine import Batch, Engine, PagePool, devices, scheduler
from cupyflash.models.gpt2.layers import PagedAttention
from cupyflash.ops.decode.embedding import embedding
from cupyflash.ops.decode.sampling import DecodeState, Sampling, choice_words, sample
from cupyflash.testing import to_numpy64

WIDTH, HEADS = 64, (4, 2)
CONFIG = types.SimpleNamespace(
    layers=2, heads_kv=2, head_dim=16, vocab_size=50, max_positions=96, eos_token_ids=(3,)
)


class Small:
    """A language model of attention alone, with two heads for each head of keys."""

    config = CONFIG

    def __init__(self, target, dtype="float32"):
        put = lambda seed, *shape: stored(target, normal(shape, seed) * shape[-1] ** -0.5, dtype)
        self.tokens, self.places = put(0, 50, WIDTH), put(1, 96, WIDTH)
        self.like = self.tokens
        self.layers = [(put(2 + i, 128, WIDTH), put(9 + i, WIDTH, WIDTH)) for i in range(2)]

    def logits(self, batch, pool):
        attention = PagedAttention(batch, pool)
        x = embedding(batch.tokens, self.tokens, batch.row_positions, self.places)
        for layer, (qkv, out) in enumerate(self.layers):
            heads = {"heads_q": HEADS[0], "heads_kv": HEADS[1]}
            found = attention(layer, *cupyflash.qkv_projection(x, qkv, **heads))
            x = cupyflash.linear(found.reshape(x.shape), out, residual=x)
        x = x if batch.last is None else embedding(batch.last, x)
        return cupyflash.linear(x, 6 * self.tokens)


def random_requests(target, count, seed, longest=40):
    """(prompt, most new tokens, sampling, stop tokens) of each; the CPU has shorter answers."""
    rng = numpy.random.default_rng(seed)
    for i in range(count):
        prompt = rng.integers(0, 50, rng.integers(1, longest)).tolist()
        top_k, top_p = [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.9)][rng.integers(4)]
        sampling = Sampling(float(rng.choice([0.5, 1.5])), top_k, top_p, seed=int(rng.integers(9)))
        ends = rng.integers(0, 50, rng.integers(0, 3)).tolist()
        yield (
            prompt,
            int(rng.integers(1, 24 if target.gpu else 7)),
            sampling if i % 2 else Sampling(),
            ends or -1,
        )


def served(engine, wanted):
    """The tokens of requests that come at random steps; and all pages are free at the end."""
    rng, waiting, requests = numpy.random.default_rng(0), collections.deque(wanted), []
    while waiting or engine.busy:
        for _ in range(min(len(waiting), rng.poisson(1.5))):
            prompt, count, sampling, ends = waiting.popleft()
            options = {"stop_tokens": ends, "number": len(requests) % 5}
            requests.append(engine.submit(prompt, count, sampling, **options))
        engine.step()
    assert engine.pool.free == engine.pool.pages - 1
    assert {x.reason for x in requests} <= {"stop", "length"}
    return [x.tokens for x in requests]


def alone(model, wanted, **options):
    """The tokens of each request by itself."""
    engine = Engine(model, max_batch=1, num_splits=1, **options)
    found = []
    for number, (prompt, count, sampling, ends) in enumerate(wanted):
        request = engine.submit(prompt, count, sampling, stop_tokens=ends, number=number % 5)
        while engine.busy:
            engine.step()
        found.append(request.tokens)
    return found


def expected(target, model, prompt, tokens, sampling, number):
    """What follows each token from the prompt's last on, by one call over the whole text."""
    text = prompt + tokens
    logits = text_logits(target, model, text)[len(prompt) - 1 :]
    out, *state = (integers(target, numpy.arange(len(prompt) - 1, len(text))) for _ in range(4))
    choices = choice_words([sampling] * len(logits), [number] * len(logits))
    choices = integers(target, choices)
    sample(logits, out=out, state=DecodeState(*state), choices=choices)
    return to_numpy64(out).astype(int).tolist()


def text_logits(target, model, text):
    """Logits behind each token of a text, by one call."""
    config = model.config
    size = config.layers, 2, len(text), config.heads_kv, config.head_dim
    rows, first = integers(target, numpy.arange(len(text))), integers(target, [0])
    batch = Batch(
        integers(target, text), rows, first, integers(target, [[1]]),
        integers(target, [0, len(text)]), len(text), num_splits=1,
    )  # fmt: skip
    return model.logits(batch, PagePool(*size, model.like))


@pytest.fixture
def padded_steps(monkeypatch):
    """Has the CPU pad the rows of decoding and keep their arrays, as a GPU with graphs does."""
    monkeypatch.setattr(devices.Device, "captures", True)
    monkeypatch.setattr(devices.Device, "capture", lambda self, launches: launches)


@each_library()
def test_200_requests_get_what_they_get_alone(target):
    """Arrivals, stops and samplings at random; also what one call over the whole text says."""
    count = 200 if target.gpu or target.library == "numpy" else 20
    model, wanted = Small(target), list(random_requests(target, count, 1))
    found = served(Engine(model, max_batch=24, page_size=8, num_splits=1), wanted)
    assert found == alone(model, wanted)
    assert len({len(x) for x in found}) > 5 and len({str(x) for x in found}) > 0.7 * count
    for number, (tokens, (prompt, count, sampling, ends)) in enumerate(zip(found, wanted)):
        if number % 4 and not target.gpu:
            continue
        follows = expected(target, model, prompt, tokens, sampling, number % 5)
        assert follows[:-1] == tokens
        stopped = ends != -1 and follows[-1] in ends
        assert stopped or len(tokens) == count


@each_library()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(target, dtype):
    """Greedy tokens whose logits are the largest, but for twice the error of such logits."""
    if dtype not in target.dtypes:
        pytest.skip("no such dtype here")
    model, cpu = Small(target, dtype), next(x for x in TARGETS if x.library == "numpy")
    exact, plain = Small(cpu), Small(cpu, dtype)
    for name in ("tokens", "places"):
        setattr(exact, name, to_numpy64(getattr(plain, name)).astype("float32"))
    exact.layers = [[to_numpy64(x).astype("float32") for x in pair] for pair in plain.layers]
    engine, requests = Engine(model, max_batch=12, page_size=16, num_splits=1), []
    for prompt, count, *_ in random_requests(target, 12, 6):
        requests.append(engine.submit(prompt, count, stop_tokens=-1))
    while engine.busy:
        engine.step()
    for request in requests:
        text = request.prompt + request.tokens[:-1]
        right, baseline = (to_numpy64(text_logits(cpu, x, text)) for x in (exact, plain))
        error = 2 * abs(right - baseline).max() + 2.0**-8 * abs(right).max()
        rows = right[len(request.prompt) - 1 :]
        chosen = rows[range(len(rows)), request.tokens]
        assert (rows.max(1) - chosen <= 2 * error).all() and len(rows) == request.max_new_tokens


@each_library()
def test_requests_that_are_preempted(target, monkeypatch):
    """A pool for three requests at most: what they had is computed again."""
    count = 60 if target.gpu or target.library == "numpy" else 12
    model, wanted, preempted = Small(target), list(random_requests(target, count, 2)), []
    preempt = scheduler.Scheduler._preempt
    monkeypatch.setattr(
        scheduler.Scheduler, "_preempt", lambda x, y: preempted.append(y) or preempt(x, y)
    )
    engine = Engine(model, max_batch=16, page_size=2, pages=1 + 34, num_splits=1)
    assert served(engine, wanted) == alone(model, wanted)
    assert len(preempted) > 2 and any(x.tokens for x in preempted)


def test_rows_of_padding_change_nothing(padded_steps):
    """The arrays of a graph on the CPU, where wrong places are errors."""
    target = next(x for x in TARGETS if x.library == "numpy")
    model, wanted = Small(target), list(random_requests(target, 60, 3))
    engine = Engine(model, max_batch=13, page_size=4, pages=1 + 60, num_splits=1)
    found = served(engine, wanted)
    assert {1, 4, 8, 16} <= set(engine.decoder.graphs) <= {1, 2, 4, 8, 16}
    assert found == alone(model, wanted, graphs=False)


@each_library()
def test_long_prompts_take_several_steps(target, monkeypatch):
    count = 25 if target.gpu or target.library == "numpy" else 10
    model, wanted = Small(target), list(random_requests(target, count, 4, longest=76))
    monkeypatch.setattr(scheduler, "CHUNK", 16)
    monkeypatch.setattr(scheduler, "MOST_KEYS", 100)
    engine, chunks = Engine(model, max_batch=8, page_size=8, num_splits=1), []
    prefill = engine.decoder.prefill
    monkeypatch.setattr(engine.decoder, "prefill", lambda x, y: chunks.append(x) or prefill(x, y))
    found = served(engine, wanted)
    monkeypatch.undo()
    assert found == alone(model, wanted)
    assert max(sum(len(x.tokens) for x in step) for step in chunks) == 16
    assert any(x.start and not x.ends for step in chunks for x in step)
    assert any(len(step) > 1 for step in chunks)


@each_device()
def test_gpt2_on_an_engine(target):
    gpt2 = tiny(target)
    given = prompts(5, 40, 1, 17, 9, 100)
    engine = Engine(gpt2.paged, max_batch=4, page_size=16)
    samplings = [Sampling(), Sampling(0.9, top_k=20, seed=3)] * 3
    found = engine.generate(given, 20, samplings)
    assert found[::2] == [gpt2.generate([x], 20)[0] for x in given[::2]]
    for number in (1, 3, 5):
        beside = [given[number]] * (number + 1)  # prompt i of a call has the number i
        assert found[number] == gpt2.generate(beside, 20, samplings[1])[number]


@each_library()
def test_streams(target):
    """As tokens come, beside each other; whoever leaves one frees its pages."""
    engine = Engine(Small(target), max_batch=8, page_size=8)
    given = [[1, 2, 3], [4], [5] * 30]
    counts, free = [12, 3, 7], engine.pool.free
    whole = engine.generate(given, counts, stop_tokens=-1)
    assert [len(x) for x in whole] == counts
    first, second = (engine.stream(given, counts, stop_tokens=-1) for _ in range(2))
    for place, (a, b) in enumerate(zip(first, second)):
        assert a == b == [x[place] if place < len(x) else None for x in whole]
    left = engine.stream(given, counts, stop_tokens=-1)
    assert next(left) == [x[0] for x in whole] and engine.pool.free < free
    left.close()
    assert engine.pool.free == free
    assert engine.generate(given, counts, stop_tokens=-1) == whole


@each_library()
def test_ends(target):
    """Of the model, of the request, by an object; the token that ends a text is no part of it."""
    engine = Engine(Small(target), page_size=8)
    run = lambda **options: engine.generate([[7, 8]], 15, Sampling(5.0, seed=1), **options)[0]
    free = run(stop_tokens=-1)
    first = free.index(free[9])
    assert run(stop_tokens=[free[9], free[12]]) == free[: min(first, free.index(free[12]))]
    engine.model.config = types.SimpleNamespace(**vars(CONFIG) | {"eos_token_ids": (free[9],)})
    assert run() == free[:first] and run(stop_tokens=-1) == free
    stop = types.SimpleNamespace(end=lambda tokens: len(tokens) == 6)
    assert run(stop_tokens=-1, stop=stop) == free[:6]


@each_library()
def test_the_length_ends_a_request(target):
    engine = Engine(Small(target), max_length=20, page_size=8)
    found = engine.generate([[1] * 20, [2] * 18, [3]], 50, stop_tokens=-1)
    assert [len(x) for x in found] == [1, 3, 20]


@each_library()
def test_logits_that_are_not_finite(target):
    """End the one request; the others go on, and no page is lost."""
    model = Small(target)
    good = Engine(model).generate([[1, 2], [4, 5]], 9, stop_tokens=-1)
    model.places[60:] = numpy.nan
    engine = Engine(model)
    bad, right = (engine.submit(x, 9, stop_tokens=-1) for x in ([1] * 70, [4, 5]))
    while engine.busy:
        engine.step()
    assert (bad.reason, bad.tokens) == ("nan", []) and right.tokens == good[1]
    assert engine.pool.free == engine.pool.pages - 1
    with pytest.raises(RuntimeError, match="finite, got NaN or infinity for prompt 1 at new token"):
        engine.generate([[1, 2], [1] * 57], 9, stop_tokens=-1)
    assert engine.generate([[1, 2], [4, 5]], 9, stop_tokens=-1) == good


@each_library()
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_fails(target, monkeypatch, call):
    """What it had begun is cancelled, as nobody knows what is in the pages; then all is new."""
    engine, calls = Engine(Small(target), page_size=8, graphs=False), []
    given = [[1] * 30, [4, 5], [9]]
    good = engine.generate(given, 9, stop_tokens=-1)
    logits = engine.model.logits

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise MemoryError("no more")
        return logits(*arguments)

    monkeypatch.setattr(engine.model, "logits", full)
    requests = [engine.submit(x, 9, stop_tokens=-1) for x in given]
    with pytest.raises(MemoryError, match="no more"):
        while engine.busy:
            engine.step()
    assert {x.reason for x in requests} == {"cancelled"}
    assert not engine.busy and engine.pool.free == engine.pool.pages - 1
    assert engine.generate(given, 9, stop_tokens=-1) == good


def test_requests_whose_tokens_nobody_has_read(monkeypatch):
    """End with a step that fails, though they have no pages any more."""
    engine = Engine(Small(next(x for x in TARGETS if x.library == "numpy")))
    last = engine.submit([1, 2], 1, stop_tokens=-1)
    engine.step()
    beside = engine.submit([3], 5)
    monkeypatch.setattr(engine.model, "logits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    assert last.reason == beside.reason == "cancelled" and not engine.busy
    stop = types.SimpleNamespace(end=lambda tokens: engine.step())
    requests = [engine.submit([1, 2], 1, stop_tokens=-1, stop=x) for x in (None, stop, None)]
    with pytest.raises(RuntimeError, match="^step: stop.end cannot take a step of its engine"):
        while engine.busy:
            engine.step()
    assert [x.reason for x in requests] == ["length", "cancelled", "cancelled"]


def test_requests_of_another_engine():
    model = Small(next(x for x in TARGETS if x.library == "numpy"))
    engines = [Engine(model, page_size=8) for _ in range(2)]
    good = engines[0].generate([[1, 2, 3]], 9, stop_tokens=-1)
    requests = [engine.submit([1, 2, 3], 9, stop_tokens=-1) for engine in engines]
    for engine in engines:
        engine.step()
    with pytest.raises(ValueError, match="^cancel: request must be one of this engine"):
        engines[1].cancel(requests[0])
    for engine, request in zip(engines, requests):
        while engine.busy:
            engine.step()
        assert [request.tokens] == good
        engines[1].cancel(request)  # it has ended


def test_streams_that_python_frees_in_a_step(monkeypatch):
    """A stream in a cycle is freed, and so cancelled, at any place in the code."""
    engine = Engine(Small(next(x for x in TARGETS if x.library == "numpy")), page_size=2)
    given, sampling = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], Sampling(1.5, seed=3)
    good = engine.generate(given, 12, sampling, stop_tokens=-1)
    left = engine.stream([[9, 9, 9]], 12, sampling, stop_tokens=-1)
    next(left)
    requests = [
        engine.submit(x, 12, sampling, stop_tokens=-1, number=i) for i, x in enumerate(given)
    ]
    engine.step()
    freed, take = weakref.ref(left), engine.pool.take
    cycle = [left]
    cycle.append(cycle)
    del left, cycle
    monkeypatch.setattr(engine.pool, "take", lambda count: (take(count), gc.collect())[0])
    while engine.busy:
        engine.step()
    assert freed() is None and [x.tokens for x in requests] == good
    assert engine.pool.free == engine.pool.pages - 1


def test_threads():
    """Requests come and leave in other threads while a step goes on."""
    engine = Engine(Small(next(x for x in TARGETS if x.library == "numpy")), page_size=4, pages=40)
    given = [[1 + i] * (1 + 3 * i) for i in range(8)]
    good = [engine.generate([x], 6, stop_tokens=-1)[0] for x in given]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            left = [threads.submit(submit_and_cancel, engine, x) for x in given]
            some = (given[i : i + 2] for i in (0, 2, 4, 6, 1, 3, 5))
            found = list(threads.map(lambda x: engine.generate(x, 6, stop_tokens=-1), some))
            assert {x.result() for x in left} <= {"cancelled", "length"}
    finally:
        sys.setswitchinterval(before)
    assert sum(found, []) == [*good, *good[1:7]]
    while engine.busy:
        engine.step()
    assert engine.pool.free == engine.pool.pages - 1


def submit_and_cancel(engine, prompt):
    """Twenty times; the last reason."""
    for i in range(20):
        request = engine.submit(prompt, 6, stop_tokens=-1)
        time.sleep(i % 5 / 2000)
        engine.cancel(request)
    return request.reason


@each_library(library="torch", device="cuda")
def test_steps_do_not_wait(target):
    """torch would raise an error where a step copies from the device or waits for it."""
    import torch

    wanted = list(random_requests(target, 12, 5))
    engine = Engine(Small(target), max_batch=8, page_size=8)
    before = served(engine, wanted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert served(engine, wanted) == before
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_library(device="cuda")
def test_copies_whose_engine_is_gone(target):
    """The memory of a copy that has not run yet is nobody else's."""
    first, second = (devices.device_of(target.array(numpy.zeros(1))) for _ in range(2))
    x, y, z = (device.integers(64) for device in (first, second, second))
    delay(target)
    first.read(x)
    first.write(x, numpy.ones(64, "int32"))
    del first
    second.write(y, numpy.full(64, 2, "int32"))
    second.write(z, numpy.full(64, 3, "int32"))
    assert [set(array.tolist()) for array in (x, y, z)] == [{1}, {2}, {3}]


def test_wrong_calls():
    model = Small(next(x for x in TARGETS if x.library == "numpy"))
    engine = Engine(model)
    check_refused(
        engine.submit,
        {"prompt": [1, 2], "max_new_tokens": 3, "sampling": Sampling(), "stop_tokens": 5}
        | {"number": 0},
        {
            "prompt": (None, 3, "text", {}, [], [50], [-1], [1.5], [[1]], [1] * 97, ["a"]),
            "max_new_tokens": (*INTEGER, None, 0, -1, 2.0),
            "sampling": (None, 0.5, "greedy", Sampling, {}),
            "stop_tokens": ("text", 1.5, -2, 50, [1.5], [None], {}, object()),
            "number": (*INTEGER, None, -1, 2**32),
        },
        least=50,
    )
    sizes = {"pages": 9, "page_size": 8, "max_batch": 2, "max_length": 20, "num_splits": 1}
    check_refused(
        Engine,
        sizes | {"model": model, "graphs": False},
        {
            **{name: (*(x for x in INTEGER if x is not None), -1, 2**40) for name in sizes},
            "graphs": (True,),
        },
        least=40,
    )
    with pytest.raises(ValueError, match="^stream: sampling must be one, or 2 of them, got 1"):
        engine.generate([[1], [2]], 3, [Sampling()])
    with pytest.raises(ValueError, match="^stream: prompts must be sequences of tokens"):
        engine.generate([], 3)
    with pytest.raises(TypeError, match="^cancel: request must be a Request, got None"):
        engine.cancel(None)
    for stop in ("abc", ["abc"], Engine):
        with pytest.raises(TypeError, match="^submit: stop must be None or an object with a meth"):
            engine.submit([1], 3, stop=stop)


def test_pages():
    pool = PagePool(2, 5, 4, 1, 8, numpy.zeros(1, "float32"))
    pages = pool.take(3)
    assert 0 not in pages and len(set(pages)) == 3 and pool.free == 1
    with pytest.raises(MemoryError, match="2 pages are wanted, 1 are free"):
        pool.take(2)
    pool.give(pages[:1])
    for wrong in (pages[0], 0, 5):
        with pytest.raises(ValueError, match=f"page {wrong} is not in use"):
            pool.give([wrong])
    k, v = pool.layer(1)
    k[...], v[...] = 1, 2
    assert pool.k.sum() == k.size and pool.v.sum() == 2 * v.size and k.shape == (5, 4, 1, 8)
    assert [pool.count(x) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="pages 2, as one is for rows of padding"):
        PagePool(2, 1, 4, 1, 8, numpy.zeros(1, "float32"))
