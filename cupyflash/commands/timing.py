"""GPU time of calls, by CuPy's events: for ``cupyflash check`` and ``cupyflash tune``."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.gpu import l2_bytes

FLUSH_BYTES = 256 << 20  # at least
LEAST_ROUNDS = 5  # before a slow call leaves
SLOW = 1.1  # times the fastest median

PROTOCOL = (
    "CUDA events around each call; before each the L2 is left cold and clean (a write, then a read "
    "of something else, of three times its size at least), which also hides launch cost; all "
    "candidates in turn on the same standard normal arrays, the order rotated every round; medians "
    f"(a candidate {SLOW} times as slow as the fastest leaves after {LEAST_ROUNDS} rounds)"
)


def milliseconds(call: Callable[[], Any]) -> float:
    """Time of a call, which has run before, and of its launches where the GPU waits for them."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end)


class Rounds:
    """Times calls in turn, the order rotated every round; a slow one leaves after a few.

    Before each call the L2 is left cold and clean: something is written, then something else read,
    of three times its size at least. That takes the GPU long enough for the host to enqueue the
    call meanwhile, so launch cost stays out.
    """

    def __init__(self, calls: Mapping[Any, Callable[[], Any]]) -> None:
        import cupy

        size = max(FLUSH_BYTES, 3 * l2_bytes(cupy.cuda.Device().id))
        self.written, self.read = cupy.zeros((2, size // 4), "float32")
        self.largest = cupy.zeros((), "float32")
        self.calls, self.order = calls, list(calls)
        self.samples: dict[Any, list[float]] = {name: [] for name in calls}

    def run(self) -> int:
        """One round more; returns how many there were."""
        for name in self.order:
            self.written.fill(0)
            self.read.max(out=self.largest)
            self.samples[name].append(milliseconds(self.calls[name]))
        rounds = max(map(len, self.samples.values()))
        if rounds >= LEAST_ROUNDS:
            medians = self.medians()
            limit = SLOW * min(medians.values())
            self.order = [name for name in self.order if medians[name] <= limit]
        self.order = [*self.order[1:], *self.order[:1]]
        return rounds

    def medians(self) -> dict[Any, float]:
        """Milliseconds of each call."""
        return {name: statistics.median(times) for name, times in self.samples.items()}
