"""Attention in the signature of `torch.nn.attention.flex_attention.flex_attention`."""

from collections.abc import Callable
from typing import Any

from ...runtime.array import Array
from ...runtime.checks import plain_flag
from .operations import FORWARD
from .options import plain_options
from .score_text.arguments import with_text

FUNCTION = "flex_attention"


def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, without torch.compile and on a CPU, too.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim); arrays are those of `cupyflash.attention`.
        key, value: (batch, heads_kv, seqlen_k, head_dim); value may have another head_dim.
        score_mod: a function of (score, batch, head, query, key), or a `cupyflash.Score`.
        block_mask: a ``BlockMask`` of torch, a function of (batch, head, query, key), or a
            `cupyflash.Mask`.
        scale: of the scores; default ``1 / sqrt(head_dim)``.
        enable_gqa: heads_q may be a multiple of heads_kv.
        return_lse: return (out, lse), lse float32 (batch, heads_q, seqlen_q), natural logarithm.
        kernel_options: is not read, as it chooses among torch's kernels.
        return_aux: an ``AuxRequest`` of torch: return (out, ``AuxOutput``).

    Returns:
        out like query, with the head_dim of value. A query that sees no key gives 0.

    Raises:
        TypeError, ValueError: as `cupyflash.attention`; a BlockMask of other lengths.
        NotImplementedError: as `cupyflash.attention`; ``max_scores`` of return_aux.

    Source: FlexAttention, arXiv:2412.05496.
    """
    enable_gqa = plain_flag(FUNCTION, "enable_gqa", enable_gqa)
    return_lse = plain_flag(FUNCTION, "return_lse", return_lse)
    if getattr(return_aux, "max_scores", False):
        fact = "return_aux has the LSE and not the largest scores"
        raise NotImplementedError(f"{FUNCTION}: {fact}, got {return_aux}")
    heads = [x.shape[1] for x in (query, key, value) if len(getattr(x, "shape", ())) == 4]
    if not enable_gqa and len(set(heads)) > 1:
        fact = "query, key and value must have the same number of heads without enable_gqa"
        raise ValueError(f"{FUNCTION}: {fact}, got {heads}")
    options, arrays = plain_options(FUNCTION, scale=scale, layout="bhsd"), (query, key, value)
    if not score_mod is block_mask is None:
        options, arrays = with_text(FUNCTION, options, arrays, 3, score_mod, block_mask)
    need_lse = return_lse or getattr(return_aux, "lse", False)
    out, lse = FORWARD(FUNCTION, arrays, (options, need_lse))
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if need_lse else None)
    return (out, lse) if return_lse else out
