"""Tokens from logits: greedy, temperature, top-k, top-p; on the GPU in one launch."""

import secrets
from typing import Any

import numpy

from ..runtime.array import Array, View, library_of
from ..runtime.checks import (
    integer_within,
    require_grid,
    require_int32,
    require_plain,
    short,
    views_of,
)
from ..runtime.launch import Launch
from ..runtime.operation import Plan, Plans
from ..runtime.overlap import Written
from ..runtime.structs import header
from . import kernels, sampling_reference
from .sampling_options import GREEDY, DecodeState, Sampling

structs = header("decode/params.cuh")

MAX_COLUMNS = 2**22  # sums of weights must stay below 2^63
MAX_LIMIT = 2**31 - 2

_plans = Plans(plain=True)


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
    library = library_of(logits)
    if library is None:
        got = type(logits).__name__
        raise TypeError(f"sample: logits must be a NumPy, CuPy or torch array, got {got}")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sample: sampling must be a Sampling, got {short(sampling)}")
    if state is not None and not isinstance(state, DecodeState):
        raise TypeError(f"sample: state must be a DecodeState or None, got {short(state)}")
    limit = integer_within("sample", "limit", limit, 0, MAX_LIMIT)
    arrays = (logits, out, *(state or ()))
    if library.on_cpu(logits):
        views = _check(library, *arrays)
        Written("sample", views, tuple(views)[1:]).check([library.pointer(x) for x in arrays])
        _on_cpu(library, logits, sampling.with_seed(), out, state, limit)
        return
    plan, pointers = _plans.find(
        library,
        arrays,
        (sampling.kind, limit),
        lambda: _check(library, *arrays),
        lambda views, _: SamplePlan(library, views, sampling, limit),
    )
    plan.written.check(pointers)
    plan(pointers, secrets.randbits(64) if sampling.seed is None else sampling.seed)
    library.wrote(*arrays[1:])


class SamplePlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, library: Any, views: dict[str, View], sampling: Sampling, limit: int
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
        """``pointers`` of logits, out, and the three of the state if there is one."""
        if self.empty:
            return
        logits, out, *state = pointers
        tokens, positions, ends = state or (0, 0, 0)
        stream = self.library.stream(self.device_id)
        self.launch(stream, logits, positions, out, tokens, ends, seed)


def _check(library: Any, logits: Array, out: Array, *state: Array) -> dict[str, View]:
    """Views of all arrays."""
    if library.traced(logits):  # a gradient is no matter: tokens have none
        fact = "logits must be an array with memory of its own, outside of transforms of torch"
        raise NotImplementedError(f"sample: {fact}, got {short(logits)}")
    view = views_of("sample", library, {"logits": logits})["logits"]
    if len(view.shape) != 2 or not 1 <= view.shape[1] < MAX_COLUMNS:
        fact = f"logits must be (rows, vocabulary) with a vocabulary of 1 to {MAX_COLUMNS - 1}"
        raise ValueError(f"sample: {fact}, got {view.shape}")
    if view.shape[1] > 1 and view.strides[1] != 1:
        fact = "the last dimension of logits must be contiguous"
        raise ValueError(f"sample: {fact}, got strides {view.strides}")
    views = {"logits": view}
    for name, x in zip(("out", "tokens", "positions", "ends"), (out, *state)):
        require_int32("sample", library, name, x, view.shape[:1], view.device)
        views[name] = library.view(x)
    require_plain("sample", library, (out, *state))
    return views


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
                sampling.top_k,
                sampling.part,
                sampling.seed,
                (position, row),
            )
        out[row] = token
        if state is not None:
            state.tokens[row] = max(token, 0)
            state.positions[row] = min(position + 1, limit)
            state.ends[row] = min(position + 1, limit) + 1
