"""`flash_attn_varlen_func` of keys and values in pages."""

from typing import Any

from ..runtime.array import Array
from ..runtime.scratch import array_operations
from .decode.operations import ATTENTION, plain


def paged_varlen(
    function: str,
    arrays: tuple[Array, ...],
    lengths: Any,
    block_table: Array,
    options: dict[str, Any],
    alibi_slopes: Array | None,
    sinks: Array | None,
    return_attn_probs: bool,
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_varlen_func` of keys and values in pages.

    Args:
        arrays: q, and the pages k and v, (num_pages, page_size, heads_kv, head_dim).
        lengths: the `Lengths` of the call.
        options: those of the call by their names in `plain_options`.
    """
    refused = {"dropout_p": options.pop("dropout_p"), "seqused_q": lengths.seqused_q}
    for name, x in refused.items():
        if x is not None and not (name == "dropout_p" and x == 0):
            fact = f"{name} must be {'0.0' if name == 'dropout_p' else 'None'} beside a block_table"
            raise NotImplementedError(f"{function}: {fact}, got {type(x).__name__}")
    del options["deterministic"]  # every result is
    ends, used = lengths.cu_seqlens_k, lengths.seqused_k
    if lengths.cu_seqlens_q is None or (ends is None and used is None):
        missing = "cu_seqlens_q" if lengths.cu_seqlens_q is None else "cu_seqlens_k or seqused_k"
        raise TypeError(f"{function}: {missing} must be int32 beside a block_table, got None")
    plain_call = plain(
        function, **options, num_splits=0, return_lse=return_attn_probs,
        max_seqlen_q=lengths.max_seqlen_q, counted=False,
    )  # fmt: skip
    with array_operations(arrays[0]):
        used = ends[1:] - ends[:-1] if used is None else used
    out, lse = ATTENTION(
        function,
        (
            arrays[0], None, None, *arrays[1:], used, block_table, None, lengths.cu_seqlens_q,
            alibi_slopes, sinks, None, None, None, None,
        ),
        plain_call,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out
