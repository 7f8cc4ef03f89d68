"""Attention as a framework computes it in the dtype of its inputs: the yardstick of the tests.

Every operation reads and writes the input dtype (scores, probabilities, output and all gradients
are rounded); within an operation, sums and the softmax are float32, as in PyTorch. torch tensors
run real torch operations on their device. NumPy and CuPy have no bfloat16 matrix products, so
their operations run in float32 and round each result. Scores are materialised.
"""

import functools
from typing import Any

from cupyflash.grouped import (
    array_namespace,
    grouped_matmul,
    grouped_matmul_transposed,
)
from cupyflash.score import ScoreFunction


class _Arithmetic:
    """Operations of one library in one dtype: ``round`` after each, ``wide`` for float32 sums."""

    def __init__(self, like: Any) -> None:
        self.dtype = like.dtype
        self.is_torch = type(like).__module__.partition(".")[0] == "torch"
        if self.is_torch:
            import torch

            self.xp, self.device = torch, like.device
        else:
            self.xp = array_namespace(like)

    def load(self, x: Any) -> Any:
        """An input; outside torch its values in float32."""
        return x.detach() if self.is_torch else x.astype("float32")

    def constant(self, x: Any) -> Any:
        """A NumPy array in this library, on this device."""
        return self.xp.as_tensor(x, device=self.device) if self.is_torch else self.xp.asarray(x)

    def round(self, x: Any) -> Any:
        """x in the dtype; outside torch its values, still stored in float32."""
        return x.to(self.dtype) if self.is_torch else x.astype(self.dtype).astype("float32")

    def wide(self, x: Any) -> Any:
        """x in float32."""
        return x.float() if self.is_torch else x


