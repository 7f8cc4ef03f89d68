"""What the projections ask of their arrays before anything is launched."""

from collections.abc import Mapping, Sequence
from typing import Any

from .. import environment
from ..runtime.array import Array, View, library_of
from ..runtime.checks import require_eps, views_of
from ..runtime.rows import is_contiguous
from .reference import Options

MAX_SIZE = 2**30  # of d_in and d_out

# The arguments of each function, in the order of `reference.Arrays`, those of the down projection
# behind them.
_PROJECTION = (
    *("x", "weight", "gate_weight", "bias", "gate_bias", "residual"),
    *("weight of norm", "bias of norm", "cos", "sin", "positions"),
    *("down_weight", "down_bias", "down_residual"),
)
_MLP = {"weight": "up_weight", "bias": "up_bias", "residual": "up_residual"}
NAMES = {
    "linear": _PROJECTION,
    "qkv_projection": _PROJECTION,
    "mlp": (*(_MLP.get(name, name) for name in _PROJECTION[:-1]), "residual"),
}
OF_X_ONLY = ("x", "residual", "up_residual", "down_residual")  # all others may be float32 too


def check(
    function: str, library: Any, given: Sequence[Array | None], options: Options
) -> dict[str, View]:
    """Views by the names of `_PROJECTION`.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, eps, positions.
    """
    arrays = dict(zip(NAMES[function], given, strict=True))
    positions = arrays.pop("positions")
    for name in ("weight", "up_weight", "down_weight"):
        needed = name in arrays and (name != "down_weight" or function == "mlp")
        if needed and arrays[name] is None:
            raise TypeError(f"{function}: {name} must be an array, got None")
    views = views_of(function, library, arrays)
    for name, x in views.items():
        allowed = (views["x"].dtype, *(() if name in OF_X_ONLY else ("float32",)))
        if x.dtype not in allowed:
            fact = f"{name} must be {' or '.join(dict.fromkeys(allowed))} like x"
            raise TypeError(f"{function}: {fact}, got {x.dtype}")
    _check_shapes(function, views)
    if "bias of norm" in views and views["bias of norm"].dtype != views["weight of norm"].dtype:
        got = " and ".join(views[f"{name} of norm"].dtype for name in ("weight", "bias"))
        raise TypeError(f"{function}: weight and bias of norm must have one dtype, got {got}")
    require_eps(function, options.eps)
    by_name = dict(zip(NAMES[function], _PROJECTION))
    views = {by_name[name]: x for name, x in views.items()}
    if function == "qkv_projection":
        _check_heads(function, views, options)
        if "cos" in views:
            views = _check_rotary(function, library, views, positions, options)
    return views


def _check_shapes(function: str, views: Mapping[str, View]) -> None:
    x, up = views["x"], "up_weight" if function == "mlp" else "weight"
    ranks = {"qkv_projection": (2, 3)}.get(function, range(1, 64))
    if len(x.shape) not in ranks:
        fact = "x must have 2 or 3 dimensions" if len(ranks) == 2 else "x must have a dimension"
        raise ValueError(f"{function}: {fact}, got {x.shape}")
    if not 1 <= x.shape[-1] < MAX_SIZE:
        fact = f"the last dimension of x must have 1 to {MAX_SIZE - 1} numbers"
        raise ValueError(f"{function}: {fact}, got {x.shape}")
    rows = x.shape[:-1]
    columns = _matrix(function, views, up, x.shape[-1])
    shapes = {"gate_weight": views[up].shape, up.replace("weight", "bias"): (columns,)}
    shapes |= {"gate_bias": (columns,)}
    shapes |= {"weight of norm": x.shape[-1:], "bias of norm": x.shape[-1:]}
    if function == "mlp":
        columns = _matrix(function, views, "down_weight", columns)
        shapes["down_bias"] = (columns,)
    shapes["residual"] = (*rows, columns)
    for name, shape in shapes.items():
        if name in views and views[name].shape != shape:
            fact = f"{name} must have shape {tuple(shape)}"
            raise ValueError(f"{function}: {fact}, got {views[name].shape}")
    if "gate_bias" in views and "gate_weight" not in views:
        raise ValueError(f"{function}: gate_bias must come with gate_weight, got it alone")
    for name, y in views.items():
        if y.shape and y.shape[-1] > 1 and y.strides[-1] != 1 and 0 not in y.shape:
            fact = f"the last dimension of {name} must be contiguous"
            raise ValueError(f"{function}: {fact}, got strides {y.strides}")


def _matrix(function: str, views: Mapping[str, View], name: str, depth: int) -> int:
    """The rows of a weight."""
    shape = views[name].shape
    if len(shape) != 2 or shape[1] != depth or not 1 <= shape[0] < MAX_SIZE:
        fact = f"{name} must have shape (d_out, {depth}), d_out from 1 to {MAX_SIZE - 1}"
        raise ValueError(f"{function}: {fact}, got {shape}")
    return shape[0]


def check_rotation(
    function: str,
    library: Any,
    x: Array,
    angles: tuple[Array, Array, Array | None],
    options: Options,
) -> dict[str, View]:
    """Views of x (..., columns of q, k and v), of cos and sin, and of positions if there are some.

    Raises:
        As `check`.
    """
    cos, sin, positions = angles
    views = views_of(function, library, {"x": x, "cos": cos, "sin": sin})
    _check_angle_dtypes(function, views)
    rows = views["x"]
    if len(rows.shape) not in (2, 3):
        raise ValueError(f"{function}: x must have 2 or 3 dimensions, got {rows.shape}")
    views["weight"] = View((rows.shape[-1], 1), (1, 1), rows.dtype, rows.device)
    _check_heads(function, views, options)
    return _check_rotary(function, library, views, positions, options)


def _check_angle_dtypes(function: str, views: Mapping[str, View]) -> None:
    allowed = dict.fromkeys((views["x"].dtype, "float32"))
    for name in ("cos", "sin"):
        if views[name].dtype not in allowed:
            fact = f"{name} must be {' or '.join(allowed)} like x"
            raise TypeError(f"{function}: {fact}, got {views[name].dtype}")


def _check_heads(function: str, views: Mapping[str, View], options: Options) -> None:
    shape, heads = views["weight"].shape, options.heads[0] + 2 * options.heads[1]
    if shape[0] % heads:
        fact = f"the rows of weight must be a multiple of heads_q + 2 heads_kv = {heads}"
        raise ValueError(f"{function}: {fact}, got {shape}")


def _check_rotary(
    function: str,
    library: Any,
    views: Mapping[str, View],
    positions: Array | None,
    options: Options,
) -> dict[str, View]:
    """The views with that of positions."""
    x, cos, sin = views["x"], views["cos"], views["sin"]
    head_dim = views["weight"].shape[0] // (options.heads[0] + 2 * options.heads[1])
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
