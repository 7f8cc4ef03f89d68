"""The launches of a projection: which kernels, in which order, with which parameters."""

import operator
import struct
from collections.abc import Iterator, Mapping

from ...runtime.array import View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE, KernelConfig
from ...runtime.gpu import Capability, capability_of, multiprocessors
from ...runtime.launch import Launch, call_fields
from ...runtime.structs import bytes_behind, header
from ...runtime.tensor_map import TensorMaps, TensorMapSpec
from ..norm.plan import forward_launch
from . import kernels, sm90_kernels, small_m_sm90_kernels
from .kernels import LinearMma, LinearSimt, LinearSmallM
from .options import Options
from .sm90_kernels import LinearSm90
from .small_m_sm90_kernels import LinearSmallMSm90, is_apart

structs = header("linear/params.cuh")

MATRICES = ("x", "weight", "gate_weight", "residual")


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that the projections can launch."""
    for module in (kernels, sm90_kernels, small_m_sm90_kernels):
        yield from module.configurations(capability)


def launches_of(
    function: str,
    views: Mapping[str, View],
    options: Options,
    aligned: bool,
    backend: str | None,
    seqlen: int = 1,
) -> tuple[Launch | None, list[Launch]]:
    """The norm of a projection if it is a kernel of its own, and the kernels that follow it.

    These are one kernel, and behind it the rotary embedding where it does not compute that itself.

    Args:
        views: by the fields of `Arrays`; x and residual are (rows, columns).
        aligned: whether all addresses are multiples of 16 bytes.
        seqlen: of a sequence in x.
    """
    x, weight = views["x"], views["weight"]
    (rows, depth), columns = x.shape, weight.shape[0]
    norm, norm_weight, strides = None, views.get("norm_weight"), row_strides(views)
    config = small_m_kernel(views, options, aligned, backend)
    apart = config is None or isinstance(config, LinearSmallMSm90) and is_apart(rows, depth)
    if norm_weight and apart:
        tensors = {"x": x, "out": x._replace(strides=(depth, 1))}
        kind = (norm_weight.dtype, options.rms, options.eps)
        norm = forward_launch(function, tensors, *kind, aligned)
        strides["x"] = depth
    params = structs.LinearParams(
        x_stride=strides["x"],
        weight_stride=strides["weight"],
        gate_stride=strides.get("gate_weight", 0),
        residual_stride=strides.get("residual", 0),
        out_stride=columns,
        rows=rows,
        columns=columns,
        depth=depth,
    )
    norm_inside = norm_weight is not None and norm is None
    if norm_inside:
        params.norm = row_norm(x, norm_weight, options)
    if "cos" in views:
        params.rotary = rotary_of(columns, views, options, seqlen)
    config = config or many_kernel(views, options, params, aligned, backend)
    if isinstance(config, LinearSmallMSm90):
        launches = [LinearSmallMLaunch(config, x.device, params, norm_inside)]
    elif isinstance(config, LinearSm90):
        launches = [LinearLaunch(config, x.device, params)]
    else:
        grid = config.grid(rows, columns, multiprocessors(x.device))
        launches = [Launch(config, x.device, require_grid(function, grid, x.shape), params)]
    if "cos" in views and not config.rotary:
        rotary = kernels.RotaryEmbedding(x.dtype)
        grid = require_grid(function, rotary.grid(rows, params.rotary), x.shape)
        launches.append(Launch(rotary, x.device, grid, params))
    return norm, launches


def small_m_kernel(
    views: Mapping[str, View], options: Options, aligned: bool, backend: str | None
) -> LinearSmallMSm90 | LinearSmallM | None:
    """The fastest kernel for small M, None where none can take these rows."""
    if backend == "simt":
        return None
    x, strides = views["x"], row_strides(views)
    gated, rotary = "gate_weight" in views, "cos" in views
    (rows, depth), columns = x.shape, views["weight"].shape[0]
    capability, apart = capability_of(x.device), is_apart(rows, depth)
    vector = aligned and is_aligned(x, strides)
    small_m = kernels.small_m(
        x.dtype, options.activation, gated, rotary, rows, depth, vector, capability
    )
    inside = rotary and small_m_sm90_kernels.turns(sm90_rotary(rotary_of(columns, views, options)))
    if not aligned or backend == "sm80" or rotary and not inside and not apart:
        return small_m
    long = small_m_sm90_kernels.is_long(rows, columns * (1 + gated), depth)
    if long and small_m and small_m.num_stages > 1:
        return small_m
    small_m_sm90 = small_m_sm90_kernels.choose(
        x.dtype,
        capability,
        (options.activation, gated, inside),
        "norm_weight" in views and not apart,
        (rows, columns, depth),
        tuple(strides[name] for name in small_m_sm90_kernels.MAPPED if name in strides),
        multiprocessors(x.device),
    )
    return small_m_sm90 or small_m


def many_kernel(
    views: Mapping[str, View],
    options: Options,
    params: structs.LinearParams,
    aligned: bool,
    backend: str | None,
) -> LinearSm90 | LinearMma | LinearSimt:
    """The fastest kernel for any number of rows, of the backend if one is forced."""
    x, gated = views["x"], "gate_weight" in views
    capability, sizes = capability_of(x.device), (params.rows, params.columns, params.depth)
    strides = {**row_strides(views), "x": params.x_stride}
    on_sm90 = aligned and backend in (None, "sm90")
    if on_sm90 and sm90_kernels.supports(x.dtype, capability, *sizes, tuple(strides.values())):
        rotary = sm90_rotary(params.rotary)
        if not sm90_kernels.turns(rotary):
            rotary = sm90_kernels.NO_ROTARY
        epilogue = sm90_kernels.Epilogue(options.activation, gated, "residual" in views, rotary)
        return sm90_kernels.choose(x.dtype, *sizes, multiprocessors(x.device), epilogue)
    vector = aligned and is_aligned(x, strides)
    kind = (x.dtype, options.activation, gated, "cos" in views)
    return kernels.many(*kind, vector, capability, backend)


def row_strides(views: Mapping[str, View]) -> dict[str, int]:
    """The row strides of matrices in elements, by name; the length of a row where there is one."""
    return {
        name: views[name].strides[0] if views[name].shape[0] > 1 else views[name].shape[1]
        for name in MATRICES
        if name in views
    }


def is_aligned(x: View, strides: Mapping[str, int]) -> bool:
    """Whether x and the weights have rows whose lengths and strides are multiples of 16 bytes."""
    inputs = [stride for name, stride in strides.items() if name != "residual"]
    return all(n * ITEM_SIZE[x.dtype] % 16 == 0 for n in (x.shape[1], *inputs))


def row_norm(x: View, weight: View, options: Options) -> structs.RowNorm:
    """The norm in the prologue of a kernel."""
    return structs.RowNorm(options.eps, 1 / x.shape[1], options.rms, weight.dtype == "float32")


def sm90_rotary(rotary: structs.Rotary) -> sm90_kernels.Rotary:
    """The template arguments of a kernel for Hopper that rotates so."""
    return sm90_kernels.Rotary(rotary.head_dim, rotary.rotary_dim, bool(rotary.interleaved))


def rotary_of(
    columns: int, views: Mapping[str, View], options: Options, seqlen: int = 1
) -> structs.Rotary:
    """The rotary embedding in a kernel; ``columns`` are those of q, k and v together."""
    heads_q, heads_kv = options.heads
    head_dim = columns // (heads_q + 2 * heads_kv)
    cos, positions = views["cos"], views.get("positions")
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


class LinearLaunch(Launch):
    """A kernel whose struct is tensor maps, which are kept by address, and then `LinearParams`."""

    behind = bytes_behind(structs.LinearSm90Params, "base")  # the parameters

    def __init__(
        self, config: LinearSm90 | LinearSmallMSm90, device: int, params: structs.LinearParams
    ) -> None:
        grid = config.grid(params.rows, params.columns, multiprocessors(device))
        super().__init__(config, device, grid, params)
        self.tail += self.behind
        names = call_fields(params)
        self.mapped = operator.itemgetter(*(names.index(name) for name in config.map_rows))
        specs = [tensor_map(config, name, params) for name in config.map_rows]
        self.maps = TensorMaps(specs, device)

    def argument(self, *pointers: int) -> bytes:
        return self.maps[self.mapped(pointers)] + self.pack(*pointers) + self.tail


class LinearSmallMLaunch(LinearLaunch):
    """The launch for small M, with as many stages as there is room for, and threads as needed."""

    def __init__(
        self, config: LinearSmallMSm90, device: int, params: structs.LinearParams, norm: bool
    ) -> None:
        stages = config.stages(params.columns, params.depth, norm, multiprocessors(device))
        self.behind = struct.pack("i", stages) + bytes_behind(
            structs.LinearSmallMSm90Params, "stages"
        )
        super().__init__(config, device, params)
        self.threads = config.norm_threads if norm else config.threads
        self.shared_memory = config.smem_bytes(stages, params.depth, norm)


def tensor_map(
    config: LinearSm90 | LinearSmallMSm90, name: str, params: structs.LinearParams
) -> TensorMapSpec:
    """The map of one of the arrays; an absent one has address 0 and so no map."""
    rows, columns, depth = params.rows, params.columns, params.depth
    width, height, stride = {
        "x": (depth, rows, params.x_stride),
        "weight": (depth, columns, params.weight_stride),
        "gate_weight": (depth, columns, params.gate_stride),
        "residual": (columns, rows, params.residual_stride),
        "out": (columns, rows, params.out_stride),
    }[name]
    # The stride of a single row does not matter, but it must be valid.
    step = (stride if height > 1 else width) * ITEM_SIZE[config.dtype]
    dims, steps = (width, height, 1, 1), (step, step, step)
    return TensorMapSpec(config.dtype, dims, steps, config.map_rows[name])
