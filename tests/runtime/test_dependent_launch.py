"""Kernels that begin while the one before them still runs: how they are launched, how they wait.

The first part needs no GPU: the driver is a fake.
"""

import ctypes
import threading
from ctypes import POINTER, c_int, c_uint, c_void_p

import numpy
import pytest
from fakes import fake_driver, fake_facts
from gpt2_models import prompts, tiny
from targets import TARGETS, compute_capability

import cupyflash
from cupyflash import environment
from cupyflash.jit import sources
from cupyflash.models.engine import Engine
from cupyflash.models.engine.decoder import padded
from cupyflash.ops.decode.embedding import embedding
from cupyflash.precompile import TOPICS
from cupyflash.runtime import driver, launch
from cupyflash.runtime.launch import Launch, dependent_launches
from cupyflash.runtime.scratch import no_garbage_collected


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, 12.9 and 13.0: the value is a union of 64 bytes at 8."""

    _fields_ = [("id", c_int), ("pad", c_int), ("flag", c_int), ("rest", c_int * 15)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_memory", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(Attribute)),
        ("num_attributes", c_uint),
    ]


@pytest.fixture
def launches(monkeypatch):
    """What cuLaunchKernelEx was called with: (function, numbers, attributes, argument, extra)."""

    class Calls(list):
        status = 0

        def __call__(self, config, function, arguments, extra):
            config = Config.from_buffer_copy(config)
            attributes = {x.id: x.flag for x in config.attributes[: config.num_attributes]}
            numbers = (*config.grid, *config.block, config.shared_memory, config.stream)
            self.append((function, numbers, attributes, arguments[0], extra))
            return self.status

    calls = Calls()
    fake_driver(monkeypatch, lambda name: calls)
    return calls


def test_what_the_driver_is_asked_for(launches):
    launch.launch_dependent(77, 5, 128, 2**17, 2**33, b"abcde")
    numbers = (5, 1, 1, 128, 1, 1, 2**17, 2**33)
    assert launches == [(77, numbers, {6: 1}, b"abcde", None)]
    launches.status = 1
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with 1: 5 blocks of 128"):
        launch.launch_dependent(77, 5, 128, 2**17, 99, b"abcde")


def test_a_thread_without_a_context_gets_one(launches, monkeypatch):
    """The driver knows none in a new thread until a call of the CUDA runtime; then again."""
    runtime = pytest.importorskip("cupy").cuda.runtime
    freed = []
    fake_driver(monkeypatch, lambda name: fails_first)
    monkeypatch.setattr(runtime, "free", freed.append)

    def fails_first(*arguments):
        launches.append(arguments)
        return 0 if freed else driver.INVALID_CONTEXT

    launch.launch_dependent(77, 5, 128, 0, 99, b"abcde")
    assert freed == [0] and len(launches) == 2 and launches[0] == launches[1]
    launch.launch_dependent(77, 5, 128, 0, 99, b"abcde")
    assert freed == [0] and len(launches) == 3


class Recording:
    """Takes the place of a kernel's function and a stream."""

    ptr = 77

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.mark.parametrize("dependent", [False, True])
def test_only_what_can_wait_begins_early_and_only_where_it_is_wanted(launches, dependent):
    launch = Launch.__new__(Launch)
    launch.function, launch.grid, launch.threads = Recording(), 5, 128
    launch.shared_memory, launch.cooperative, launch.dependent = 0, False, dependent
    launch.start(Recording(), b"first")
    assert (len(launches), len(launch.function.calls)) == (0, 1)
    with pytest.raises(KeyError), dependent_launches():
        launch.start(Recording(), b"later")
        raise KeyError
    assert (len(launches), len(launch.function.calls)) == ((1, 1) if dependent else (0, 2))
    launch.start(Recording(), b"again")
    assert len(launches) == dependent


