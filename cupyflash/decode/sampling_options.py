"""How tokens are chosen from logits, and what a sampled token advances."""

import dataclasses
import math
import secrets
from typing import NamedTuple

from ..runtime.array import Array
from ..runtime.checks import integer_within, plain_real

MAX_SEED = 2**64
LEAST_TEMPERATURE = 1e-30
REALS = ("temperature", "top_p")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits.

    Attributes:
        temperature: logits are divided by it; 0 takes the largest logit (greedy).
        top_k: only that many of the largest logits count; 0 is all.
        top_p: only the fewest of the largest logits count that hold this part of the probability,
            after top_k; 1 is all.
        seed: of the random numbers, from 0 to 2^64 - 1: equal calls draw equal tokens. With None
            each call draws a seed of its own from the operating system; what a CUDA graph replays
            keeps the seed of its capture.

    Raises:
        TypeError: no numbers.
        ValueError: numbers that cannot be used.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0

    def __post_init__(self) -> None:
        numbers = {name: plain_real("Sampling", name, getattr(self, name)) for name in REALS}
        temperature, top_p = numbers.values()
        if temperature != 0 and not LEAST_TEMPERATURE <= temperature < math.inf:
            fact = f"temperature must be 0, or finite and at least {LEAST_TEMPERATURE}"
            raise ValueError(f"Sampling: {fact}, got {self.temperature!r}")
        if not 0 < top_p <= 1:
            fact = "top_p must be above 0 and at most 1"
            raise ValueError(f"Sampling: {fact}, got {self.top_p!r}")
        numbers["top_k"] = integer_within("Sampling", "top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            numbers["seed"] = integer_within("Sampling", "seed", self.seed, 0, MAX_SEED - 1)
        for name, number in numbers.items():
            object.__setattr__(self, name, number)

    def with_seed(self) -> "Sampling":
        """Itself, with a new seed if it has none."""
        if self.seed is not None:
            return self
        return dataclasses.replace(self, seed=secrets.randbits(64))

    @property
    def kind(self) -> tuple[float, int, float]:
        """What a plan depends on."""
        return self.temperature, self.top_k, self.top_p

    @property
    def scale(self) -> float:
        """From a logit to an exponent of 2."""
        return math.log2(math.e) / self.temperature if self.temperature else 0.0

    @property
    def part(self) -> int:
        """top_p of 2^32, 0 for all."""
        return 0 if self.top_p == 1 else max(1, int(self.top_p * 2**32))


GREEDY = Sampling()


class DecodeState(NamedTuple):
    """What sampling advances from one step of decoding to the next, int32 (rows,) each.

    Attributes:
        tokens: to be embedded next.
        positions: where they stand in their sequences.
        ends: positions + 1, the lengths of the sequences with them.
    """

    tokens: Array
    positions: Array
    ends: Array