def same_precision_attention(
    dout: Any, q: Any, k: Any, v: Any, *, alibi_slopes: Any = None, **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Forward and backward in the dtype of q, for q, dout (batch, seqlen_q, heads_q, head_dim).

    Args:
        alibi_slopes: float32 array of the same library, (heads_q,) or (batch, heads_q).
        options: causal, scale, window, softcap as in ``cupyflash.attention``.

    Returns:
        The results out, dq, dk, dv with the shapes of q, q, k, v, and lse (batch, heads_q,
        seqlen_q). The LSE is float32 whatever the inputs are, so its yardstick is computed in
        float32. And for each result its terms: the largest sum of the magnitudes of what was added
        up, in which a float32 rounding error of any summation order is a few last places.
    """
    import numpy

    ops = _Arithmetic(q)
    xp, heads_kv = ops.xp, k.shape[2]
    q_groups, dout_groups = (_groups(xp, ops.load(x), heads_kv) for x in (q, dout))
    k_heads, v_heads = ops.load(k).swapaxes(1, 2), ops.load(v).swapaxes(1, 2)
    score = ScoreFunction.of(q_groups, k_heads, **options)
    offset = numpy.arange(score.seqlen_k) - numpy.arange(score.seqlen_q)[:, None] - score.diagonal
    seen = (offset >= -score.left) & (offset <= score.right)
    some_key = ops.constant(seen.any(axis=1, keepdims=True))
    bias = None
    if alibi_slopes is not None:
        rows = alibi_slopes.shape[0] if alibi_slopes.ndim == 2 else 1
        slopes = alibi_slopes.reshape(rows, *q_groups.shape[1:3], 1, 1)
        bias = slopes * ops.constant(numpy.abs(offset).astype("float32"))
    scores_of = functools.partial(_scores, xp, score, ops.constant(seen), bias)

    scores, capped = scores_of(q_groups, k_heads, ops.round)
    weights, _ = _softmax(xp, ops.wide(scores), some_key)
    p = ops.round(weights)
    out = ops.round(grouped_matmul(p, v_heads))

    dv = ops.round(grouped_matmul_transposed(p, dout_groups))
    dp = ops.round(grouped_matmul(dout_groups, v_heads.swapaxes(-1, -2)))
    delta = (ops.wide(dout_groups) * ops.wide(out)).sum(-1)[..., None]
    ds = ops.round(ops.wide(p) * (ops.wide(dp) - delta))
    if capped is not None:
        ds = ops.round(ops.wide(ds) * (1 - ops.wide(capped) ** 2))
    ds = ops.round(ds * score.scale)
    dq = ops.round(grouped_matmul(ds, k_heads))
    dk = ops.round(grouped_matmul_transposed(ds, q_groups))

    wide_scores, _ = scores_of(ops.wide(q_groups), ops.wide(k_heads), lambda x: x)
    _, lse = _softmax(xp, wide_scores, some_key)
    # Every sum again with magnitudes.
    q_abs, k_abs, v_abs, dout_abs = map(abs, (q_groups, k_heads, v_heads, dout_groups))
    scores_abs = grouped_matmul(q_abs, k_abs.swapaxes(-1, -2)) * score.scale
    scores_abs = scores_abs + (0 if bias is None else abs(bias))
    dp_abs = grouped_matmul(dout_abs, v_abs.swapaxes(-1, -2))
    ds_abs = p * (dp_abs + abs(dout_groups * out).sum(-1)[..., None]) * score.scale
    terms = {
        "out": grouped_matmul(p, v_abs),
        "lse": xp.where(ops.constant(seen), scores_abs, 0),
        "dq": grouped_matmul(ds_abs, k_abs),
        "dk": grouped_matmul_transposed(ds_abs, q_abs),
        "dv": grouped_matmul_transposed(p, dout_abs),
    }
    results = {
        "out": _ungroup(xp, out, q.shape),
        "lse": lse.reshape(q.shape[0], q.shape[2], q.shape[1]),
        "dq": _ungroup(xp, dq, q.shape),
        "dk": dk.swapaxes(1, 2),
        "dv": dv.swapaxes(1, 2),
    }
    return results, {name: _largest(x) for name, x in terms.items()}


def _scores(
    xp: Any, score: ScoreFunction, seen: Any, bias: Any, q: Any, k: Any, rounded: Any
) -> tuple[Any, Any]:
    """Masked scores, and tanh(score / softcap) or None, each step ``rounded``."""
    scores = rounded(grouped_matmul(q, k.swapaxes(-1, -2)))
    scores = rounded(scores * score.scale)
    capped = None
    if score.softcap > 0:
        capped = rounded(xp.tanh(rounded(scores / score.softcap)))
        scores = rounded(capped * score.softcap)
    if bias is not None:
        scores = rounded(scores - bias)
    return xp.where(seen, scores, -float("inf")), capped


def _softmax(xp: Any, scores: Any, some_key: Any) -> tuple[Any, Any]:
    """Probabilities, 0 in rows without a key, and log-sum-exp, -inf there, both in float32."""
    if not scores.shape[-1]:
        return scores, xp.full_like(scores.sum(-1), -float("inf"))
    row_max = xp.where(some_key, xp.amax(scores, -1)[..., None], 0)
    weights = xp.exp(scores - row_max)
    row_sum = weights.sum(-1)[..., None]
    safe_sum = xp.where(some_key, row_sum, 1)
    lse = xp.where(some_key, row_max + xp.log(safe_sum), -float("inf"))
    return weights / safe_sum, lse[..., 0]


def _largest(x: Any) -> float:
    return float(x.max()) if 0 not in x.shape else 0.0


def _groups(xp: Any, x: Any, heads_kv: int) -> Any:
    """(batch, seqlen, heads, head_dim) as (batch, heads_kv, group, seqlen, head_dim)."""
    batch, seqlen, heads, head_dim = x.shape
    group = heads // heads_kv if heads_kv else 1
    return xp.moveaxis(x.reshape(batch, seqlen, heads_kv, group, head_dim), 1, 3)


def _ungroup(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    return xp.moveaxis(x, 3, 1).reshape(*shape)