@pytest.mark.parametrize(
    ("capability", "version", "possible"),
    [((9, 0), 12030, True), ((12, 0), 13000, True), ((8, 9), 13000, False), ((9, 0), 12020, False)],
)
def test_older_gpus_and_drivers_launch_as_ever(monkeypatch, capability, version, possible):
    runtime = pytest.importorskip("cupy").cuda.runtime
    fake_facts(monkeypatch, runtime, driverGetVersion=version)
    assert launch.dependent_possible.__wrapped__(capability) == possible


def test_kernels_that_say_so_wait():
    """One that does not wait would read too soon, and one that waits may as well begin early."""
    for topic in TOPICS.values():
        for config in {type(x): x for x in topic.configurations((9, 0))}.values():
            text = b"".join(sources.closure(config.source).values())
            waits = text.count(b"wait_for_previous_kernel();") > 0
            assert waits == (text.count(b"launch_next_kernel();") > 0) == config.dependent, config


# On a GPU -------------------------------------------------------------------------------------

on_hopper = pytest.mark.skipif(compute_capability()[0] < 90, reason="needs compute capability 9.0")
LATE = r"""
extern "C" __global__ void late(const char* from, char* to, long long bytes) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const long long begin = clock64();
  while (clock64() - begin < 50000) {}  // 25 us: enough to read what is not there yet
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += gridDim.x * blockDim.x)
    to[i] = from[i];
}
"""


def float16(cupy, *shape, seed=0):
    values = numpy.random.default_rng((seed, *shape)).standard_normal(shape, "float32")
    return cupy.asarray(values * shape[-1] ** -0.5).astype("float16")


def operations(cupy):
    """name: (shapes and dtype of what comes late, function of it); the rest is constant."""
    weight, bias = float16(cupy, 768, 256), float16(cupy, 768)
    norm = cupyflash.Norm(float16(cupy, 256), float16(cupy, 256, seed=1))
    down = float16(cupy, 256, 768)
    cache = [float16(cupy, 20, 300, 4, 64, seed=seed) for seed in (2, 3)]
    positions = cupy.asarray(numpy.random.default_rng(0).integers(0, 300, 20), "int32")
    x, heads = [(20, 256)], [(20, 1, 4, 64)] * 3
    deep = float16(cupy, 4096, 2048)  # so deep that linear_small_m takes a row
    long = [float16(cupy, 2, 20000, 1, 64, seed=seed) for seed in (2, 3)]
    lengths = cupy.asarray([100, 19999], "int32")
    bytes_of_cache = [cupy.ones((20, 300, 4, 64), "int8") for _ in range(2)]
    scales = {name: cupy.ones((20, 300, 4), "float32") for name in ("k_scale", "v_scale")}

    def attention(q, k, v):
        return cupyflash.attention_with_cache(q, k, v, *cache, positions)

    def splits(q, k, v):
        return cupyflash.attention_with_cache(q, k, v, *long, lengths)

    def narrow(q, k, v):
        return cupyflash.attention_with_cache(q, k, v, *bytes_of_cache, positions, **scales)

    return {
        "embedding": ([(20,)], "int32", lambda tokens: embedding(tokens, weight)),
        "linear": (x, "float16", lambda x: cupyflash.linear(x, weight, bias)),
        "residual": (x, "float16", lambda x: cupyflash.linear(x, weight[:256], residual=x)),
        "norm": (x, "float16", lambda x: cupyflash.linear(x, weight, bias, norm=norm)),
        "mlp": (x, "float16", lambda x: cupyflash.mlp(x, weight, down, residual=x, norm=norm)),
        "norm alone": (x, "float16", lambda x: cupyflash.layer_norm(x, *norm[:2])),
        "deep": ([(1, 2048)], "float16", lambda x: cupyflash.linear(x, deep)),
        "attention": (heads, "float16", attention),
        "splits": ([(2, 1, 1, 64)] * 3, "float16", splits),
        "narrow": (heads, "float16", narrow),
    }


