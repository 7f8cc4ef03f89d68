"""The CPU path: NumPy arrays and torch CPU tensors through the tiled algorithm of the reference."""

from typing import Any

import numpy

from . import reference
from .array import Array
from .problem import Options


def forward(
    library: Any,
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """(out, lse) of checked arrays."""
    qkv = [_rows_first(library.to_numpy(x), options) for x in (q, k, v)]
    arguments = _arguments(library, options, alibi_slopes)
    if cu_seqlens is None:
        out, lse = reference.attention_tiled(*qkv, **arguments)
    else:
        out, lse = reference.attention_varlen(*qkv, *map(library.to_numpy, cu_seqlens), **arguments)
    return library.from_numpy(_rows_first(out, options), q), library.from_numpy(lse)


def backward(
    library: Any,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: Options,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of checked arrays; always repeatable."""
    tensors = [_rows_first(library.to_numpy(x), options) for x in (dout, q, k, v, out)]
    tensors.append(library.to_numpy(lse))
    arguments = _arguments(library, options, alibi_slopes)
    if cu_seqlens is None:
        gradients = reference.attention_tiled_backward(*tensors, **arguments)
    else:
        cu_seqlens = map(library.to_numpy, cu_seqlens)
        gradients = reference.attention_varlen_backward(*tensors, *cu_seqlens, **arguments)
    return tuple(library.from_numpy(_rows_first(x, options), q) for x in gradients)


def _rows_first(x: numpy.ndarray, options: Options) -> numpy.ndarray:
    """Between layouts "bhsd" and "bshd", either way, without a copy."""
    return x.swapaxes(1, 2) if options.layout == "bhsd" else x


def _arguments(library: Any, options: Options, alibi_slopes: Array | None) -> dict[str, Any]:
    window = options.window
    if window is not None:
        window = tuple(None if side in (None, -1) else side for side in window)
    return {
        "causal": options.causal,
        "scale": options.scale,
        "window": window,
        "softcap": options.softcap,
        "alibi_slopes": None if alibi_slopes is None else library.to_numpy(alibi_slopes),
    }
