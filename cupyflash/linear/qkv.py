"""The projection in front of attention."""

from ..array import Array
from ..checks import is_integer
from . import dispatch
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

    Arrays as in `cupyflash.linear`.

    Args:
        x: (batch, seqlen, d_in), or (total, d_in) of packed sequences.
        weight: ((heads_q + 2 heads_kv) * head_dim, d_in), the rows of q, then those of k, of v.
        bias: one number for each row of weight.
        heads_q: query heads.
        heads_kv: heads of k and v, a divisor of heads_q; None is heads_q.
        norm: of x, before the product.
        rotary: rotary embedding of q and k; positions are (total,) for packed sequences.

    Returns:
        q (batch, seqlen, heads_q, head_dim), k and v (batch, seqlen, heads_kv, head_dim), without
        batch for packed sequences: views of one array.

    Raises:
        As `cupyflash.linear`, and ValueError for heads and positions.
    """
    arrays, options = with_norm("qkv_projection", Arrays(x, weight, bias=bias), norm)
    heads_kv = heads_q if heads_kv is None else heads_kv
    for name, heads in (("heads_q", heads_q), ("heads_kv", heads_kv)):
        if not is_integer(heads) or heads < 1:
            fact = f"{name} must be an integer of at least 1"
            raise ValueError(f"qkv_projection: {fact}, got {heads!r}")
    if heads_q % heads_kv:
        fact = "heads_kv must divide heads_q"
        raise ValueError(f"qkv_projection: {fact}, got {heads_kv} and {heads_q}")
    options = options._replace(heads=(int(heads_q), int(heads_kv)))
    if rotary is not None:
        if not isinstance(rotary, Rotary):
            fact = "rotary must be a cupyflash.Rotary or None"
            raise TypeError(f"qkv_projection: {fact}, got {type(rotary).__name__}")
        for name in ("cos", "sin"):
            if getattr(rotary, name) is None:
                raise TypeError(f"qkv_projection: {name} must be an array, got None")
        cos, sin, positions, interleaved = rotary
        arrays = arrays._replace(cos=cos, sin=sin, positions=positions)
        options = options._replace(interleaved=bool(interleaved))
    out = dispatch.call("qkv_projection", arrays, options)
    heads = heads_q + 2 * heads_kv
    heads = out.reshape(*x.shape[:-1], heads, out.shape[-1] // heads)
    ends = heads_q, heads_q + heads_kv
    return (
        heads[..., : ends[0], :],
        heads[..., ends[0] : ends[1], :],
        heads[..., ends[1] :, :],
    )
