"""Tokens from logits: greedy, temperature, top-k, top-p; on the GPU in one launch."""

import dataclasses
import itertools
import math
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...runtime.array import Array, View
from ...runtime.checks import integer_within, plain_real, require_grid, require_plain, short
from ...runtime.launch import Launch
from ...runtime.operation import Operation, Plan, Plans, is_followed
from ...runtime.overlap import Written
from ...runtime.specs import Spec, views_of
from ...runtime.structs import header
from . import kernels, reference

structs = header("decode/params.cuh")

MAX_COLUMNS = 2**22  # sums of weights must stay below 2^63
MAX_LIMIT = 2**31 - 2
MAX_SEED = 2**64
LEAST_TEMPERATURE = 1e-30
REALS = ("temperature", "top_p")

TOKENS = Spec(("rows",), "int32")
SPECS = {
    "logits": Spec(("rows", "vocabulary"), strides=1),
    **dict.fromkeys(("out", "tokens", "positions", "ends"), TOKENS),
}

_plans = Plans()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The way in which tokens are chosen from logits.

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
        """The numbers on which a plan depends."""
        return self.temperature, self.top_k, self.top_p

    @property
    def scale(self) -> float:
        """A logit times this is an exponent of 2."""
        return math.log2(math.e) / self.temperature if self.temperature else 0.0

    @property
    def part(self) -> int:
        """top_p of 2^32, 0 for all."""
        return 0 if self.top_p == 1 else max(1, int(self.top_p * 2**32))


GREEDY = Sampling()


class DecodeState(NamedTuple):
    """Arrays that sampling advances from one step of decoding to the next, int32 (rows,) each.

    Attributes:
        tokens: to be embedded next.
        positions: where they stand in their sequences.
        ends: positions + 1, the lengths of the sequences with them.
    """

    tokens: Array
    positions: Array
    ends: Array


def sample(
    logits: Array,
    sampling: Sampling = GREEDY,
    *,
    out: Array,
    state: DecodeState | None = None,
    limit: int = MAX_LIMIT,
) -> None:
    """A token from each row of logits; equal calls give equal tokens on every device.

    A logit equal to the last one that top_k or top_p keeps is kept, too. Logits more than 41
    temperatures (in units of log 2) below the largest have the probability 0.

    Args:
        logits: (rows, vocabulary), float16, bfloat16 or float32; the last dimension contiguous.
        sampling: how.
        out: int32 (rows,), gets the tokens; -1 for a row with a NaN or infinity, or with nothing
            but -infinity.
        state: its positions are counters of the random numbers, with the number of the row (None
            is 0); it advances by a token, but positions not beyond ``limit``.
        limit: see state; from 0 to 2^31 - 2.

    Raises:
        TypeError: dtypes, libraries, no numbers.
        ValueError: shapes, strides, devices, limit, arrays that share memory.

    Sources: top-k, arXiv:1805.04833; top-p, arXiv:1904.09751; random numbers: Philox4x32-7, Salmon
    et al. 2011.
    """
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sample: sampling must be a Sampling, got {short(sampling)}")
    if state is not None and not isinstance(state, DecodeState):
        raise TypeError(f"sample: state must be a DecodeState or None, got {short(state)}")
    limit = integer_within("sample", "limit", limit, 0, MAX_LIMIT)
    SAMPLE("sample", (logits, out, *(state or ())), (sampling, limit))


def run(
    function: str, library: Any, arrays: tuple[Array, ...], options: tuple[Sampling, int]
) -> tuple[None, ...]:
    """`sample`; the arrays are logits, out, and if there is a state its tokens, positions, ends."""
    (sampling, limit), (_, *written) = options, arrays
    if library.on_cpu(arrays[0]):
        views = _check(library, *arrays)
        Written(function, views, tuple(views)[1:]).check([library.pointer(x) for x in arrays])
        reference.sample(library, arrays, sampling.with_seed(), limit)
        return ()
    if is_followed(library, arrays):
        _check(library, *arrays)
    key, pointers = _plans.key(library, arrays, (sampling.kind, limit))
    plan = _plans.get(key)
    if plan is None:
        views = _check(library, *arrays)
        plan = _plans.add(key, SamplePlan(library, views, sampling, limit))
    plan.written.check(pointers)
    plan(pointers, secrets.randbits(64) if sampling.seed is None else sampling.seed)
    library.wrote(*written)
    return ()


SAMPLE = Operation(run, native="logits")


def _check(library: Any, logits: Array, *written: Array) -> dict[str, View]:
    """Views of all arrays; logits may require a gradient, as tokens have none."""
    if library.traced(logits):
        fact = "logits must be an array with memory of its own, outside of transforms of torch"
        raise NotImplementedError(f"sample: {fact}, got {short(logits)}")
    specs = dict(itertools.islice(SPECS.items(), 1 + len(written)))
    vocabulary = range(1, MAX_COLUMNS)
    views = views_of("sample", library, specs, (logits, *written), vocabulary=vocabulary)
    require_plain("sample", library, written)
    return views


class SamplePlan(Plan):
    """The kernel for one signature; ``views`` of logits, then of the arrays that are written."""

    def __init__(
        self, library: Any, views: Mapping[str, View], sampling: Sampling, limit: int
    ) -> None:
        logits = views["logits"]
        super().__init__(logits.device)
        self.written = Written("sample", views, tuple(views)[1:])
        self.library = library
        rows, columns = logits.shape
        self.empty = rows == 0
        if self.empty:
            return
        params = structs.SampleParams(
            stride=logits.strides[0],
            columns=columns,
            top_k=sampling.top_k,
            top_p=sampling.part,
            limit=limit,
            scale=sampling.scale,
        )
        config = kernels.Sample(logits.dtype, sampling.temperature == 0)
        self.launch = Launch(config, logits.device, require_grid("sample", rows, rows), params)

    def run(self, pointers: list[int], seed: int) -> None:
        """``pointers`` of logits and out, and of tokens, positions and ends if there is a state."""
        if not self.empty:
            logits, out, *state = pointers
            tokens, positions, ends = state or (0, 0, 0)
            stream = self.library.stream(self.device_id)
            values = (logits, positions, out, tokens, ends, seed)
            self.launch.start(stream, self.launch.argument(*values))
