"""GPU time of several calls on the same tensors, and the ceilings of the card (torch only)."""

import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cupyflash.testing import timing
from cupyflash.testing.timing import Rounds, Timing

# A call slower than this in all leaves the rounds early, with no fewer repeats than the second.
LIMIT_MS, LEAST_REPEATS = 1000.0, 5
PROTOCOL = (
    f"{timing.PROTOCOL}; median of {{repeats}} rounds (a provider that has taken "
    f"{LIMIT_MS / 1000:g} s leaves after at least {LEAST_REPEATS}); FLOPs 4*B*H*Sq*Sk*D, causal "
    "half, backward 2.5 times; the backward is the whole autograd.grad"
)


class Timer:
    """Times calls in rounds of `cupyflash.testing.timing`.

    Attributes:
        repeats: how often a call is timed.
        least_repeats: how often one that takes long is timed.
        sm_mhz: median SM clock while the last `compare` ran; None without nvidia-ml-py.
    """

    def __init__(self, repeats: int) -> None:
        self.repeats, self.least_repeats = repeats, LEAST_REPEATS
        self.sm_mhz: int | None = None

    def compare(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Times of the calls by name; each has run at least once before."""
        rounds, clocks = Rounds(calls), []
        for _ in range(self.repeats):
            due = [
                name
                for name, ms in rounds.samples.items()
                if len(ms) < self.least_repeats or sum(ms) < LIMIT_MS
            ]
            rounds.run(due, meanwhile=lambda: clocks.append(_sm_mhz()))
        clocks = [clock for clock in clocks if clock is not None]
        self.sm_mhz = round(statistics.median(clocks)) if clocks else None
        return rounds.timings()

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


def _sm_mhz() -> int | None:
    try:
        return torch.cuda.clock_rate()
    except Exception:  # no nvidia-ml-py, or NVML's own error where a GPU does not tell
        return None
