"""The projections in plain NumPy: the oracle of the tests, and what runs where there is no GPU.

Everything is computed in float64 for float64 arrays, else in float32. Nothing is checked here.
`project` and `mlp` take a function that rounds what each separate operation of a framework would
write to memory; without it nothing but the result is rounded.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy

from ..norm.reference import ACTIVATIONS, norm
from ..runtime.array import Array, compute_dtype


class Arrays(NamedTuple):
    """What a projection reads; see `cupyflash.linear` and `cupyflash.qkv_projection`."""

    x: Array
    weight: Array
    gate_weight: Array | None = None
    bias: Array | None = None
    gate_bias: Array | None = None
    residual: Array | None = None
    norm_weight: Array | None = None
    norm_bias: Array | None = None
    cos: Array | None = None
    sin: Array | None = None
    positions: Array | None = None


class Options(NamedTuple):
    """What else it depends on.

    Attributes:
        eps, rms: of the norm.
        interleaved: pairs of the rotary embedding are neighbours.
        heads: of q, and of k; both 0 where there are none.
    """

    activation: str = "none"
    eps: float = 1e-5
    rms: bool = False
    interleaved: bool = False
    heads: tuple[int, int] = (0, 0)


Round = Callable[[Array], Array]


def project(arrays: Arrays, options: Options, rounded: Round = lambda y: y) -> Array:
    """activation(norm(x) weight^T + bias), gated or turned, + residual; in the dtype of x."""
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
        out = turned(out, arrays, options, rounded)
    if arrays.residual is not None:
        out = rounded(out + arrays.residual.astype(wide))
    return out.astype(arrays.x.dtype)


def _product(x: Array, weight: Array, bias: Array | None) -> Array:
    out = x @ weight.astype(x.dtype).T
    return out if bias is None else out + bias.astype(x.dtype)


def turned(out: Array, arrays: Arrays, options: Options, rounded: Round = lambda y: y) -> Array:
    """out with the heads of q and k turned, in the dtype of the computation."""
    out = out.astype(compute_dtype(out), copy=False)
    heads = sum(options.heads)
    every = heads + options.heads[1]
    split = out.reshape(*out.shape[:-1], every, out.shape[-1] // every)
    turned = rotate(
        split[..., :heads, :],
        arrays.cos,
        arrays.sin,
        arrays.positions,
        options.interleaved,
        rounded,
    )
    return numpy.concatenate([turned, split[..., heads:, :]], -2).reshape(out.shape)


def rotate(
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    interleaved: bool,
    rounded: Round = lambda y: y,
) -> Array:
    """x (..., seqlen, heads, head_dim) turned by the angles of its positions (..., seqlen)."""
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