NAMES = (
    *("embedding", "linear", "residual", "norm", "mlp", "norm alone", "deep", "attention"),
    *("splits", "narrow"),
)


@on_hopper
@pytest.mark.parametrize("name", NAMES)
def test_kernels_wait_for_the_one_before(name):
    """It lets them begin at once, and writes what they read by far later."""
    import cupy

    late = cupy.RawKernel(LATE, "late")
    stream, rng = cupy.cuda.Stream(non_blocking=True), numpy.random.default_rng(0)
    with stream, no_garbage_collected():
        shapes, dtype, function = operations(cupy)[name]
        given = [cupy.zeros(shape, dtype) for shape in shapes]
        arrays = [cupy.empty_like(x) for x in given]

        def run():
            for x, array in zip(given, arrays):
                late((16,), (128,), (x, array, x.nbytes))
            return function(*arrays)

        run()
        stream.synchronize()
        stream.begin_capture()
        try:
            with dependent_launches():
                result = run()
        finally:
            graph = stream.end_capture()
        for _ in range(10):
            for x, array in zip(given, arrays):
                values = rng.integers(0, 256, x.shape)
                x[...] = cupy.asarray(values if dtype == "int32" else values / 128 - 1)
                array[...] = 7
            graph.launch(stream)
            assert cupy.array_equal(result, function(*given))


@on_hopper
def test_the_first_launch_of_a_thread():
    """Which has no context yet; also the question how many clusters run at once."""
    import cupy

    from cupyflash.ops.norm.kernels import NormFwdCluster, configurations
    from cupyflash.runtime import launch

    shapes, dtype, function = operations(cupy)["embedding"]
    tokens = cupy.ones(shapes[0], dtype)
    right, found = function(tokens), []
    config = next(x for x in configurations((9, 0)) if isinstance(x, NormFwdCluster))
    launch.jit.load(config, 0)
    launch._clusters_of_all.cache_clear()
    cupy.cuda.Device().synchronize()

    def early():
        with dependent_launches():
            found.append(function(tokens))
        cupy.cuda.Device().synchronize()

    for work in (early, lambda: found.append(launch.clusters_at_once(config, 0))):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert cupy.array_equal(found[0], right) and found[1] > 1


@on_hopper
@pytest.mark.parametrize(
    ("batch", "dtype", "backend"),
    [(3, "float16", None), (20, "float32", None), (32, "bfloat16", None), (32, "float16", "sm80")],
)
def test_steps_of_gpt2_are_the_same_bits(monkeypatch, batch, dtype, backend):
    """As a graph with such launches and as one without, on the same tokens, without pauses."""
    import cupy

    target = next(x for x in TARGETS if x.library == "cupy" and x.gpu and not x.missing)
    gpt2 = tiny(target, dtype)
    launched, start = [], launch.launch_dependent
    monkeypatch.setattr(launch, "launch_dependent", lambda *x: launched.append(None) or start(*x))
    decoders, counts = [], []
    for wanted in (True, False):
        with monkeypatch.context() as patch, environment.override(backend=backend):
            if not wanted:
                fake_facts(patch, launch, dependent_wanted=False)
            engine = Engine(gpt2.paged, pages=batch + 1, page_size=128, max_batch=batch)
            for prompt in prompts(*range(1, batch + 1)):
                engine.submit(prompt, 3)
            while not engine.decoder.graphs:
                engine.step()
        decoders.append(engine.decoder)
        counts.append(len(launched))
    assert 0 < counts[0] == counts[1]
    rng = numpy.random.default_rng(batch)
    for _ in range(300):
        tokens = cupy.asarray(rng.integers(0, 101, batch), "int32")
        positions = cupy.asarray(rng.integers(0, 128, batch), "int32")
        for decoder in decoders:
            for x, values in zip(decoder.state, (tokens, positions)):
                x[:batch] = values
        first, second = (decoder.graphs[padded(batch)]()[:batch] for decoder in decoders)
        assert cupy.array_equal(first, second)
