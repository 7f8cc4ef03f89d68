"""Attention in plain array code: the oracle of the tests, and what runs where there is no GPU.

Forward, for each query row i (s_ij from :mod:`cupyflash.score`)::

    lse_i = log sum_j exp(s_ij)        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j

Backward, from do = dL/do::

    dv_j = sum_i p_ij do_i             dp_ij = do_i . v_j              delta_i = do_i . o_i
    ds_ij = p_ij (dp_ij - delta_i)     x_ij = ds_ij * ds_ij/d(q_i . k_j)
    dq_i = sum_j x_ij k_j              dk_j = sum_i x_ij q_i

``attention_exact`` writes exactly that with all scores in memory; ``attention_tiled``, from
:mod:`cupyflash.online_softmax`, keeps one tile of them.

All functions take NumPy or CuPy arrays, q (batch, seqlen_q, heads_q, head_dim) and k, v (batch,
seqlen_k, heads_kv, head_dim), and the options of ``cupyflash.attention``: causal, scale, window,
softcap, alibi_slopes. They compute in float64 for float64 inputs, else in float32; results have
the dtype of the inputs, the LSE that of the computation. A row that sees no key gives 0 and -inf.
Nothing is checked here: ``cupyflash.attention`` does that.
"""

from typing import Any

from cupyflash.grouped import (
    Array,
    array_namespace,
    compute_dtype,
    empty_results,
    group_heads,
    grouped_matmul,
    grouped_matmul_transposed,
    heads_first,
)
from cupyflash.online_softmax import attention_tiled, attention_tiled_backward
from cupyflash.score import ScoreFunction, finite_max, log_sum, positive_sum

__all__ = [
    "array_namespace",
    "attention_exact",
    "attention_exact_backward",
    "attention_tiled",
    "attention_tiled_backward",
    "attention_varlen",
    "attention_varlen_backward",
]


def attention_exact(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Softmax attention with all scores in memory.

    Returns:
        out like q, and the LSE (batch, heads_q, seqlen_q), natural logarithm.
    """
    xp = array_namespace(q)
    out, lse, out_groups, lse_groups = empty_results(q, k)
    q_groups, k_groups, v_groups = group_heads(q, k), heads_first(k), heads_first(v)
    score = ScoreFunction.of(q_groups, k_groups, **options)
    scores, _ = score.tile(q_groups, k_groups, 0, 0)
    if scores.size:
        row_max = finite_max(scores.max(axis=-1))
        weights = xp.exp(scores - row_max[..., None])
        row_sum = weights.sum(axis=-1)
        weights /= positive_sum(row_sum)[..., None]
        out_groups[...] = grouped_matmul(weights, v_groups)
        lse_groups[...] = log_sum(row_max, row_sum)
    return out.astype(q.dtype, copy=False), lse


def attention_exact_backward(
    dout: Array, q: Array, k: Array, v: Array, **options: Any
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`attention_exact` for dout like q: (dq, dk, dv) like (q, k, v)."""
    xp = array_namespace(q)
    q_groups, k_groups, v_groups = group_heads(q, k), heads_first(k), heads_first(v)
    dout_groups = group_heads(dout, k)
    scores, derivative = ScoreFunction.of(q_groups, k_groups, **options).tile(
        q_groups, k_groups, 0, 0
    )
    if not scores.size:
        return xp.zeros(q.shape, q.dtype), xp.zeros(k.shape, k.dtype), xp.zeros(v.shape, v.dtype)
    weights = xp.exp(scores - finite_max(scores.max(axis=-1))[..., None])
    weights /= positive_sum(weights.sum(axis=-1))[..., None]
    dv = grouped_matmul_transposed(weights, dout_groups)
    dweights = grouped_matmul(dout_groups, v_groups.swapaxes(-1, -2))
    delta = (weights * dweights).sum(axis=-1)
    dscores = weights * (dweights - delta[..., None]) * derivative
    dq = grouped_matmul(dscores, k_groups).transpose(0, 3, 1, 2, 4).reshape(q.shape)
    dk = grouped_matmul_transposed(dscores, q_groups)
    return (
        dq.astype(q.dtype, copy=False),
        dk.swapaxes(1, 2).astype(k.dtype, copy=False),
        dv.swapaxes(1, 2).astype(v.dtype, copy=False),
    )


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    alibi_slopes: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Attention of packed sequences: sequence b has the rows cu_seqlens[b] … cu_seqlens[b + 1].

    Args:
        q: (total_q, heads_q, head_dim); k, v: (total_k, heads_kv, head_dim).
        cu_seqlens_q: (batch + 1,) integers from 0, not decreasing; so is cu_seqlens_k.

    Returns:
        out like q, and the LSE (heads_q, total_q); 0 and -inf for rows of no sequence.
    """
    xp = array_namespace(q)
    out = xp.zeros(q.shape, q.dtype)
    lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, compute_dtype(q))
    for b, rows, cols in _sequences(cu_seqlens_q, cu_seqlens_k):
        slopes = _slopes_of(alibi_slopes, b)
        out[None, rows], lse[None, :, rows] = attention_tiled(
            q[None, rows], k[None, cols], v[None, cols], alibi_slopes=slopes, **options
        )
    return out, lse


def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    alibi_slopes: Array | None = None,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`attention_varlen`: (dq, dk, dv) like (q, k, v)."""
    xp = array_namespace(q)
    dq, dk, dv = (xp.zeros(x.shape, x.dtype) for x in (q, k, v))
    for b, rows, cols in _sequences(cu_seqlens_q, cu_seqlens_k):
        tensors = (dout[None, rows], q[None, rows], k[None, cols], v[None, cols], out[None, rows])
        dq[None, rows], dk[None, cols], dv[None, cols] = attention_tiled_backward(
            *tensors, lse[None, :, rows], alibi_slopes=_slopes_of(alibi_slopes, b), **options
        )
    return dq, dk, dv


def _sequences(cu_seqlens_q: Array, cu_seqlens_k: Array) -> list[tuple[int, slice, slice]]:
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows, cols = (map(slice, ends, ends[1:]) for ends in (ends_q, ends_k))
    return [(b, row, col) for b, (row, col) in enumerate(zip(rows, cols))]


def _slopes_of(alibi_slopes: Array | None, b: int) -> Array | None:
    """Slopes of sequence b from (heads_q,) or (batch, heads_q)."""
    return alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b]
