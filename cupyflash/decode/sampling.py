"""Tokens from logits: greedy, temperature, top-k, top-p; on the GPU in one launch."""

import math
from typing import Any, NamedTuple

import numpy

from ..array import Array, library_of
from ..checks import is_integer, require_grid, require_int32, views_of
from ..kernel_launch import Launch, Plan, keep
from . import kernels, sampling_reference
from .params import SampleParams

MAX_COLUMNS = 2**22  # sums of weights must stay below 2^63
MAX_SEED = 2**64
LEAST_TEMPERATURE = 1e-30

_plans: dict[tuple, "SamplePlan"] = {}


class Sampling(NamedTuple):
    """How tokens are chosen from logits.

    Attributes:
        temperature: logits are divided by it; 0 takes the largest logit (greedy).
        top_k: only that many of the largest logits count; 0 is all.
        top_p: only the fewest of the largest logits count that hold this part of the probability,
            after top_k; 1 is all.
        seed: of the random numbers, from 0 to 2^64 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self, function: str) -> None:
        """Raise ValueError unless every number is one that can be used."""
        real = hasattr(self.temperature, "__float__") and not isinstance(self.temperature, bool)
        zero = real and self.temperature == 0
        if not zero and not (real and LEAST_TEMPERATURE <= self.temperature < math.inf):
            fact = f"temperature must be 0, or finite and at least {LEAST_TEMPERATURE}"
            raise ValueError(f"{function}: {fact}, got {self.temperature!r}")
        if not (is_integer(self.top_k) and 0 <= self.top_k < 2**31):
            fact = "top_k must be an integer of at least 0"
            raise ValueError(f"{function}: {fact}, got {self.top_k!r}")
        if not (hasattr(self.top_p, "__float__") and 0 < self.top_p <= 1):
            fact = "top_p must be above 0 and at most 1"
            raise ValueError(f"{function}: {fact}, got {self.top_p!r}")
        if not (is_integer(self.seed) and 0 <= self.seed < MAX_SEED):
            fact = "seed must be an integer from 0 to 2^64 - 1"
            raise ValueError(f"{function}: {fact}, got {self.seed!r}")

    @property
    def scale(self) -> float:
        """From a logit to an exponent of 2."""
        return math.log2(math.e) / float(self.temperature) if self.temperature else 0.0

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


def sample(
    logits: Array,
    sampling: Sampling = GREEDY,
    *,
    out: Array,
    state: DecodeState | None = None,
    limit: int = 2**31 - 2,
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
        limit: see state.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, numbers in ``sampling``.

    Sources: top-k, arXiv:1805.04833; top-p, arXiv:1904.09751; random numbers: Philox4x32-7, Salmon
    et al. 2011.
    """
    library = library_of(logits)
    if library is None:
        got = type(logits).__name__
        raise TypeError(f"sample: logits must be a NumPy, CuPy or torch array, got {got}")
    arrays = (logits, out, *(state or ()))
    if library.on_cpu(logits):
        _check(library, sampling, *arrays)
        _on_cpu(library, logits, sampling, out, state, limit)
        return
    try:
        pointer, signature = library.pointer, library.signature
        key = (tuple(map(signature, arrays)), sampling[:3], limit)
        pointers = list(map(pointer, arrays))
    except AttributeError:  # an array of another library
        _check(library, sampling, *arrays)
        raise
    plan = _plans.get(key)
    if plan is None:
        _check(library, sampling, *arrays)
        plan = SamplePlan(library, library.view(logits), sampling, limit)
        keep(_plans, key, plan)
    sampling.check("sample")  # the seed is not in the key
    plan(pointers, sampling.seed)


class SamplePlan(Plan):
    """The kernel for one signature."""

    def __init__(self, library: Any, logits: Any, sampling: Sampling, limit: int) -> None:
        super().__init__(logits.device)
        self.library = library
        rows, columns = logits.shape
        self.empty = rows == 0
        if self.empty:
            return
        params = SampleParams(
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
        """``pointers`` of logits, out, and the three of the state if there is one."""
        if self.empty:
            return
        logits, out, *state = pointers
        tokens, positions, ends = state or (0, 0, 0)
        stream = self.library.stream(self.device_id)
        self.launch(stream, logits, positions, out, tokens, ends, int(seed))


def _check(library: Any, sampling: Sampling, logits: Array, out: Array, *state: Array) -> None:
    sampling.check("sample")
    view = views_of("sample", library, {"logits": logits})["logits"]
    if len(view.shape) != 2 or not 1 <= view.shape[1] < MAX_COLUMNS:
        fact = f"logits must be (rows, vocabulary) with a vocabulary of 1 to {MAX_COLUMNS - 1}"
        raise ValueError(f"sample: {fact}, got {view.shape}")
    if view.shape[1] > 1 and view.strides[1] != 1:
        fact = "the last dimension of logits must be contiguous"
        raise ValueError(f"sample: {fact}, got strides {view.strides}")
    for name, x in zip(("out", "tokens", "positions", "ends"), (out, *state)):
        require_int32("sample", library, name, x, view.shape[:1], view.device)


def _on_cpu(
    library: Any, logits: Array, sampling: Sampling, out: Array, state: DecodeState | None,
    limit: int,
) -> None:  # fmt: skip
    positions = [0] * len(logits) if state is None else library.to_list(state.positions)
    for row, (values, position) in enumerate(zip(library.to_numpy(logits), positions)):
        if sampling.temperature == 0:
            token = sampling_reference.greedy_row(values)
        else:
            token = sampling_reference.sample_row(
                values,
                numpy.float32(sampling.scale),
                int(sampling.top_k),
                sampling.part,
                int(sampling.seed),
                (position, row),
            )
        out[row] = token
        if state is not None:
            state.tokens[row] = max(token, 0)
            state.positions[row] = min(position + 1, limit)
            state.ends[row] = min(position + 1, limit) + 1
