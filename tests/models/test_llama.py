"""Llama and its kin beside transformers: logits of whole sequences, of chunks and of steps."""

import numpy
import pytest
from llama_steps import Sequences
from matrix import each_library, libraries

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.4")
pytest.importorskip("safetensors")

from small_transformers import small_model  # noqa: E402

from cupyflash.models.engine import Engine  # noqa: E402
from cupyflash.models.llama import Llama  # noqa: E402
from cupyflash.runtime.launch import dependent_launches  # noqa: E402
from cupyflash.runtime.scratch import no_garbage_collected  # noqa: E402
from cupyflash.testing import assert_close_to_float64, to_numpy64  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Each is a model of small_transformers and what its config has beside that.
VARIANTS = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "llama scaled": {"rope_parameters": LLAMA3},
    "llama linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0}},
    "llama wide heads": {"head_dim": 40, "num_key_value_heads": 1},
    "mistral": {},  # a window of 7 in every layer
    "mistral unlimited": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2 windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "qwen3 windows": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
LENGTHS = (61, 1, 34)


def each_place(torch_cpu=False):
    """NumPy, and on a GPU CuPy and torch; torch on the CPU has the path of NumPy."""
    chosen = [x for x in libraries() if torch_cpu or (x.library, x.device) != ("torch", "cpu")]
    return pytest.mark.parametrize("target", chosen, indirect=True, ids=lambda x: x.name)


def sequences(*lengths, vocabulary=100):
    rng = numpy.random.default_rng(lengths)
    return [rng.integers(0, vocabulary, n).tolist() for n in lengths]


def saved(folder, variant, dtype="float32", **options):
    """Their model of a variant, and the folder where it is."""
    kind = variant.partition(" ")[0]
    model = small_model(kind, "eager", dtype=getattr(torch, dtype), **VARIANTS[variant])
    if kind == "qwen2":  # biases that matter
        with torch.no_grad():
            for name, x in model.named_parameters():
                if name.endswith("bias"):
                    x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder, **options)
    return folder, model


def load(folder, target, dtype="float32"):
    device = "gpu" if target.gpu else "cpu"
    return Llama.from_folder(folder, dtype=dtype, device=device, library=target.library)


@torch.no_grad()
def theirs(model, given):
    """Logits of every token, float64, of sequences that are alone."""
    return [model(torch.tensor([x])).logits[0].double().numpy() for x in given]


def check(found, exact, yardstick, dtype, name):
    found, exact, yardstick = map(numpy.concatenate, (found, exact, yardstick))
    assert_close_to_float64(found, exact, yardstick, dtype, name, terms=abs(exact).max())


@each_place()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(target, variant, tmp_path):
    """Of whole sequences, and of their tokens in chunks and steps by way of pages."""
    folder, model = saved(tmp_path, variant)
    given = sequences(*LENGTHS)
    yardstick, exact = theirs(model, given), theirs(model.double(), given)
    llama = load(folder, target)
    whole = llama(given)
    assert all(str(x.dtype).endswith("float32") for x in whole)
    check([to_numpy64(x) for x in whole], exact, yardstick, "float32", "whole")
    check(in_steps(llama, given), exact, yardstick, "float32", "in steps")


@each_place()
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3 windows"])
def test_tokens_of_an_engine(target, variant, tmp_path):
    """Greedy, of prompts that are served at once; by the float64 logits of their model."""
    folder, model = saved(tmp_path, variant)
    prompts = sequences(*LENGTHS)
    engine = Engine(load(folder, target), max_batch=2, page_size=8)
    found = engine.generate(prompts, 9, stop_tokens=-1)
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = theirs(model.double(), [prompt + tokens])[0][len(prompt) - 1 : -1]
        assert len(tokens) == 9 and tokens == logits.argmax(-1).tolist()


def in_steps(llama, given):
    """Logits of every token: chunks of several sequences, one that ends, steps of one token."""
    run, found = Sequences(llama, given), [[] for _ in given]
    counts = [(30, 1, 17), (24, 0, 13), (3, 0, 0), *[(1, 0, 1)] * 4]
    assert numpy.sum(counts, 0).tolist() == list(LENGTHS)
    for count in counts:
        logits = to_numpy64(run.step(count))
        for x, part in zip(found, numpy.split(logits, numpy.cumsum(count)[:-1])):
            x.append(part)
    return [numpy.concatenate(x) for x in found]


