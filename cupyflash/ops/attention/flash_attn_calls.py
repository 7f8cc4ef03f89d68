"""The call of attention that the arguments of flash-attn's functions ask for."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.array import Array
from ...runtime.checks import plain_flag
from .operations import FORWARD
from .options import Extras, plain_options

if TYPE_CHECKING:
    from .score_text.scores import Mask, Score


class Lengths(NamedTuple):
    """The offsets at which the sequences of varlen functions begin and end."""

    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Array | None
    seqused_k: Array | None


def call(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    options: dict[str, Any],
    alibi_slopes: Array | None,
    sinks: Array | None,
    return_attn_probs: bool,
    lengths: Lengths | None = None,
    score: "Score | Callable | None" = None,
    mask: "Mask | Callable | None" = None,
) -> Array | tuple[Array, Array, None]:
    """The result of ``function``.

    Args:
        options: of `plain_options`, as far as the signatures of flash-attn have them.
    """
    return_attn_probs = plain_flag(function, "return_attn_probs", return_attn_probs)
    layout, max_seqlens, arrays = "bshd", None, (q, k, v)
    if lengths is not None:
        layout, max_seqlens = _packed_layout(q, k, lengths)
        arrays += (
            lengths.cu_seqlens_q, lengths.cu_seqlens_k, alibi_slopes, None, sinks, None,
            lengths.seqused_q, lengths.seqused_k,
        )  # fmt: skip
    elif not alibi_slopes is sinks is None:
        arrays = (*arrays, *Extras(alibi_slopes=alibi_slopes, sinks=sinks))
    plain = plain_options(function, layout=layout, max_seqlens=max_seqlens, **options)
    if not score is mask is None:
        from .score_text.arguments import with_text

        plain, arrays = with_text(function, plain, arrays, 3, score, mask)
    out, lse = FORWARD(function, arrays, (plain, return_attn_probs))
    return (out, lse, None) if return_attn_probs else out


def _packed_layout(q: Array, k: Array, lengths: Lengths) -> tuple[str, tuple[int, int] | None]:
    """The layout, "thd" where there are cu_seqlens, and the longest sequences."""
    packed_q, packed_k = lengths.cu_seqlens_q is not None, lengths.cu_seqlens_k is not None
    if packed_q and packed_k:
        return "thd", (lengths.max_seqlen_q, lengths.max_seqlen_k)
    if packed_q:
        return "thd-bshd", (lengths.max_seqlen_q, _padded_length(k))
    if packed_k:
        return "bshd-thd", (_padded_length(q), lengths.max_seqlen_k)
    return "bshd", None


def _padded_length(x: Array) -> int:
    """Rows of padded sequences; whether x has such an axis is checked later."""
    shape = getattr(x, "shape", ())
    return shape[1] if isinstance(shape, tuple) and len(shape) > 1 else 0


def unpack(function: str, name: str, packed: Array, rank: int, parts: int) -> list[Array]:
    """The parts along the axis before the heads, as views."""
    shape = getattr(packed, "shape", ())
    shape = tuple(shape) if isinstance(shape, tuple) else ()  # no class of arrays
    if len(shape) != rank or shape[-3] != parts:
        axes = "(batch, seqlen" if rank == 5 else "(total"
        fact = f"{name} must be {axes}, {parts}, heads, head_dim)"
        raise ValueError(f"{function}: {fact}, got {shape or type(packed).__name__}")
    return [packed[..., part, :, :] for part in range(parts)]
