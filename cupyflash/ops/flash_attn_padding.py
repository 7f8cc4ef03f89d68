"""Padded sequences to packed ones and back, with the signatures of ``flash_attn.bert_padding``.

Array operations of the caller's library do it, so that torch has their gradients.
"""

from ..runtime.array import Array, ArrayT, array_namespace
from ..runtime.scratch import array_operations


def index_first_axis(x: ArrayT, indices: Array) -> ArrayT:
    """x[indices], the rows of the first axis.

    Args:
        x: (rows, …), any dtype.
        indices: (total,), int32 or int64.

    Returns:
        (total, …), a copy.

    Raises:
        IndexError: an index that does not exist.
    """
    with array_operations(x):
        return x[indices]


def unpad_input(
    hidden_states: ArrayT, attention_mask: Array, unused_mask: Array | None = None
) -> tuple[ArrayT, Array, Array, int, Array]:
    """The tokens of padded sequences one after another; waits for the GPU, as flash-attn's does.

    Args:
        hidden_states: (batch, seqlen, …).
        attention_mask: (batch, seqlen), bool or integer, 1 where there is a token.
        unused_mask: like it, 1 where a token has a place that is not used.

    Returns:
        The tokens (total, …); their indices (total,) int64 in (batch * seqlen); cu_seqlens (batch +
        1,) int32; the longest sequence; the tokens of each sequence that are used, (batch,) int32.

    Raises:
        ValueError: shapes.
    """
    shape = tuple(hidden_states.shape)
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        got = () if mask is None else tuple(mask.shape)
        if got != shape[:2] and (mask is not None or name == "attention_mask"):
            fact = f"{name} must be (batch, seqlen) = {shape[:2]}"
            raise ValueError(f"unpad_input: {fact}, got {got or mask}")
    with array_operations(hidden_states):
        used = attention_mask != 0
        there = used if unused_mask is None else used | (unused_mask != 0)
        (indices,) = _nonzero(there.reshape(-1))
        counts, seqused = _int32(there.sum(1)), _int32(used.sum(1))
        cu_seqlens = _after_zero(_int32(counts.cumsum(0)))
        rows = hidden_states.reshape(-1, *shape[2:])[indices]
        longest = int(counts.max()) if shape[0] else 0
    return rows, indices, cu_seqlens, longest, seqused


def pad_input(hidden_states: ArrayT, indices: Array, batch: int, seqlen: int) -> ArrayT:
    """The inverse of `unpad_input`: (batch, seqlen, …), 0 where there is no token.

    Args:
        hidden_states: (total, …).
        indices: (total,), as `unpad_input` returns them.
        batch, seqlen: those of the result.

    Raises:
        IndexError: an index that does not exist.
        ValueError: another number of indices than of tokens.
    """
    rows, given = tuple(hidden_states.shape[:1]), tuple(indices.shape)
    if given != rows:  # one token would go to all of the places
        raise ValueError(f"pad_input: indices must be (total,) = {rows}, got {given}")
    shape = (batch * seqlen, *hidden_states.shape[1:])
    with array_operations(hidden_states):
        if hasattr(hidden_states, "new_zeros"):
            padded = hidden_states.new_zeros(shape).index_put((indices,), hidden_states)
        else:
            padded = array_namespace(hidden_states).zeros(shape, hidden_states.dtype)
            padded[indices] = hidden_states
        return padded.reshape(batch, seqlen, *shape[1:])


def _nonzero(x: Array) -> tuple[Array]:
    return x.nonzero(as_tuple=True) if hasattr(x, "new_zeros") else x.nonzero()


def _int32(x: Array) -> Array:
    return x.int() if hasattr(x, "new_zeros") else x.astype("int32")


def _after_zero(ends: Array) -> Array:
    """(0, *ends)."""
    if hasattr(ends, "new_zeros"):
        import torch

        return torch.nn.functional.pad(ends, (1, 0))
    xp = array_namespace(ends)
    return xp.concatenate([xp.zeros(1, "int32"), ends])
