"""The checks of the arrays of projections, before anything is launched."""

from collections.abc import Mapping, Sequence
from typing import Any

from .. import environment
from ..runtime.array import Array, View, library_of
from ..runtime.checks import require_eps, views_of
from ..runtime.rows import is_contiguous
from .reference import Arrays, Options

MAX_SIZE = 2**30  # of d_in and d_out

# The arguments of each function in errors, by the fields of `Arrays`.
_PROJECTION = {name: name for name in Arrays._fields}
_PROJECTION |= {"norm_weight": "weight of norm", "norm_bias": "bias of norm"}
NAMES = {
    "linear": _PROJECTION,
    "qkv_projection": _PROJECTION,
    "mlp": {**_PROJECTION, "weight": "up_weight", "bias": "up_bias"},
}


def check(
    function: str, library: Any, given: Sequence[Array | None], options: Options
) -> dict[str, View]:
    """Views by the fields of `Arrays`.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, eps, positions.
    """
    names, arrays = NAMES[function], dict(zip(Arrays._fields, given, strict=True))
    positions = arrays.pop("positions")
    for name in ("weight", "down_weight") if function == "mlp" else ("weight",):
        if arrays[name] is None:
            raise TypeError(f"{function}: {names[name]} must be an array, got None")
    views = views_of(function, library, {names[name]: x for name, x in arrays.items()})
    views = {name: views[names[name]] for name in arrays if names[name] in views}
    _check_dtypes(function, views)
    _check_shapes(function, views)
    if "norm_bias" in views and views["norm_bias"].dtype != views["norm_weight"].dtype:
        got = " and ".join(views[name].dtype for name in ("norm_weight", "norm_bias"))
        raise TypeError(f"{function}: weight and bias of norm must have one dtype, got {got}")
    require_eps(function, options.eps)
    if function == "qkv_projection":
        _check_heads(views["weight"].shape, options)
        if "cos" in views:
            columns = views["weight"].shape[0]
            return _check_rotary(library, views, columns, positions, options)
    return views


def _check_dtypes(function: str, views: Mapping[str, View]) -> None:
    """The dtype of x, or float32 but for a residual."""
    for name, view in views.items():
        allowed = (views["x"].dtype, *(() if name in ("x", "residual") else ("float32",)))
        if view.dtype not in allowed:
            fact = f"{NAMES[function][name]} must be {' or '.join(dict.fromkeys(allowed))} like x"
            raise TypeError(f"{function}: {fact}, got {view.dtype}")


def _check_shapes(function: str, views: Mapping[str, View]) -> None:
    names, x = NAMES[function], views["x"]
    if function == "qkv_projection" and len(x.shape) not in (2, 3):
        raise ValueError(f"{function}: x must have 2 or 3 dimensions, got {x.shape}")
    if not x.shape:
        raise ValueError(f"{function}: x must have a dimension, got {x.shape}")
    if not 1 <= x.shape[-1] < MAX_SIZE:
        fact = f"the last dimension of x must have 1 to {MAX_SIZE - 1} numbers"
        raise ValueError(f"{function}: {fact}, got {x.shape}")
    columns = _rows_of_matrix(function, views, "weight", x.shape[-1])
    shapes = {"gate_weight": views["weight"].shape, "bias": (columns,), "gate_bias": (columns,)}
    shapes |= {"norm_weight": x.shape[-1:], "norm_bias": x.shape[-1:]}
    if "down_weight" in views:
        columns = _rows_of_matrix(function, views, "down_weight", columns)
        shapes["down_bias"] = (columns,)
    shapes["residual"] = (*x.shape[:-1], columns)
    for name, shape in shapes.items():
        if name in views and views[name].shape != shape:
            fact = f"{names[name]} must have shape {tuple(shape)}"
            raise ValueError(f"{function}: {fact}, got {views[name].shape}")
    if "gate_bias" in views and "gate_weight" not in views:
        raise ValueError(f"{function}: gate_bias must come with gate_weight, got it alone")
    for name, y in views.items():
        if y.shape and y.shape[-1] > 1 and y.strides[-1] != 1 and 0 not in y.shape:
            fact = f"the last dimension of {names[name]} must be contiguous"
            raise ValueError(f"{function}: {fact}, got strides {y.strides}")


