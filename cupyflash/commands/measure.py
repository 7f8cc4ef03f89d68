"""Time and extra memory of one call, for ``cupyflash check``; bench/ measures more carefully."""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

REPEATS = {"numpy": 1, "cupy": 10}
_BACKWARD_FLOPS = 2.5  # of the forward pass: five matrix products instead of two


def milliseconds(library: str, call: Callable[[], Any]) -> float:
    """Median time of ``call``, which has run before, on the GPU for "cupy", else on the CPU."""
    timed = _gpu_milliseconds if library == "cupy" else _cpu_milliseconds
    return statistics.median(timed(call) for _ in range(REPEATS[library]))


def peak_bytes(library: str, call: Callable[[], Any]) -> int:
    """The most memory that ``call`` holds at a time, its results included."""
    if library == "cupy":
        import cupy

        pool = cupy.cuda.MemoryPool()  # an empty one, which grows to the peak
        with cupy.cuda.using_allocator(pool.malloc):
            call()
        return pool.total_bytes()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def attention_flops(
    lengths: Sequence[tuple[int, int]], heads_q: int, head_dim: int, backward: bool
) -> float:
    """Floating-point operations of causal sequences of (seqlen_q, seqlen_k)."""
    pairs = 0.0
    for seqlen_q, seqlen_k in lengths:  # the last query sees all keys, the one before one less …
        rows = min(seqlen_q, seqlen_k)
        pairs += rows * (seqlen_k - rows) + rows * (rows + 1) / 2
    return 4 * pairs * heads_q * head_dim * (_BACKWARD_FLOPS if backward else 1)


def _gpu_milliseconds(call: Callable[[], Any]) -> float:
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end)


def _cpu_milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