@each_place(torch_cpu=True)
@pytest.mark.parametrize("variant", ["llama scaled", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_16_bits(target, variant, dtype, tmp_path):
    """A prefill and steps of a batch; the yardstick is their model in this dtype."""
    if dtype not in target.dtypes:
        pytest.skip(f"{target.name} has no {dtype}")
    folder, model = saved(tmp_path, variant, dtype)
    given = sequences(40, 40)
    yardstick, exact = theirs(model, given), theirs(model.double(), given)
    llama = load(folder, target, dtype)
    assert llama.config.dtype == dtype and str(llama.like.dtype).endswith(dtype)
    check([to_numpy64(x) for x in llama(given)], exact, yardstick, dtype, "whole")
    run = Sequences(llama, given)
    found = [to_numpy64(run.step((20, 20), every=False))]
    found += [to_numpy64(run.step((1, 1))) for _ in range(20)]
    steps = [numpy.stack(found, 1).reshape(-1, 100)]
    by_row = lambda logits: [numpy.stack(logits)[:, 19:].reshape(-1, 100)]
    check(steps, by_row(exact), by_row(yardstick), dtype, "prefill and steps")


@each_place(torch_cpu=True)
def test_sequences_do_not_influence_each_other(target, tmp_path):
    """The logits of one alone are those of the batch, whatever lies in pages of others."""
    folder, _ = saved(tmp_path, "qwen3 windows")
    llama, given = load(folder, target), sequences(*LENGTHS)
    for x, logits in zip(given, llama(given)):
        exact = to_numpy64(llama([x])[0])
        # The same model twice in float32: products of a batch may order their sums otherwise.
        numpy.testing.assert_allclose(to_numpy64(logits), exact, atol=1e-5 * abs(exact).max())


def captured(target, launches):
    """A function that replays the launches on the same arrays; it returns their result."""
    if target.library == "torch":
        graph = torch.cuda.CUDAGraph()
        launches()  # compiles
        with no_garbage_collected(), torch.cuda.graph(graph), dependent_launches():
            result = launches()
        return lambda: (graph.replay(), result)[1]
    import cupy

    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    target.synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream, no_garbage_collected():
        launches()
        stream.synchronize()
        stream.begin_capture()
        try:
            with dependent_launches():
                result = launches()
        finally:
            graph = stream.end_capture()

    def replay(pool=pool):  # which the graph needs as long as it exists
        target.synchronize()
        graph.launch(stream)
        stream.synchronize()
        return result

    return replay


@each_library(device="cuda")
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_step_in_a_graph(target, variant, dtype, tmp_path):
    """Replays of a step of decoding give the bits of the launches, for the tokens of then."""
    if dtype not in target.dtypes:
        pytest.skip(f"{target.name} has no {dtype}")
    folder, _ = saved(tmp_path, variant, dtype)
    llama, given = load(folder, target, dtype), sequences(50, 50, 50)
    eager, graph = (Sequences(llama, given) for _ in range(2))
    for run in (eager, graph):
        run.step((30, 5, 17))
    step = graph.arrays((1, 1, 1))
    replay = captured(target, lambda: llama.logits(step, graph.pool))
    for _ in range(20):
        now = graph.arrays((1, 1, 1))
        for name in ("tokens", "row_positions", "positions"):
            getattr(step, name)[...] = getattr(now, name)
        found, right = to_numpy64(replay()), to_numpy64(eager.step((1, 1, 1)))
        assert numpy.isfinite(right).all() and (found == right).all()
        graph.advance((1, 1, 1))


@each_place()
def test_wrong_sequences(target, tmp_path):
    folder, _ = saved(tmp_path, "llama")
    llama = load(folder, target)
    for wrong in ([], [[1], []], [[1] * 129]):
        with pytest.raises(ValueError, match="^Llama: sequences must be lists of 1 to 128 tokens"):
            llama(wrong)
    for wrong in ([[1, 100]], [[-1]], [[0.5]]):
        with pytest.raises(ValueError, match="^Llama: tokens must be integers from 0 to 99, got"):
            llama(wrong)
