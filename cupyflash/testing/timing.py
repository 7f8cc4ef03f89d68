"""The clock of benchmarks and of the command line: GPU time of calls, by CuPy's events."""

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..runtime.gpu import l2_bytes

FLUSH_BYTES = 256 << 20  # at least
WARM_UPS, WARM_UP_S = 3, 0.5  # a call is run so often, or for so long, before it is timed
LONGEST_WAIT_S = 0.05
WAIT = r"""
extern "C" __global__ void wait(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
"""
PROTOCOL = (
    "CUDA events around each call; before each the L2 is left cold and clean (a write, then a read "
    "of something else, of three times its size at least) and the GPU waits at least twice as "
    "long as the host needs to enqueue the call, so that launch cost stays out; all in turn on the "
    "same standard normal data, in a random order every round"
)


class Timing(NamedTuple):
    """The time of a call.

    Attributes:
        ms: the median.
        quartiles: the first and the third, in ms.
        repeats: how often the call was timed.
        late: in how many of them the host did not keep ahead of the GPU.
    """

    ms: float
    quartiles: tuple[float, float]
    repeats: int
    late: int


class Rounds:
    """Times calls in turn by the protocol above; each has run before.

    The order is a random one every round. In one that only rotates, a call always follows the same
    other one, and at the power limit a call that follows a slow one finds a cool GPU.

    What a write leaves in the L2 has to be written back, which would take bandwidth from the call;
    so something else is read after it.

    Attributes:
        samples: the milliseconds of each call.
        late: how often the GPU came to a call before the host had enqueued it.
    """

    def __init__(self, calls: Mapping[Any, Callable[[], Any]]) -> None:
        import cupy

        size = max(FLUSH_BYTES, 3 * l2_bytes(cupy.cuda.Device().id))
        self.written, self.read = cupy.zeros((2, size // 4), "float32")
        self.largest = cupy.zeros((), "float32")
        self.calls, self.order = calls, random.Random(0)
        self.waits = {name: _wait_ns(call) for name, call in calls.items()}
        self.samples: dict[Any, list[float]] = {name: [] for name in calls}
        self.late = dict.fromkeys(calls, 0)

    def run(
        self, names: Iterable[Any] | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """One round more.

        Args:
            names: of the calls that are timed; default all.
            meanwhile: is called once, while the GPU works.
        """
        import cupy

        names, events = list(self.calls if names is None else names), {}
        for name in self.order.sample(names, len(names)):
            start, end = events[name] = cupy.cuda.Event(), cupy.cuda.Event()
            self.written.fill(0)
            self.read.max(out=self.largest)
            _wait_kernel()((1,), (1,), (self.waits[name],))
            start.record()
            self.calls[name]()
            end.record()
            self.late[name] += start.done
        meanwhile()
        for name, (start, end) in events.items():
            end.synchronize()
            self.samples[name].append(cupy.cuda.get_elapsed_time(start, end))

    def timings(self) -> dict[Any, Timing]:
        return {
            name: Timing(statistics.median(ms), _quartiles(ms), len(ms), self.late[name])
            for name, ms in self.samples.items()
        }


def _quartiles(times: list[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    first, _, third = statistics.quantiles(times, method="inclusive")
    return first, third


@functools.cache
def _wait_kernel() -> Any:
    import cupy

    return cupy.RawKernel(WAIT, "wait")


def _wait_ns(call: Callable[[], Any]) -> int:
    """Warm up; how many nanoseconds the GPU must wait for the host to enqueue ``call``."""
    import cupy

    device = cupy.cuda.Device()
    device.synchronize()
    host_s, first = [], time.perf_counter()
    while len(host_s) < WARM_UPS and time.perf_counter() - first < WARM_UP_S:
        begin = time.perf_counter()
        call()
        host_s.append(time.perf_counter() - begin)
        device.synchronize()
    return int(1e9 * min(LONGEST_WAIT_S, 2 * statistics.median(host_s) + 200e-6))
