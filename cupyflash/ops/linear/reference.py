"""The projections in plain NumPy: the oracle of the tests, and the path of arrays on the CPU.

Everything is computed in float64 for float64 arrays, else in float32. Nothing is checked here.
`project` takes a function that rounds what each separate operation of a framework would write to
memory; without it nothing but the result is rounded.
"""

from collections.abc import Callable

import numpy

from ...runtime.array import Array, compute_dtype, silent
from ..norm.reference import ACTIVATIONS, norm
from .options import Arrays, Options

Round = Callable[[Array], Array]


@silent
def project(arrays: Arrays, options: Options, rounded: Round = lambda y: y) -> Array:
    """activation(norm(x) weight^T + bias), gated or rotated, + residual; in the dtype of x."""
    if arrays.down_weight is not None:
        hidden = project(arrays.first(), options, rounded)
        return project(arrays.second(hidden), Options(), rounded)
    wide = compute_dtype(arrays.x)
    x = arrays.x.astype(wide)
    if arrays.norm_weight is not None:
        x = norm(options.rms, x, arrays.norm_weight, arrays.norm_bias, options.eps)[0]
        x = rounded(x)
    out = rounded(_product(x, arrays.weight, arrays.bias))
    activate = ACTIVATIONS[options.activation][0]
    if arrays.gate_weight is not None:
        gate = rounded(_product(x, arrays.gate_weight, arrays.gate_bias))
        out = rounded(rounded(activate(gate)) * out)
    elif options.activation != "none":
        out = rounded(activate(out))
    if arrays.cos is not None:
        out = rotated(out, arrays, options, rounded)
    if arrays.residual is not None:
        out = rounded(out + arrays.residual.astype(wide))
    return out.astype(arrays.x.dtype)


def _product(x: Array, weight: Array, bias: Array | None) -> Array:
    out = x @ weight.astype(x.dtype, copy=False).T
    return out if bias is None else out + bias.astype(x.dtype)


@silent
def rotated(out: Array, arrays: Arrays, options: Options, rounded: Round = lambda y: y) -> Array:
    """out with the heads of q and k rotated, in the dtype of the computation."""
    out = out.astype(compute_dtype(out), copy=False)
    heads = sum(options.heads)
    count = heads + options.heads[1]
    split = out.reshape(*out.shape[:-1], count, out.shape[-1] // count)
    angles = arrays.cos, arrays.sin, arrays.positions
    q_and_k = rotate(split[..., :heads, :], *angles, options.interleaved, rounded)
    return numpy.concatenate([q_and_k, split[..., heads:, :]], -2).reshape(out.shape)


def rotate(
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    interleaved: bool,
    rounded: Round = lambda y: y,
) -> Array:
    """x (..., seqlen, heads, head_dim) rotated by the angles of its positions (..., seqlen)."""
    if positions is None:
        positions = numpy.broadcast_to(numpy.arange(x.shape[-3]), x.shape[:-2])
    cos, sin = (y.astype(x.dtype)[positions][..., None, :] for y in (cos, sin))
    half = cos.shape[-1]
    if interleaved:
        places = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        places = slice(0, half), slice(half, 2 * half)
    first, second = (x[..., place] for place in places)
    result = x.copy()
    result[..., places[0]] = rounded(rounded(first * cos) - rounded(second * sin))
    result[..., places[1]] = rounded(rounded(second * cos) + rounded(first * sin))
    return result


@silent
def head_norm(
    x: Array,
    weight: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    eps: float,
    rounded: Round = lambda y: y,
) -> Array:
    """The heads of x (rows, heads, head_dim) after their RMSNorm and rotary embedding."""
    normal = norm(True, x.astype(compute_dtype(x)), weight, None, eps)[0]
    return rotate(rounded(normal), cos, sin, positions, False, rounded).astype(x.dtype)
