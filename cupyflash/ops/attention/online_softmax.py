"""Attention with one tile of scores in memory, so that extra memory grows with seqlen only.

* online softmax: Milakov and Gimelshein, arXiv:1805.02867
* tiles, and p recomputed from the LSE in the backward: FlashAttention, arXiv:2205.14135
* one division at the end, the LSE as the only statistic: FlashAttention-2, arXiv:2307.08691

Part of :mod:`cupyflash.ops.attention.reference`, which has the formulas and the options.
"""

from typing import Any

from ...runtime.array import Array, array_namespace
from ...runtime.philox import Dropout
from .options import Gradients
from .score import (
    ScoreFunction,
    empty_results,
    finite_max,
    group_heads,
    group_sinks,
    grouped_matmul,
    grouped_matmul_transposed,
    heads_first,
    log_sum,
    positive_sum,
    sum_to_shape,
    tile_of,
)
from .score_text.call import TextCall

BLOCK = 256  # rows and columns of a tile: large enough to hide Python, small enough for the cache


def attention_tiled(
    q: Array,
    k: Array,
    v: Array,
    *,
    block: int = BLOCK,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    first_sequence: int = 0,
    **options: Any,
) -> tuple[Array, Array]:
    """Softmax attention by the online softmax.

    Returns:
        out like q, with the head_dim of v, and the LSE (batch, heads_q, seqlen_q).

    Over the key tiles of a query tile, keep the running maximum m, the sum l of exp(s - m) and the
    unnormalised output a. A tile with maximum m' rescales the past by exp(m - max(m, m'))::

        m_new = max(m, m')    c = exp(m - m_new)
        l <- c l + sum_j exp(s_j - m_new)        a <- c a + sum_j exp(s_j - m_new) v_j

    and at the end o = a / l, lse = m + log l. Tiles in which no query sees a key are skipped. A
    sink is where m starts, with l = 1; dropout concerns a, not l.
    """
    xp = array_namespace(q)
    out, lse, out_groups, lse_groups = empty_results(q, k, v)
    q_groups, k_groups, v_groups = group_heads(q, k), heads_first(k), heads_first(v)
    score = ScoreFunction.of(q_groups, k_groups, **options)
    dropout = _dropout(dropout_p, dropout_seed, first_sequence, options.get("text"))
    for row in range(0, score.seqlen_q, block):
        rows = slice(row, min(row + block, score.seqlen_q))
        q_tile = xp.ascontiguousarray(q_groups[..., rows, :])
        row_max = xp.full(q_tile.shape[:4], -xp.inf, q_tile.dtype)
        if sinks is not None:
            row_max[...] = group_sinks(sinks, q_groups).astype(q_tile.dtype)
        row_sum = (row_max > -xp.inf).astype(q_tile.dtype)
        accumulator = xp.zeros((*q_tile.shape[:4], v.shape[3]), q_tile.dtype)
        for cols in _key_tiles(score, rows, block):
            scores, _ = score.tile(q_tile, k_groups[:, :, cols], row, cols.start)
            new_max = xp.maximum(row_max, scores.max(axis=-1))
            safe_max = finite_max(new_max)
            scores -= safe_max[..., None]
            weights = xp.exp(scores, out=scores)
            correction = xp.exp(row_max - safe_max)
            row_sum = row_sum * correction + weights.sum(axis=-1)
            if dropout is not None:
                weights *= dropout.factors(weights, row, cols.start)
            accumulator *= correction[..., None]
            accumulator += grouped_matmul(weights, v_groups[:, :, cols])
            row_max = new_max
        out_groups[..., rows, :] = accumulator / positive_sum(row_sum)[..., None]
        lse_groups[..., rows] = log_sum(row_max, row_sum)
    return out.astype(q.dtype, copy=False), lse


