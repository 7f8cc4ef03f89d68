"""The projection in front of attention."""

from ..runtime.array import Array
from ..runtime.checks import plain_flag, plain_integer
from . import dispatch
from .checks import MAX_SIZE
from .linear import Norm, Rotary, with_norm
from .reference import Arrays


def qkv_projection(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    heads_q: int,
    heads_kv: int | None = None,
    norm: Norm | None = None,
    rotary: Rotary | None = None,
) -> tuple[Array, Array, Array]:
    """q, k and v of norm(x) weight^T + bias, as `cupyflash.attention` reads them; q and k turned.

    Arrays and gradients as in `cupyflash.linear`.

    Args:
        x: (batch, seqlen, d_in), or (total, d_in) of packed sequences.
        weight: ((heads_q + 2 heads_kv) * head_dim, d_in), the rows of q, then those of k, of v.
        bias: one number for each row of weight.
        heads_q: query heads.
        heads_kv: heads of k and v, a divisor of heads_q; None is heads_q.
        norm: of x, before the product.
        rotary: rotary embedding of q and k. Packed sequences must have positions (total,), which
            begin with 0 in each of them.

    Returns:
        q (batch, seqlen, heads_q, head_dim), k and v (batch, seqlen, heads_kv, head_dim), without
        batch for packed sequences: views of one array.

    Raises:
        As `cupyflash.linear`, ValueError for heads and positions, and NotImplementedError for cos
        and sin that require a gradient.
    """
    arrays, options = with_norm("qkv_projection", Arrays(x, weight, bias=bias), norm)
    heads = _heads(heads_q, heads_q if heads_kv is None else heads_kv)
    options = options._replace(heads=heads)
    if rotary is not None:
        if not isinstance(rotary, Rotary):
            fact = "rotary must be a cupyflash.Rotary or None"
            raise TypeError(f"qkv_projection: {fact}, got {type(rotary).__name__}")
        for name in ("cos", "sin"):
            if getattr(rotary, name) is None:
                raise TypeError(f"qkv_projection: {name} must be an array, got None")
        cos, sin, positions, interleaved = rotary
        arrays = arrays._replace(cos=cos, sin=sin, positions=positions)
        interleaved = plain_flag("qkv_projection", "interleaved of rotary", interleaved)
        options = options._replace(interleaved=interleaved)
    out = dispatch.call("qkv_projection", arrays, options)
    heads_q, heads_kv = heads
    count = heads_q + 2 * heads_kv
    out = out.reshape(*x.shape[:-1], count, out.shape[-1] // count)
    if getattr(out, "requires_grad", False):  # backward: one concatenation, no sum of three
        return out.split((heads_q, heads_kv, heads_kv), -2)
    ends = heads_q, heads_q + heads_kv
    return (
        out[..., : ends[0], :],
        out[..., ends[0] : ends[1], :],
        out[..., ends[1] :, :],
    )


def _heads(heads_q: int, heads_kv: int) -> tuple[int, int]:
    """Both as plain integers.

    Raises:
        TypeError: they are no integers.
        ValueError: they are less than 1, or the second does not divide the first.
    """
    plain = []
    for name, given in (("heads_q", heads_q), ("heads_kv", heads_kv)):
        heads = plain_integer("qkv_projection", name, given)
        if not 1 <= heads < MAX_SIZE:
            fact = f"{name} must be an integer from 1 to {MAX_SIZE - 1}"
            raise ValueError(f"qkv_projection: {fact}, got {heads}")
        plain.append(heads)
    heads_q, heads_kv = plain
    if heads_q % heads_kv:
        fact = "heads_kv must divide heads_q"
        raise ValueError(f"qkv_projection: {fact}, got {heads_kv} and {heads_q}")
    return heads_q, heads_kv