def _rows_of_matrix(function: str, views: Mapping[str, View], name: str, depth: int) -> int:
    shape = views[name].shape
    if len(shape) != 2 or shape[1] != depth or not 1 <= shape[0] < MAX_SIZE:
        fact = f"{NAMES[function][name]} must have shape (d_out, {depth})"
        raise ValueError(f"{function}: {fact}, d_out from 1 to {MAX_SIZE - 1}, got {shape}")
    return shape[0]


def check_rotation(
    library: Any, x: Array, angles: tuple[Array, Array, Array | None], options: Options
) -> dict[str, View]:
    """Views of x (..., columns of q, k and v), of cos and sin, and of positions if there are some.

    Raises:
        As `check`, of qkv_projection.
    """
    cos, sin, positions = angles
    views = views_of("qkv_projection", library, {"x": x, "cos": cos, "sin": sin})
    _check_dtypes("qkv_projection", views)
    shape = views["x"].shape
    if len(shape) not in (2, 3):
        raise ValueError(f"qkv_projection: x must have 2 or 3 dimensions, got {shape}")
    _check_heads((shape[-1], 1), options)
    return _check_rotary(library, views, shape[-1], positions, options)


def _check_heads(shape: tuple[int, ...], options: Options) -> None:
    """The shape of a weight."""
    heads = options.heads[0] + 2 * options.heads[1]
    if shape[0] % heads:
        fact = f"the rows of weight must be a multiple of heads_q + 2 heads_kv = {heads}"
        raise ValueError(f"qkv_projection: {fact}, got {shape}")


def _check_rotary(
    library: Any,
    views: Mapping[str, View],
    columns: int,
    positions: Array | None,
    options: Options,
) -> dict[str, View]:
    """The views with that of positions; ``columns`` are those of q, k and v together."""
    function, x, cos, sin = "qkv_projection", views["x"], views["cos"], views["sin"]
    head_dim = columns // (options.heads[0] + 2 * options.heads[1])
    if head_dim % 2:
        raise ValueError(f"{function}: head_dim must be even beside rotary, got {head_dim}")
    if len(cos.shape) != 2 or not cos.shape[0] or not 1 <= cos.shape[1] <= head_dim // 2:
        fact = f"cos must have shape (num_positions, rotary_dim / 2), rotary_dim <= {head_dim}"
        raise ValueError(f"{function}: {fact}, got {cos.shape}")
    if (cos.shape, cos.dtype) != (sin.shape, sin.dtype):
        got = f"{cos.shape} of {cos.dtype} and {sin.shape} of {sin.dtype}"
        raise ValueError(f"{function}: cos and sin must have one shape and dtype, got {got}")
    for name in ("cos", "sin"):
        if not is_contiguous(views[name]):
            fact = f"{name} must be contiguous"
            raise ValueError(f"{function}: {fact}, got strides {views[name].strides}")
    if positions is None:
        if len(x.shape) == 2:
            fact = "positions must be given beside packed sequences, x (total, d_in)"
            raise ValueError(f"{function}: {fact}, or x be (batch, seqlen, d_in), got {x.shape}")
        if x.shape[-2] > cos.shape[0]:
            fact = f"cos must have at least {x.shape[-2]} positions, as x has"
            raise ValueError(f"{function}: {fact}, got {cos.shape}")
        return dict(views)
    if library_of(positions) is not library:
        got = type(positions).__name__
        raise TypeError(f"{function}: positions must be a {library.name} like x, got {got}")
    view = library.view(positions)
    if view.dtype not in ("int32", "int64"):
        raise TypeError(f"{function}: positions must be int32 or int64, got {view.dtype}")
    if view.shape != x.shape[:-1]:
        fact = f"positions must have shape {tuple(x.shape[:-1])}"
        raise ValueError(f"{function}: {fact}, got {view.shape}")
    if view.device != x.device:
        where = f"x on device {x.device} and positions on device {view.device}"
        raise ValueError(f"{function}: all arrays must be on the same device, got {where}")
    if (x.device < 0 or environment.current().debug) and 0 not in view.shape:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= cos.shape[0]:
            fact = f"positions must be from 0 to {cos.shape[0] - 1}"
            raise ValueError(f"{function}: {fact}, got {low} to {high}")
    return {**views, "positions": view}
