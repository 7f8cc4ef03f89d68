"""Attention in the signature of `torch.nn.functional.scaled_dot_product_attention`."""

import math
from typing import Any, NoReturn

import numpy

from ...runtime.array import Array, ArrayT, compiling
from ...runtime.checks import plain_flag
from ...runtime.lookup import from_foreign, library_of, to_foreign
from .foreign import refuse, refuses_foreign
from .operations import FORWARD
from .options import Extras, plain_options

FUNCTION = "scaled_dot_product_attention"
CAUSAL_BIAS = ("torch.nn.attention.bias", "CausalBias")  # a tensor whose memory holds no numbers


@refuses_foreign
def scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **foreign: NoReturn,
) -> ArrayT:
    """`torch.nn.functional.scaled_dot_product_attention`, for the arrays of `cupyflash.attention`.

    A row of the mask that hides every key gives 0. So does one that adds less than -2^24 to every
    score, where torch weighs all keys equally: float32 keeps no digit of the scores there. One that
    adds more than 2^24 adds 2^24.

    Args:
        query: (..., heads_q, seqlen_q, head_dim), with any number of axes in front of seqlen_q.
        key, value: (..., heads_kv, seqlen_k, head_dim), the axes in front those of query. The
            last axis of a torch tensor is made contiguous where it is not. The head_dim of value
            may be another one.
        attn_mask: what broadcasts to (..., heads_q, seqlen_q, seqlen_k): bool (True: the query sees
            the key), or float32 or the dtype of query (added to the scores; has a gradient). Or a
            `torch.nn.attention.bias.CausalBias` of (seqlen_q, seqlen_k).
        dropout_p: probability to drop a weight, whether training or not.
        is_causal: query i sees the keys up to i; not with attn_mask.
        scale: of the scores; default ``1 / sqrt(head_dim)``.
        enable_gqa: heads_q may be a multiple of heads_kv.

    Returns:
        like query, with the head_dim of value.

    Raises:
        TypeError, ValueError, NotImplementedError: as `cupyflash.attention`.
    """
    if foreign:
        refuse(scaled_dot_product_attention, foreign)
    if not isinstance(is_causal, bool):
        is_causal = plain_flag(FUNCTION, "is_causal", is_causal)
    if not isinstance(enable_gqa, bool):
        enable_gqa = plain_flag(FUNCTION, "enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError(f"{FUNCTION}: attn_mask must be None with is_causal=True, got both")
    if not compiling():
        given = {"query": query, "key": key, "value": value}
        given |= {} if attn_mask is None else {"attn_mask": attn_mask}
        library = library_of(query)
        if library is None:
            known = {name: _known(name, x) for name, x in given.items()}
            options = {"dropout_p": dropout_p, "is_causal": is_causal}
            options |= {"scale": scale, "enable_gqa": enable_gqa}
            return to_foreign(scaled_dot_product_attention(**known, **options), query)
        _require_dense(library, given)
    shapes = [tuple(x.shape) for x in (query, key, value)]
    shape = shapes[0]
    same_batch = shape[:-3] == shapes[1][:-3] == shapes[2][:-3]
    if not (len(shape) == len(shapes[1]) == len(shapes[2]) >= 2 and same_batch):
        fact = "query, key and value must have the same axes (..., heads, seqlen, head_dim)"
        fact += ", and the same sizes of those before heads"
        raise ValueError(f"{FUNCTION}: {fact}, got {shapes}")
    q, k, v = (_four_axes(x) for x in (query, key, value))
    if not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        heads = [x.shape[1] for x in (q, k, v)]
        fact = "query, key and value must have the same number of heads without enable_gqa"
        raise ValueError(f"{FUNCTION}: {fact}, got {heads}")
    causal = "top-left" if is_causal else False
    if (type(attn_mask).__module__, type(attn_mask).__name__) == CAUSAL_BIAS:
        causal, attn_mask = _alignment(attn_mask, (q.shape[2], k.shape[2])), None
    options = plain_options(
        FUNCTION, causal=causal, scale=scale, layout="bhsd", dropout_p=dropout_p
    )
    arrays = (q, k, v)
    if attn_mask is not None:
        arrays = (*arrays, *Extras(bias=_at_most_four_axes(attn_mask, shape)))
    out, _ = FORWARD(FUNCTION, arrays, (options, False))
    return out if len(shape) == 4 else _reshape(out, (*shape[:-1], shapes[2][-1]))


def _alignment(bias: Any, seqlens: tuple[int, int]) -> str:
    """The option `causal` of a CausalBias."""
    if (bias.seq_len_q, bias.seq_len_kv) != seqlens:
        fact = f"attn_mask must be of the seqlen_q and seqlen_k of query and key, {seqlens}"
        raise ValueError(f"{FUNCTION}: {fact}, got {(bias.seq_len_q, bias.seq_len_kv)}")
    return "top-left" if bias.variant.name == "UPPER_LEFT" else "bottom-right"


def _known(name: str, x: Array) -> Array:
    """x, or its memory as an array of a library whose axes can be reshaped."""
    return x if library_of(x) else from_foreign(FUNCTION, x, name)


def _require_dense(library: Any, arrays: dict[str, Array]) -> None:
    """Arrays of one library with strides, whose axes can be reshaped."""
    for name, x in arrays.items():
        if library_of(x) is not library:
            got = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
            got = got.removeprefix("builtins.")
            raise TypeError(f"{FUNCTION}: {name} must be a {library.name} like query, got {got}")
        if not library.is_strided(x):
            raise TypeError(f"{FUNCTION}: {name} must be dense, got {library.view(x).dtype}")


def _four_axes(x: Array) -> Array:
    """(batch, heads, seqlen, head_dim); the last axis of a torch tensor is made contiguous."""
    if hasattr(x, "stride") and x.stride(-1) != 1:
        x = x.contiguous()
    shape = tuple(x.shape)
    if len(shape) == 4:
        return x
    heads = shape[-3] if len(shape) > 2 else 1
    return _reshape(x, (math.prod(shape[:-3]), heads, *shape[-2:]))


def _reshape(x: Array, shape: tuple[int, ...]) -> Array:
    """x.reshape(shape), which may copy: on the device of x."""
    library = None if compiling() else library_of(x)
    return x.reshape(shape) if library is None else library.reshape(shape, x)


def _at_most_four_axes(mask: Array, shape: tuple[int, ...]) -> Array:
    """A mask of what `_four_axes` made of a query of this shape."""
    got = tuple(mask.shape)
    batch = shape[:-3]
    mask_batch = (1,) * (len(batch) + 3 - len(got)) + got[:-3]
    if len(got) > len(shape) or any(a not in (1, b) for a, b in zip(mask_batch, batch)):
        fact = "attn_mask must broadcast to (..., heads_q, seqlen_q, seqlen_k)"
        raise ValueError(f"{FUNCTION}: {fact}, got {got} for query {shape}")
    if len(got) < 2:
        return _reshape(mask, (1,) * (2 - len(got)) + got)
    if len(got) <= 3 or len(shape) == 4:
        return mask
    whole = (*batch, *got[-3:])
    mask = mask.expand(whole) if hasattr(mask, "expand") else numpy.broadcast_to(mask, whole)
    return _reshape(mask, (math.prod(batch), *got[-3:]))