def attention_tiled_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    block: int = BLOCK,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    first_sequence: int = 0,
    bias_grad: bool = False,
    dlse: Array | None = None,
    **options: Any,
) -> Gradients:
    """Gradients from the results of the forward: p_ij = exp(s_ij - lse_i), a tile at a time.

    Args:
        dout: gradient of out, like out.
        out: result of the forward.
        lse: LSE of the forward (batch, heads_q, seqlen_q).
        bias_grad: whether to compute that of the bias.
        dlse: gradient of the LSE, like it, or None for 0.

    Returns:
        (dq, dk, dv) like (q, k, v); dbias and dsinks in the dtype of the computation, or None.
    """
    xp = array_namespace(q)
    q_groups, k_groups, v_groups = group_heads(q, k), heads_first(k), heads_first(v)
    dout_groups = group_heads(dout, k)
    score = ScoreFunction.of(q_groups, k_groups, **options)
    dropout = _dropout(dropout_p, dropout_seed, first_sequence, options.get("text"))
    dq, dk, dv = (xp.zeros(x.shape, q_groups.dtype) for x in (q, k, v))
    dq_groups, dk_groups, dv_groups = group_heads(dq, k), heads_first(dk), heads_first(dv)
    dbias = xp.zeros(score.bias.shape, q_groups.dtype) if bias_grad else None
    delta, lse_groups = _of_rows((dout_groups * group_heads(out, k)).sum(axis=-1), lse, dlse)
    for row in range(0, score.seqlen_q, block):
        rows = slice(row, min(row + block, score.seqlen_q))
        q_tile = xp.ascontiguousarray(q_groups[..., rows, :])
        dout_tile = xp.ascontiguousarray(dout_groups[..., rows, :])
        for cols in _key_tiles(score, rows, block):
            k_tile, v_tile = k_groups[:, :, cols], v_groups[:, :, cols]
            scores, slope = score.tile(q_tile, k_tile, row, cols.start)
            scores -= lse_groups[..., rows, None]
            weights = xp.exp(scores, out=scores)
            dscores = grouped_matmul(dout_tile, v_tile.swapaxes(-1, -2))
            kept = weights
            if dropout is not None:
                factors = dropout.factors(weights, row, cols.start)
                kept = weights * factors
                dscores *= factors
            dv_groups[:, :, cols] += grouped_matmul_transposed(kept, dout_tile)
            dscores -= delta[..., rows, None]
            dscores *= weights
            if bias_grad:
                dbias[tile_of(dbias, rows, cols)] += sum_to_shape(dscores, dbias.shape)
            dscores = slope(dscores)
            dq_groups[..., rows, :] += grouped_matmul(dscores, k_tile)
            dk_groups[:, :, cols] += grouped_matmul_transposed(dscores, q_tile)
    found = [g.astype(x.dtype, copy=False) for g, x in zip((dq, dk, dv), (q, k, v))]
    dbias = dbias.reshape(options["bias"].shape) if bias_grad else None
    dsinks = None
    if sinks is not None:
        # A sink is a score whose value is a vector of zeros.
        weights = xp.exp(group_sinks(sinks, q_groups).astype(lse_groups.dtype) - lse_groups)
        dsinks = -(weights * delta).sum(axis=(0, 3)).reshape(-1)
    return Gradients(*found, dbias, dsinks)


def _dropout(
    dropout_p: float, seed: int, first_sequence: int, text: TextCall | None
) -> Dropout | None:
    first = None if text is None else text.first_weight
    return Dropout.of(dropout_p, seed, first_sequence, first)


def _of_rows(delta: Array, lse: Array, dlse: Array | None) -> tuple[Array, Array]:
    """What `attention_tiled_backward` subtracts in each row: of dscores, and of the scores.

    The latter is the LSE, but +inf where a row sees nothing: exp(-inf - inf) is 0, and
    exp(-inf + inf) would be NaN.
    """
    xp = array_namespace(delta)
    lse_groups = lse.astype(delta.dtype, copy=False).reshape(delta.shape)
    if dlse is not None:
        dlse_groups = dlse.astype(delta.dtype, copy=False).reshape(delta.shape)
        delta = xp.where(lse_groups == -xp.inf, 0, delta - dlse_groups)
    if lse.dtype == xp.float32:  # it keeps no digit of these weights: HUGE_LSE on a GPU
        huge = xp.isfinite(lse_groups) & (abs(lse_groups) >= 2.0**24)
        lse_groups = xp.where(huge, xp.nan, lse_groups)
    return delta, xp.where(lse_groups == -xp.inf, xp.inf, lse_groups)


def _key_tiles(score: ScoreFunction, rows: slice, block: int) -> list[slice]:
    """Tiles of the keys that any of these rows sees."""
    begin, end = score.key_range(rows.start, rows.stop)
    return [slice(col, min(col + block, end)) for col in range(begin, end, block)]
