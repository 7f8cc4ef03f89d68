"""Tokens from logits: greedy, temperature, top-k, top-p; on the GPU in one launch."""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

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
STATE = "tokens", "positions", "ends"
SPECS = {
    "logits": Spec(("rows", "vocabulary"), strides=1),
    "out": TOKENS,
    **dict.fromkeys(STATE, TOKENS._replace(optional=True)),
    "choices": Spec(("rows", structs.CHOICE_WORDS), "int32", optional=True),
}
WRITTEN = "out", *STATE

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


def choice_words(samplings: Sequence[Sampling], numbers: Sequence[int]) -> numpy.ndarray:
    """int32 (rows, 6), the ``choices`` of `sample` that say the same as these, one for each row.

    Args:
        samplings: with seeds.
        numbers: from 0 to 2^32 - 1, what stands for each row in the counter of its random numbers:
            a row of number i draws what row i draws without choices.
    """
    words = numpy.zeros((len(samplings), structs.CHOICE_WORDS), "uint32")
    for row, sampling, number in zip(words, samplings, numbers):
        scale = numpy.float32(sampling.scale).view("uint32")
        seed = sampling.seed
        row[:] = scale, sampling.top_k, sampling.part, number, seed & 0xFFFFFFFF, seed >> 32
    return words.view("int32")


def sample(
    logits: Array,
    sampling: Sampling = GREEDY,
    *,
    out: Array,
    state: DecodeState | None = None,
    choices: Array | None = None,
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
        choices: int32 (rows, 6), instead of sampling: how for each row, see `choice_words`; it is
            read on the device only, so that a CUDA graph can replay the call with others.
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
    if choices is not None and sampling != GREEDY:
        fact = "sampling must be left out beside choices"
        raise ValueError(f"sample: {fact}, got {sampling}")
    SAMPLE("sample", (logits, out, *(state or (None,) * 3), choices), (sampling, limit))


def run(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple[Sampling, int]
) -> tuple[None, ...]:
    """`sample`; the arrays are those of `SPECS`."""
    sampling, limit = options
    if library.on_cpu(arrays[0]):
        views = _check(library, arrays)
        written = [name for name in WRITTEN if name in views]
        given = [library.pointer(x) for x in arrays if x is not None]
        Written(function, views, written).check(given)
        reference.sample(library, arrays, sampling.with_seed(), limit)
        return ()
    if is_followed(library, arrays):
        _check(library, arrays)
    key, pointers = _plans.key(library, arrays, (sampling.kind, limit))
    plan = _plans.get(key)
    if plan is None:
        views = _check(library, arrays)
        plan = _plans.add(key, SamplePlan(library, views, sampling, limit))
    plan.written.check([y for x, y in zip(arrays, pointers) if x is not None])
    plan(pointers, secrets.randbits(64) if sampling.seed is None else sampling.seed)
    library.wrote(*(x for x in arrays[1:5] if x is not None))
    return ()


SAMPLE = Operation(run, native="logits")


def _check(library: Any, arrays: tuple[Array | None, ...]) -> dict[str, View]:
    """Views of all arrays; logits may require a gradient, as tokens have none."""
    logits, *others = arrays
    if library.traced(logits):
        fact = "logits must be an array with memory of its own, outside of transforms of torch"
        raise NotImplementedError(f"sample: {fact}, got {short(logits)}")
    stateless = all(x is None for x in arrays[2:5])
    specs = SPECS if stateless else SPECS | dict.fromkeys(STATE, TOKENS)
    vocabulary = range(1, MAX_COLUMNS)
    views = views_of("sample", library, specs, arrays, vocabulary=vocabulary)
    require_plain("sample", library, [x for x in others if x is not None])
    return views


class SamplePlan(Plan):
    """The kernel for one signature; ``views`` of logits, then of the arrays that are written."""

    def __init__(
        self, library: Any, views: Mapping[str, View], sampling: Sampling, limit: int
    ) -> None:
        logits = views["logits"]
        super().__init__(logits.device)
        self.written = Written("sample", views, [name for name in WRITTEN if name in views])
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
        greedy = sampling.temperature == 0 and "choices" not in views
        config = kernels.Sample(logits.dtype, greedy)
        self.launch = Launch(config, logits.device, require_grid("sample", rows, rows), params)

    def run(self, pointers: list[int], seed: int) -> None:
        """``pointers`` of the arrays of `SPECS`."""
        if not self.empty:
            logits, out, tokens, positions, ends, choices = pointers
            stream = self.library.stream(self.device_id)
            values = (logits, positions, out, tokens, ends, choices, seed)
            self.launch.start(stream, self.launch.argument(*values))
