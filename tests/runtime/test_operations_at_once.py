"""Every operation from many threads, on two streams, on another device, in graphs; what is kept."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import threading

import numpy
import pytest
from devices import delay, new_stream
from matrix import each_library, each_marked, libraries, select
from operations import NO_BACKEND, OPERATIONS, copies, equal

from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.testing import to_numpy64

THREADS = 8
each_operation = pytest.mark.parametrize("name", each_marked(OPERATIONS, NO_BACKEND))


def each(**where):
    """Parametrises a test over all operations, on each target those that come in backends."""
    parameters = []
    for name in OPERATIONS:
        of_backends = name not in NO_BACKEND
        marks = () if of_backends else pytest.mark.no_backend
        for target in (select if of_backends else libraries)(**where):
            test = f"{name}-{target.name}"
            parameters.append(pytest.param(target, name, marks=marks, id=test))
    return pytest.mark.parametrize(("target", "name"), parameters, indirect=["target"])


def own_stream(target):
    return new_stream(target) if target.gpu else (None, contextlib.nullcontext())


@each()
def test_eight_threads(target, name):
    """Each with values of its own, all of a shape that nobody has a plan for yet."""
    if not target.gpu and any(word in name for word in ("long", "few queries", "many rows")):
        pytest.skip("the CPU has one path for every length")
    odd = 8 * (1 + [*OPERATIONS].index(name) % 3)
    problems = [OPERATIONS[name](target, seed, odd) for seed in range(THREADS)]
    inputs = [copies(arrays) for arrays, _ in problems]
    target.synchronize()
    start = threading.Barrier(THREADS)

    def work(number):
        _, call = problems[number]
        stream, current = own_stream(target)
        start.wait()
        with current:
            found = [copies(call(*inputs[number])) for _ in range(10 if target.gpu else 2)]
        if stream:
            stream.synchronize()
        return found

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS)))
    for (arrays, call), results in zip(problems, found):
        right = call(*arrays)
        assert all(equal(result, right) for result in results)


@each(device="cuda")
def test_two_streams(target, name):
    """Launches that wait in two streams, and then run side by side."""
    problems = [OPERATIONS[name](target, seed) for seed in (0, 1)]
    right = [copies(call(*arrays)) for arrays, call in problems]
    streams = [new_stream(target) for _ in problems]
    target.synchronize()
    for _, current in streams:
        with current:
            delay(target)
    found = [], []
    for _ in range(20):
        for (arrays, call), results, (_, current) in zip(problems, found, streams):
            with current:
                results.append(copies(call(*arrays)))
    for stream, _ in streams:
        stream.synchronize()
    for expected, results in zip(right, found):
        assert all(equal(result, expected) for result in results)


@contextlib.contextmanager
def memory_kept():
    """No memory is used again: CuPy's pool, too, takes streams of one handle for one stream."""
    import cupy

    allocate, kept = cupy.get_default_memory_pool().malloc, []

    def allocate_and_keep(size):
        kept.append(allocate(size))
        return kept[-1]

    with cupy.cuda.using_allocator(allocate_and_keep):
        yield
        cupy.cuda.Device().synchronize()


@each_library(library="cupy", device="cuda")
@each_operation
def test_streams_that_are_gone_while_their_work_waits(target, name):
    """CUDA gives the handle of such a stream to the next one, whose work then runs beside it."""
    problems = [OPERATIONS[name](target, seed) for seed in range(4)]
    right = [copies(call(*arrays)) for arrays, call in problems]
    late, current = new_stream(target)
    target.synchronize()
    with current:
        for _ in range(4):
            delay(target)
    start, found = late.record(), []
    with memory_kept():
        for number in range(40):
            arrays, call = problems[number % 4]
            stream, current = new_stream(target)
            stream.wait_event(start)
            with current:
                found.append(copies(call(*arrays)))
            del stream, current
    for number, results in enumerate(found):
        assert equal(results, right[number % 4])


class Graph:
    """A call captured by torch or by CuPy; ``results`` are its."""

    def __init__(self, target, call):
        self.torch = target.library == "torch"
        if self.torch:
            import torch

            self.graph = torch.cuda.CUDAGraph()
            with no_garbage_collected(), torch.cuda.graph(self.graph):
                self.results = call()
            return
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream, no_garbage_collected():
            call()  # fills this stream's part of the memory pool
            self.stream.begin_capture()
            self.results = call()
            self.graph = self.stream.end_capture()

    def replay(self):
        if self.torch:
            self.graph.replay()
        else:
            self.graph.launch(self.stream)
            self.stream.synchronize()


