"""The RMSNorm of the heads of q and k and their rotary embedding, in place and in one launch."""

from collections.abc import Mapping
from typing import Any

import numpy

from ... import environment
from ...runtime.array import Array, View
from ...runtime.checks import plain_real, require_eps, require_grid
from ...runtime.launch import Launch
from ...runtime.operation import Operation, Plan, Plans, is_followed
from ...runtime.specs import Spec, views_of
from ...runtime.structs import header
from . import kernels, reference
from .linear import Rotary

structs = header("linear/params.cuh")

FUNCTION = "head_norm"
ANGLES = ("num_positions", "head_dim / 2")
SPECS = {
    "q": Spec(("rows", "heads_q", "head_dim"), strides=1),
    "k": Spec(("rows", "heads_kv", "head_dim"), strides=1),
    "q_weight": Spec(("head_dim",)),
    "k_weight": Spec(("head_dim",)),
    "cos": Spec(ANGLES, "float32"),
    "sin": Spec(ANGLES, "float32"),
    "positions": Spec(("rows",), "int32"),
}

_plans = Plans()


def head_norm(
    q: Array, k: Array, q_weight: Array, k_weight: Array, *, rotary: Rotary, eps: float
) -> None:
    """Each head x of q becomes rotary(x / sqrt(mean of x^2 + eps) * q_weight), and so does k.

    The results are written over q and k, which share no element. Sums are in float32, and results
    are rounded once. There are no gradients. Arrays are NumPy or CuPy arrays or torch tensors.

    Args:
        q: (rows, heads_q, head_dim), float16, bfloat16 or float32; the last dimension contiguous.
        k: (rows, heads_kv, head_dim), like q.
        q_weight, k_weight: (head_dim,), dtype of q.
        rotary: of whole heads whose pairs are (i, i + head_dim / 2), cos and sin in float32, with
            int32 positions (rows,): a GPU does not check that they are below num_positions, and
            takes the nearest one.
        eps: added to the mean.

    Raises:
        TypeError: dtypes, libraries, an eps that is no number.
        ValueError: shapes, strides, devices, eps, interleaved pairs; on the CPU a position that
            does not exist.
        NotImplementedError: inputs that require a gradient.

    Sources: Query-Key Normalization, arXiv:2010.04245; RoFormer, arXiv:2104.09864.
    """
    if not isinstance(rotary, Rotary) or rotary.interleaved:
        fact = "rotary must be a cupyflash.Rotary without interleaved pairs"
        raise ValueError(f"{FUNCTION}: {fact}, got {rotary!r:.80}")
    arrays = (q, k, q_weight, k_weight, rotary.cos, rotary.sin, rotary.positions)
    HEAD_NORM(FUNCTION, arrays, (plain_real(FUNCTION, "eps", eps),))


def run(function: str, library: Any, arrays: tuple[Array, ...], options: tuple[float]) -> tuple:
    """`head_norm` on the arrays of `SPECS`, all of one library."""
    (eps,) = options
    if library.on_cpu(arrays[0]):
        _check(library, arrays, eps)
        values = [library.to_numpy(x) for x in arrays]
        for x, y, weight in zip(arrays[:2], values[:2], values[2:4]):
            x[...] = library.from_numpy(reference.head_norm(y, weight, *values[4:], eps), x)
        return ()
    if is_followed(library, arrays) or environment.current().debug:
        _check(library, arrays, eps)
    key, pointers = _plans.key(library, arrays, options)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.add(key, HeadNormPlan(_check(library, arrays, eps), eps))
    plan(library, pointers)
    library.wrote(*arrays[:2])
    return ()


HEAD_NORM = Operation(run, native="q")


def _check(library: Any, arrays: tuple[Array, ...], eps: float) -> dict[str, View]:
    views = views_of(FUNCTION, library, SPECS, arrays, plain=True)
    require_eps(FUNCTION, eps)
    head_dim, most = views["q"].shape[2], kernels.HeadNorm.max_head_dim
    if head_dim % 2 or not 2 <= head_dim <= most:
        fact = f"head_dim must be even and from 2 to {most}"
        raise ValueError(f"{FUNCTION}: {fact}, got {head_dim}")
    num_positions, pairs = views["cos"].shape
    if pairs != head_dim // 2 or not num_positions:
        fact = f"cos must have shape (num_positions, {head_dim // 2})"
        raise ValueError(f"{FUNCTION}: {fact}, got {views['cos'].shape}")
    of_host = views["q"].device < 0 or environment.current().debug
    if of_host and views["q"].shape[0]:
        positions = numpy.asarray(library.to_list(arrays[-1]))
        if positions.min() < 0 or positions.max() >= num_positions:
            fact = f"positions must be from 0 to {num_positions - 1}"
            got = f"{positions.min()} to {positions.max()}"
            raise ValueError(f"{FUNCTION}: {fact}, got {got}")
    return views


class HeadNormPlan(Plan):
    """The kernel for one signature."""

    def __init__(self, views: Mapping[str, View], eps: float) -> None:
        q, k = views["q"], views["k"]
        super().__init__(q.device)
        rows, heads_q, head_dim = q.shape
        self.empty = rows == 0
        if self.empty:
            return
        params = structs.HeadNormParams(
            q_row=q.strides[0],
            q_head=q.strides[1],
            k_row=k.strides[0],
            k_head=k.strides[1],
            rows=rows,
            num_positions=views["cos"].shape[0],
            heads_q=heads_q,
            heads_k=k.shape[1],
            head_dim=head_dim,
            eps=eps,
        )
        config = kernels.HeadNorm(q.dtype)
        grid = require_grid(FUNCTION, config.grid(rows, heads_q + k.shape[1]), q.shape)
        self.launch = Launch(config, q.device, grid, params)

    def run(self, library: Any, pointers: list[int]) -> None:
        """``pointers`` of the arrays of `SPECS`."""
        if not self.empty:
            stream = library.stream(self.device_id)
            self.launch.start(stream, self.launch.argument(*pointers))
