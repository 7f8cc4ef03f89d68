"""Projections ready to be launched: which kernels, in which order, with which scratch memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..norm import kernels as norm_kernels
from ..runtime.array import Array, View
from ..runtime.checks import require_grid
from ..runtime.config import ITEM_SIZE
from ..runtime.gpu import capability_of, multiprocessors
from ..runtime.launch import Launch
from ..runtime.rows import Rows
from ..runtime.structs import header
from . import few_sm90_kernels, kernels, sm90_kernels
from .few_sm90_kernels import LinearFewSm90, is_apart
from .kernels import LinearFew
from .reference import Options
from .sm90_launch import LinearFewLaunch, LinearLaunch

norm_structs = header("norm/params.cuh")
structs = header("linear/params.cuh")

MATRICES = ("x", "weight", "gate_weight", "residual", "down_weight", "down_residual")


class Projection:
    """One projection: a norm before it and a rotary embedding after it where it does not do them.

    The views go by the names of `checks`; x and residual are (rows, columns). ``few`` is their
    `few_kernel`, ``aligned`` says whether all addresses are multiples of 16 bytes, ``seqlen`` is
    that of a sequence in x.
    """

    def __init__(
        self,
        function: str,
        views: Mapping[str, View],
        options: Options,
        few: LinearFewSm90 | LinearFew | None,
        aligned: bool,
        backend: str | None,
        seqlen: int = 1,
    ) -> None:
        x, weight = views["x"], views["weight"]
        (rows, depth), columns = x.shape, weight.shape[0]
        self.norm, self.normal_shape = None, (rows, depth)
        steps, of_norm = row_strides(views), views.get("weight of norm")
        apart = few is None or isinstance(few, LinearFewSm90) and is_apart(rows, depth)
        norm_inside = of_norm is not None and not apart
        if of_norm and apart:
            self.norm = norm_launch(function, x, of_norm, options, aligned)
            steps["x"] = depth
        params = structs.LinearParams(
            x_stride=steps["x"],
            weight_stride=steps["weight"],
            gate_stride=steps.get("gate_weight", 0),
            residual_stride=steps.get("residual", 0),
            out_stride=columns,
            rows=rows,
            columns=columns,
            depth=depth,
        )
        if norm_inside:
            params.norm = row_norm(x, of_norm, options)
        if "cos" in views:
            params.rotary = rotary_of(
                columns, views["cos"], views.get("positions"), options, seqlen
            )
        config = few or many_kernel(views, options, params, aligned, backend)
        if isinstance(config, LinearFewSm90):
            self.launches = [LinearFewLaunch(config, x.device, params, norm_inside)]
            turned = config.rotary
        elif isinstance(config, sm90_kernels.LinearSm90):
            self.launches = [LinearLaunch(config, x.device, params)]
            turned = config.head_dim > 0
        else:
            grid = config.grid(rows, columns, multiprocessors(x.device))
            self.launches = [
                Launch(config, x.device, require_grid(function, grid, x.shape), params)
            ]
            turned = config.rotary
        if "cos" in views and not turned:
            turn = kernels.RotaryEmbedding(x.dtype)
            grid = turn.grid(rows, params.rotary)
            self.launches.append(
                Launch(turn, x.device, require_grid(function, grid, x.shape), params)
            )

    def __call__(
        self, library: Any, stream: Any, like: Array, pointers: Sequence[int], out: int
    ) -> None:
        """``pointers`` as `reference.Arrays`."""
        if self.norm:
            normal = library.empty(self.normal_shape, (self.normal_shape[1], 1), like)
            x, weight, bias = pointers[0], *pointers[6:8]
            self.norm(stream, x, 0, weight, bias, library.pointer(normal), 0, 0)
            pointers = (library.pointer(normal), *pointers[1:6], 0, 0, *pointers[8:])
        for launch in self.launches:
            launch(stream, *pointers, out)


def few_kernel(
    views: Mapping[str, View], options: Options, aligned: bool, backend: str | None
) -> LinearFewSm90 | LinearFew | None:
    """The fastest kernel for few rows, None where none can take these."""
    x, steps, gated, turned = views["x"], row_strides(views), "gate_weight" in views, "cos" in views
    if backend == "simt":
        return None
    capability, columns = capability_of(x.device), views["weight"].shape[0]
    vector = aligned and is_aligned(x, steps)
    few = kernels.few(x.dtype, options.activation, gated, turned, *x.shape, vector, capability)
    inside = turned and few_sm90_kernels.turns(
        sm90_rotary(rotary_of(columns, views["cos"], views.get("positions"), options))
    )
    if not aligned or backend == "sm80" or turned and not inside and not is_apart(*x.shape):
        return few
    long = few_sm90_kernels.is_long(x.shape[0], columns * (1 + gated), x.shape[1])
    if long and few and few.num_stages > 1:
        return few
    few_sm90 = few_sm90_kernels.choose(
        x.dtype,
        capability,
        (options.activation, gated, inside),
        "weight of norm" in views and not is_apart(*x.shape),
        (x.shape[0], columns, x.shape[1]),
        tuple(step for name, step in steps.items() if name in few_sm90_kernels.MAPPED),
        multiprocessors(x.device),
    )
    return few_sm90 or few


def many_kernel(
    views: Mapping[str, View],
    options: Options,
    params: structs.LinearParams,
    aligned: bool,
    backend: str | None,
) -> "sm90_kernels.LinearSm90 | kernels.LinearMma | kernels.LinearSimt":
    """The fastest kernel for any number of rows, of the backend if one is forced."""
    x, gated = views["x"], "gate_weight" in views
    capability, sizes = capability_of(x.device), (params.rows, params.columns, params.depth)
    steps = {**row_strides(views), "x": params.x_stride}
    on_sm90 = aligned and backend in (None, "sm90")
    if on_sm90 and sm90_kernels.supports(x.dtype, capability, *sizes, tuple(steps.values())):
        rotary = sm90_rotary(params.rotary)
        if not sm90_kernels.turns(rotary):
            rotary = sm90_kernels.NO_ROTARY
        epilogue = sm90_kernels.Epilogue(options.activation, gated, "residual" in views, rotary)
        return sm90_kernels.choose(x.dtype, *sizes, multiprocessors(x.device), epilogue)
    vector = aligned and is_aligned(x, steps)
    kind = (x.dtype, options.activation, gated, "cos" in views)
    return kernels.many(*kind, vector, capability, backend)


def row_strides(views: Mapping[str, View]) -> dict[str, int]:
    """Elements from one row to the next, by name; dense where there is one row only."""
    return {
        name: views[name].strides[0] if views[name].shape[0] > 1 else views[name].shape[1]
        for name in MATRICES
        if name in views
    }


def is_aligned(x: View, steps: Mapping[str, int]) -> bool:
    """Whether rows of x and of the weights begin, and are as long as, multiples of 16 bytes."""
    inputs = [step for name, step in steps.items() if "residual" not in name]
    return all(n * ITEM_SIZE[x.dtype] % 16 == 0 for n in (x.shape[1], *inputs))


def row_norm(x: View, weight: View, options: Options) -> structs.RowNorm:
    """The norm in the prologue of a kernel."""
    return structs.RowNorm(options.eps, 1 / x.shape[1], options.rms, weight.dtype == "float32")


def sm90_rotary(rotary: structs.Rotary) -> sm90_kernels.Rotary:
    """What a kernel for Hopper must know of it when it is compiled."""
    return sm90_kernels.Rotary(rotary.head_dim, rotary.rotary_dim, bool(rotary.interleaved))


def rotary_of(
    columns: int, cos: View, positions: View | None, options: Options, seqlen: int = 1
) -> structs.Rotary:
    """The rotary embedding in a kernel; ``columns`` are those of q, k and v together."""
    heads_q, heads_kv = options.heads
    head_dim = columns // (heads_q + 2 * heads_kv)
    return structs.Rotary(
        seqlen=seqlen,
        num_positions=cos.shape[0],
        columns=(heads_q + heads_kv) * head_dim,
        head_dim=head_dim,
        rotary_dim=2 * cos.shape[1],
        interleaved=options.interleaved,
        wide=cos.dtype == "float32",
        wide_positions=positions is not None and positions.dtype == "int64",
    )


def norm_launch(function: str, x: View, weight: View, options: Options, aligned: bool) -> Launch:
    """The norm as a kernel of its own."""
    rows = Rows(function, {"x": x, "out": x._replace(strides=(x.shape[1], 1))})
    vector = aligned and rows.aligned
    capability = capability_of(x.device)
    kind = x.dtype, weight.dtype, options.rms
    config = norm_kernels.forward(*kind, rows.columns, vector, capability)
    params = norm_structs.NormFwdParams(**rows.strides, shape=rows.shape(options.eps))
    grid = require_grid(function, config.grid(rows.rows), x.shape)
    return Launch(config, x.device, grid, params)
