"""Every operation from many threads, on two streams, on another device, in graphs; what is kept."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import threading

import pytest
from matrix import each, each_library
from operations import OPERATIONS, copies, equal
from test_concurrency import delay, new_stream

from cupyflash.testing import to_numpy64

THREADS = 8
each_operation = pytest.mark.parametrize("name", OPERATIONS)


def own_stream(backend):
    return new_stream(backend) if backend.gpu else (None, contextlib.nullcontext())


@each()
@each_operation
def test_eight_threads(backend, name):
    """Each with values of its own, all of a shape that nobody has a plan for yet."""
    if not backend.gpu and name.startswith("long"):
        pytest.skip("the CPU has one path for every length")
    odd = 8 * (1 + [*OPERATIONS].index(name) % 3)
    problems = [OPERATIONS[name](backend, seed, odd) for seed in range(THREADS)]
    inputs = [copies(arrays) for arrays, _ in problems]
    backend.synchronize()
    start = threading.Barrier(THREADS)

    def work(number):
        _, call = problems[number]
        stream, current = own_stream(backend)
        start.wait()
        with current:
            found = [copies(call(*inputs[number])) for _ in range(10 if backend.gpu else 2)]
        if stream:
            stream.synchronize()
        return found

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS)))
    for (arrays, call), results in zip(problems, found):
        right = call(*arrays)
        assert all(equal(result, right) for result in results)


@each(device="cuda")
@each_operation
def test_two_streams(backend, name):
    """Launches that wait in two streams, and then run side by side."""
    problems = [OPERATIONS[name](backend, seed) for seed in (0, 1)]
    right = [copies(call(*arrays)) for arrays, call in problems]
    streams = [new_stream(backend) for _ in problems]
    backend.synchronize()
    for _, current in streams:
        with current:
            delay(backend)
    found = [], []
    for _ in range(20):
        for (arrays, call), results, (_, current) in zip(problems, found, streams):
            with current:
                results.append(copies(call(*arrays)))
    for stream, _ in streams:
        stream.synchronize()
    for expected, results in zip(right, found):
        assert all(equal(result, expected) for result in results)


class Graph:
    """A call captured by torch or by CuPy; ``results`` are its."""

    def __init__(self, backend, call):
        self.torch = backend.library == "torch"
        if self.torch:
            import torch

            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results = call()
            return
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
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


def allocated_later(backend):
    """Arrays of many sizes, all 7, where memory is free now."""
    found = []
    for size in (1, 100, 4096, 10**5, 10**6, 4 * 10**6):
        for _ in range(12):
            if backend.library == "torch":
                import torch

                found.append(torch.full((size,), 7, dtype=torch.int32, device="cuda"))
            else:
                import cupy

                found.append(cupy.full(size, 7, "int32"))
    return found


@each(device="cuda")
@each_operation
def test_graph_replayed_after_other_allocations(backend, name):
    """It reads the values of the day, and writes to nothing but its results."""
    arrays, call = OPERATIONS[name](backend, 0)
    others, _ = OPERATIONS[name](backend, 1)
    right = copies(call(*copies(others)))
    call(*arrays)
    backend.synchronize()
    graph = Graph(backend, lambda: call(*arrays))
    gc.collect()
    later = allocated_later(backend)
    if backend.library == "cupy":
        with graph.stream:  # the pool keeps what a stream has freed for that stream
            later += allocated_later(backend)
        graph.stream.synchronize()
    for _ in range(2):
        for x, y in zip(arrays, others):
            x[...] = y
        for x in graph.results:
            if not any(x is y for y in arrays):
                x[...] = 0
        backend.synchronize()
        graph.replay()
        backend.synchronize()
        assert equal(graph.results, right)
        assert all(bool((x == 7).all()) for x in later)


@each_library(device="cuda")
@each_operation
def test_another_device_than_the_current_one(backend, name):
    import cupy

    last = cupy.cuda.runtime.getDeviceCount() - 1
    if last == 0:
        pytest.skip("needs two GPUs")
    arrays, call = OPERATIONS[name](backend, 0)
    right = [to_numpy64(x) for x in call(*arrays)]
    device = f"cuda:{last}" if backend.library == "torch" else "cuda"
    with cupy.cuda.Device(last):
        arrays, call = OPERATIONS[name](dataclasses.replace(backend, device=device), 0)
        cupy.cuda.Device().synchronize()
    found = call(*arrays)
    assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(last):
        cupy.cuda.Device().synchronize()
        assert equal([to_numpy64(x) for x in found], right)


def used_bytes(backend):
    """Device memory that somebody holds, by either library."""
    import cupy

    gc.collect()
    backend.synchronize()
    total = cupy.get_default_memory_pool().used_bytes()
    if backend.library == "torch":
        import torch

        total += torch.cuda.memory_allocated()
    return total


@each_library(device="cuda")
@each_operation
def test_memory_after_a_hundred_problems(backend, name):
    """Weights and results that are dropped are free again, also those of a shape used once."""

    def use(number, odd):
        arrays, call = OPERATIONS[name](backend, number, odd)
        call(*arrays)

    use(0, 0)
    use(1, 8)
    before = used_bytes(backend)
    for number in range(50):
        use(number, 0)
        use(number, 8 * (number % 10))
    after = used_bytes(backend)
    assert after <= before, f"{after - before} bytes more after 100 problems"


@each_library(library="torch", device="cuda")
@each_operation
def test_memory_after_a_hundred_graphs(backend, name):
    """A graph that is gone has given everything back; its private pool, too."""
    import torch

    arrays, call = OPERATIONS[name](backend, 0)
    call(*arrays)

    def reserved():
        used = used_bytes(backend)
        torch.cuda.empty_cache()
        return used, torch.cuda.memory_reserved()

    for _ in range(2):  # what torch keeps of its first graphs
        Graph(backend, lambda: call(*arrays)).replay()
    before = reserved()
    for _ in range(100):
        Graph(backend, lambda: call(*arrays)).replay()
    after = reserved()
    assert after[0] <= before[0] and after[1] <= before[1], (before, after)
