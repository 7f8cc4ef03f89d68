"""The checks of the arrays of projections, before anything is launched."""

from collections.abc import Mapping, Sequence
from typing import Any

from ... import environment
from ...runtime.array import Array, View
from ...runtime.checks import require_eps
from ...runtime.specs import Spec, views_of
from .options import Arrays, Options

MAX_SIZE = 2**30  # the largest d_in and d_out
SIZES = dict.fromkeys(("d_in", "d_hidden", "d_out"), range(1, MAX_SIZE))

EITHER = "like or float32"
X = {"x": Spec((..., "d_in"), strides=1)}
NORM = {
    "norm_weight": Spec(("d_in",), EITHER, optional=True),
    "norm_bias": Spec(("d_in",), "like norm_weight", optional=True),
}
RESIDUAL = {"residual": Spec((..., "d_out"), strides=1, optional=True)}
ROTARY = {
    "cos": Spec(("num_positions", "rotary_dim / 2"), EITHER, optional=True),
    "sin": Spec(("num_positions", "rotary_dim / 2"), "like cos", optional=True),
    "positions": Spec((...,), "int32 or int64", "free", optional=True),
}


def _projection(out: str) -> dict[str, Spec]:
    """The weights and biases of a projection to ``out``, gated or not."""
    weight, bias = Spec((out, "d_in"), EITHER, 1), Spec((out,), EITHER, optional=True)
    gate = {"gate_weight": weight._replace(optional=True), "gate_bias": bias}
    return {"weight": weight, "bias": bias, **gate}


SPECS = {
    "linear": X | NORM | _projection("d_out") | RESIDUAL,
    "qkv_projection": X | NORM | _projection("d_out") | ROTARY,
    "mlp": {
        **(X | NORM | _projection("d_hidden")),
        "down_weight": Spec(("d_out", "d_hidden"), EITHER, 1),
        "down_bias": Spec(("d_out",), EITHER, optional=True),
        **RESIDUAL,
    },
}
# The arguments in errors, where they have other names than the fields of `Arrays`.
NAMES = {"norm_weight": "weight of norm", "norm_bias": "bias of norm"}
NAMES_OF_MLP = {**NAMES, "weight": "up_weight", "bias": "up_bias"}


def check(
    function: str, library: Any, given: Sequence[Array | None], options: Options
) -> dict[str, View]:
    """Views by the fields of `Arrays`.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, eps, positions.
    """
    specs, arrays = SPECS[function], dict(zip(Arrays._fields, given, strict=True))
    names = NAMES_OF_MLP if function == "mlp" else NAMES
    if arrays["gate_bias"] is not None and arrays["gate_weight"] is None:
        raise ValueError(f"{function}: gate_bias must come with gate_weight, got it alone")
    views = views_of(
        function,
        library,
        specs,
        [arrays[name] for name in specs],
        say=lambda name: names.get(name, name),
        **SIZES,
    )
    require_eps(function, options.eps)
    if function == "qkv_projection":
        _check_heads(views["weight"].shape, options)
        _check_rotary(views, views["weight"].shape[0], arrays["positions"], options)
    return views


def check_rotation(
    library: Any, x: Array, angles: tuple[Array, Array, Array | None], options: Options
) -> dict[str, View]:
    """Views of x (..., columns of q, k and v), of cos and sin, and of positions if there are some.

    Raises:
        As `check`, of qkv_projection.
    """
    specs = {"x": Spec((..., "columns"), strides="free"), **ROTARY}
    views = views_of("qkv_projection", library, specs, (x, *angles))
    columns = views["x"].shape[-1]
    _check_heads((columns, 1), options)
    _check_rotary(views, columns, angles[2], options)
    return views


def _check_heads(shape: tuple[int, ...], options: Options) -> None:
    """The shape of a weight."""
    heads = options.heads[0] + 2 * options.heads[1]
    if shape[0] % heads:
        fact = f"the rows of weight must be a multiple of heads_q + 2 heads_kv = {heads}"
        raise ValueError(f"qkv_projection: {fact}, got {shape}")


def _check_rotary(
    views: Mapping[str, View], columns: int, positions: Array | None, options: Options
) -> None:
    """Check how x, cos and positions fit; ``columns`` are those of q, k and v together."""
    function, x = "qkv_projection", views["x"].shape
    if len(x) not in (2, 3):
        raise ValueError(f"{function}: x must have 2 or 3 dimensions, got {x}")
    if "cos" not in views:
        return
    cos = views["cos"].shape
    head_dim = columns // (options.heads[0] + 2 * options.heads[1])
    if head_dim % 2:
        raise ValueError(f"{function}: head_dim must be even beside rotary, got {head_dim}")
    if not cos[0] or not 1 <= cos[1] <= head_dim // 2:
        fact = f"cos must have shape (num_positions, rotary_dim / 2), rotary_dim <= {head_dim}"
        raise ValueError(f"{function}: {fact}, got {cos}")
    if positions is None:
        if len(x) == 2:
            fact = "positions must be given beside packed sequences, x (total, d_in)"
            raise ValueError(f"{function}: {fact}, or x be (batch, seqlen, d_in), got {x}")
        if x[-2] > cos[0]:
            fact = f"cos must have at least {x[-2]} positions, as x has"
            raise ValueError(f"{function}: {fact}, got {cos}")
        return
    of_host = views["x"].device < 0 or environment.current().debug
    if of_host and 0 not in views["positions"].shape:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= cos[0]:
            fact = f"positions must be from 0 to {cos[0] - 1}"
            raise ValueError(f"{function}: {fact}, got {low} to {high}")
