"""GPU time of several calls on the same tensors, and the ceilings of the card (torch only)."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

# A call slower than this in all leaves the rounds early, with no fewer repeats than the second.
LIMIT_MS, LEAST_REPEATS = 1000.0, 5
WARM_UPS, WARM_UP_S = 3, 0.5  # a call is run so often, or for so long, before it is timed
SLEEP_CYCLES_PER_SECOND = 2_000_000_000  # torch.cuda._sleep counts SM clock cycles
LONGEST_SLEEP_S = 0.05

PROTOCOL = (
    "CUDA events around each call; before each the L2 is left cold and clean (a write, then a read "
    "of something else, of three times its size at least) and the GPU sleeps at least twice as "
    "long as the host needs to enqueue the call, so that launch cost stays out; all providers in "
    "turn on the same standard normal tensors, in a random order every round; median of {repeats} "
    "rounds (a provider that has taken "
    f"{LIMIT_MS / 1000:g} s leaves after at least {LEAST_REPEATS}); FLOPs 4*B*H*Sq*Sk*D, causal "
    "half, backward 2.5 times; the backward is the whole autograd.grad"
)


@dataclasses.dataclass(frozen=True)
class Timing:
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


class Timer:
    """Times calls in turn by the protocol above.

    The order is a random one every round. In one that only rotates, a call always follows the same
    other one, and at the power limit a call that follows a slow one finds a cool GPU.

    Attributes:
        repeats: how often a call is timed.
        least_repeats: how often one that takes long is timed.
        sm_mhz: median SM clock while the last `compare` ran; None without nvidia-ml-py.
    """

    def __init__(self, repeats: int) -> None:
        self.repeats, self.least_repeats = repeats, LEAST_REPEATS
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        numbers = max(256 << 20, 3 * l2_bytes) // 4
        self.flush = torch.zeros(2, numbers, device="cuda")
        self.largest = torch.zeros((), device="cuda")
        self.sm_mhz: int | None = None

    def compare(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Times of the calls by name; each has run at least once before."""
        sleeps = {name: _sleep_cycles(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        late, clocks, orders = dict.fromkeys(calls, 0), [], random.Random(0)
        for _ in range(self.repeats):
            due = [
                name
                for name in orders.sample(list(calls), len(calls))
                if len(samples[name]) < self.least_repeats or sum(samples[name]) < LIMIT_MS
            ]
            events = {}
            for name in due:
                start, end = events[name] = _event(), _event()
                self.empty_l2()
                torch.cuda._sleep(sleeps[name])
                start.record()
                calls[name]()
                end.record()
                late[name] += start.query()  # the GPU got here before the host was done
            clocks.append(_sm_mhz())  # the GPU still works on this round
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                samples[name].append(start.elapsed_time(end))
        clocks = [clock for clock in clocks if clock is not None]
        self.sm_mhz = round(statistics.median(clocks)) if clocks else None
        return {
            name: Timing(statistics.median(times), _quartiles(times), len(times), late[name])
            for name, times in samples.items()
        }

    def empty_l2(self) -> None:
        """Leave the L2 cold and clean.

        What a write leaves there has to be written back, which would take bandwidth from the call;
        so something else is read after it.
        """
        written, read = self.flush
        written.zero_()
        torch.amax(read, 0, out=self.largest)

    def ceilings(self) -> dict[str, float]:
        """The card's bfloat16 matrix-product rate and its copy bandwidth (read + write)."""
        n = 8192
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        product = torch.empty_like(a)
        source = torch.randn(1 << 28, device="cuda")
        target = torch.empty_like(source)
        times = self.compare(
            {
                "matmul": lambda: torch.matmul(a, b, out=product),
                "copy": lambda: target.copy_(source),
            }
        )
        return {
            "matmul_tflops": round(2 * n**3 / times["matmul"].ms / 1e9, 1),
            "copy_gbps": round(2 * source.nbytes / times["copy"].ms / 1e6, 1),
        }


def medians(clocks: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, float]:
    """The median of what each clock returns, all in turn, in a random order every round."""
    samples: dict[Any, list[float]] = {name: [] for name in clocks}
    orders = random.Random(0)
    for _ in range(repeats):
        for name in orders.sample(list(clocks), len(clocks)):
            samples[name].append(clocks[name]())
    return {name: statistics.median(times) for name, times in samples.items()}


def _quartiles(times: list[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    first, _, third = statistics.quantiles(times, method="inclusive")
    return first, third


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _sleep_cycles(call: Callable[[], Any]) -> int:
    """Warm up, and how long the GPU must sleep for the host to enqueue ``call`` meanwhile."""
    torch.cuda.synchronize()
    host_s, first = [], time.perf_counter()
    while len(host_s) < WARM_UPS and time.perf_counter() - first < WARM_UP_S:
        begin = time.perf_counter()
        call()
        host_s.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    seconds = min(LONGEST_SLEEP_S, 2 * statistics.median(host_s) + 200e-6)
    return int(seconds * SLEEP_CYCLES_PER_SECOND)


def _sm_mhz() -> int | None:
    try:
        return torch.cuda.clock_rate()
    except Exception:  # no nvidia-ml-py, or NVML's own error where a GPU does not tell
        return None