def allocated_later(target):
    """Arrays of many sizes, all 7, where memory is free now."""
    found = []
    for size in (1, 100, 4096, 10**5, 10**6, 4 * 10**6):
        for _ in range(12):
            if target.library == "torch":
                import torch

                found.append(torch.full((size,), 7, dtype=torch.int32, device="cuda"))
            else:
                import cupy

                found.append(cupy.full(size, 7, "int32"))
    return found


@each(device="cuda")
def test_graph_replayed_after_other_allocations(target, name):
    """It reads the values of the day, and writes to nothing but its results."""
    arrays, call = OPERATIONS[name](target, 0)
    others, _ = OPERATIONS[name](target, 1)
    right = copies(call(*copies(others)))
    call(*arrays)
    target.synchronize()
    graph = Graph(target, lambda: call(*arrays))
    gc.collect()
    later = allocated_later(target)
    if target.library == "cupy":
        with graph.stream:  # the pool keeps what a stream has freed for that stream
            later += allocated_later(target)
        graph.stream.synchronize()
    for _ in range(2):
        for x, y in zip(arrays, others):
            x[...] = y
        for x in graph.results:
            if not any(x is y for y in arrays):
                x[...] = 0
        target.synchronize()
        graph.replay()
        target.synchronize()
        assert equal(graph.results, right)
        assert all(bool((x == 7).all()) for x in later)


@each_library(device="cuda")
@each_operation
def test_another_device_than_the_current_one(target, name):
    import cupy

    last = cupy.cuda.runtime.getDeviceCount() - 1
    if last == 0:
        pytest.skip("needs two GPUs")
    arrays, call = OPERATIONS[name](target, 0)
    right = [to_numpy64(x) for x in call(*arrays)]
    device = f"cuda:{last}" if target.library == "torch" else "cuda"
    with cupy.cuda.Device(last):
        arrays, call = OPERATIONS[name](dataclasses.replace(target, device=device), 0)
        cupy.cuda.Device().synchronize()
    found = call(*arrays)
    assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(last):
        cupy.cuda.Device().synchronize()
        assert equal([to_numpy64(x) for x in found], right)


def used_bytes(target):
    """Device memory that somebody holds, by either library."""
    import cupy

    gc.collect()
    target.synchronize()
    total = cupy.get_default_memory_pool().used_bytes()
    if target.library == "torch":
        import torch

        total += torch.cuda.memory_allocated()
    return total


@each_library(device="cuda")
@each_operation
def test_memory_after_a_hundred_problems(target, name):
    """Weights and results that are dropped are free again, also those of a shape used once."""

    def use(number, odd):
        arrays, call = OPERATIONS[name](target, number, odd)
        call(*arrays)

    use(0, 0)
    use(1, 8)
    before = used_bytes(target)
    for number in range(50):
        use(number, 0)
        use(number, 8 * (number % 10))
    after = used_bytes(target)
    assert after <= before, f"{after - before} bytes more after 100 problems"


@each_library(library="torch", device="cuda")
@each_operation
def test_memory_after_a_hundred_graphs(target, name):
    """A graph that is gone has given everything back; its private pool, too."""
    import torch

    arrays, call = OPERATIONS[name](target, 0)
    call(*arrays)

    def reserved():
        used = used_bytes(target)
        torch.cuda.empty_cache()
        return used, torch.cuda.memory_reserved()

    for _ in range(2):  # what torch keeps of its first graphs
        Graph(target, lambda: call(*arrays)).replay()
    before = reserved()
    for _ in range(100):
        Graph(target, lambda: call(*arrays)).replay()
    after = reserved()
    assert after[0] <= before[0] and after[1] <= before[1], (before, after)


@each(device="cpu")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_numpy_says_nothing(target, name, dtype):
    """NaN, infinity and overflow are results like others on the CPU, as in torch."""
    if any(word in name for word in ("long", "few queries", "many rows")):
        pytest.skip("the CPU has one path for every length")
    arrays, call = OPERATIONS[name](dataclasses.replace(target, dtypes=(dtype,)), 0)
    for value in (numpy.nan, numpy.inf, float(numpy.finfo(dtype).max)):
        for place, x in enumerate(arrays):
            if "float" in str(x.dtype):
                changed = copies(arrays)
                changed[place][..., ::3] = value
                with numpy.errstate(all="raise"):
                    call(*changed)
