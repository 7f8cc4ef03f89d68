"""The yardstick of attention: forward and backward in the dtype of the inputs, step by step.

Every operation reads and writes the dtype of its inputs (scores, probabilities, output and all
gradients are rounded); within an operation, sums and the softmax are float32, as in PyTorch. torch
tensors run real torch operations on their device. NumPy and CuPy have no bfloat16 matrix products,
so their operations run in float32 and round each result. Scores are materialised.
"""

from collections.abc import Callable
from typing import Any

import numpy

from ..ops.attention.score import (
    BIAS_LIMIT,
    ScoreFunction,
    group_bias,
    group_sinks,
    grouped_matmul,
    grouped_matmul_transposed,
    sum_to_shape,
)
from ..runtime.array import array_namespace
from ..runtime.philox import Dropout
from .tolerance import EPSILON, dtype_name


def same_precision_attention(
    dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Forward and backward in the dtype of q, for q (batch, seqlen_q, heads_q, head_dim) and dout
    like out.

    Args:
        dlse: float32 gradient of the LSE (batch, heads_q, seqlen_q) of the same library.
        options: causal, scale, window, softcap as in ``cupyflash.attention``, and those of
            `_Yardstick`.

    Returns:
        The results out like q with the head_dim of v, dq, dk, dv, lse (batch, heads_q, seqlen_q),
        and dbias and dsinks where there are a floating bias and sinks. The LSE is float32 whatever
        the inputs are, so its yardstick is computed in float32. And for each result its terms: the
        largest sum of the magnitudes of what was added up, in which a float32 rounding error of any
        summation order is a few last places.
    """
    call = _Yardstick(dout, q, k, v, **options)
    dlse = None if dlse is None else dlse.reshape(*call.q.shape[:4], 1)
    results = call.forward() | call.backward(dlse)
    xp = call.xp
    results["out"] = _ungroup(xp, results["out"], dout.shape)
    results["lse"] = results["lse"].reshape(q.shape[0], q.shape[2], q.shape[1])
    results["dq"] = _ungroup(xp, results["dq"], q.shape)
    results |= {name: results[name].swapaxes(1, 2) for name in ("dk", "dv")}
    return results, {name: _largest(x) for name, x in call.terms(dlse).items()}


class _Yardstick:
    """One call; `backward` and `terms` read what `forward` has found.

    Args:
        alibi_slopes: float32 array of the same library, (heads_q,) or (batch, heads_q).
        bias: array of the same library that broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
        key_mask: bool array of the same library (batch, seqlen_k).
        sinks: array of the same library (heads_q,), finite.
        first_sequence: index of the first sequence in the batch, for dropout.
    """

    def __init__(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        *,
        alibi_slopes: Any = None,
        bias: Any = None,
        key_mask: Any = None,
        sinks: Any = None,
        dropout_p: float = 0.0,
        dropout_seed: int = 0,
        first_sequence: int = 0,
        **options: Any,
    ) -> None:
        self.ops = ops = _Arithmetic(q)
        self.xp, heads_kv = ops.xp, k.shape[2]
        self.q, self.dout = (_groups(self.xp, ops.load(x), heads_kv) for x in (q, dout))
        self.k, self.v = ops.load(k).swapaxes(1, 2), ops.load(v).swapaxes(1, 2)
        self.score = score = ScoreFunction.of(self.q, self.k, **options)
        offset = numpy.arange(score.seqlen_k) - numpy.arange(score.seqlen_q)[:, None]
        offset = offset - score.diagonal
        seen = ops.constant((offset >= -score.left) & (offset <= score.right))
        self.additive, self.bias_shape = None, None
        if bias is not None:
            is_bool = str(bias.dtype).endswith("bool")
            bias = group_bias(bias if is_bool else ops.load(bias), self.k)
            seen = seen & (bias if is_bool else bias > -BIAS_LIMIT)
            self.additive = None if is_bool else self.xp.where(seen, bias, 0)
            self.bias_shape = bias.shape
        self.seen = seen if key_mask is None else seen & key_mask[:, None, None, None]
        self.some_key = self.seen.sum(-1)[..., None] > 0
        self.slope_terms = None
        if alibi_slopes is not None:
            rows = alibi_slopes.shape[0] if alibi_slopes.ndim == 2 else 1
            slopes = alibi_slopes.reshape(rows, *self.q.shape[1:3], 1, 1)
            self.slope_terms = slopes * ops.constant(numpy.abs(offset).astype("float32"))
        self.sinks = None if sinks is None else ops.wide(ops.load(group_sinks(sinks, self.q)))
        self.dropout = Dropout.of(dropout_p, dropout_seed, first_sequence)

    def forward(self) -> dict[str, Any]:
        """Out of grouped heads, and the LSE."""
        ops = self.ops
        scores, self.capped = self._scores(self.q, self.k, ops.round)
        weights, self.lse = self._softmax(ops.wide(scores))
        self.p = self.kept = ops.round(weights)
        self.factors = 1.0
        if self.dropout:
            zeros = numpy.zeros(self.p.shape, "float32")
            self.factors = ops.constant(self.dropout.factors(zeros, 0, 0))
            self.kept = ops.round(self.p * self.factors)
        self.out = ops.round(grouped_matmul(self.kept, self.v))
        wide_scores, _ = self._scores(ops.wide(self.q), ops.wide(self.k), lambda x: x)
        _, lse = self._softmax(wide_scores)
        return {"out": self.out, "lse": lse}

    def backward(self, dlse: Any) -> dict[str, Any]:
        """The gradients of the forward that has been computed; dlse (…, seqlen_q, 1) or None."""
        ops, score = self.ops, self.score
        dv = ops.round(grouped_matmul_transposed(self.kept, self.dout))
        dp = ops.round(grouped_matmul(self.dout, self.v.swapaxes(-1, -2)) * self.factors)
        delta = (ops.wide(self.dout) * ops.wide(self.out)).sum(-1)[..., None]
        delta = delta if dlse is None else delta - dlse
        ds = ops.round(ops.wide(self.p) * (ops.wide(dp) - delta))
        learned = {}
        if self.additive is not None:
            learned["dbias"] = ops.round(sum_to_shape(ds, self.bias_shape))
        if self.sinks is not None:
            learned["dsinks"] = _sum_of_heads(-self._sink_weights() * delta[..., 0])
        if self.capped is not None:
            ds = ops.round(ops.wide(ds) * (1 - ops.wide(self.capped) ** 2))
        ds = ops.round(ds * score.scale)
        dq = ops.round(grouped_matmul(ds, self.k))
        dk = ops.round(grouped_matmul_transposed(ds, self.q))
        return {"dq": dq, "dk": dk, "dv": dv, **learned}

    def terms(self, dlse: Any) -> dict[str, Any]:
        """Every sum again, with magnitudes."""
        ops, xp, scale = self.ops, self.xp, self.score.scale
        q_abs, k_abs, v_abs, dout_abs = map(abs, (self.q, self.k, self.v, self.dout))
        scores_abs = grouped_matmul(q_abs, k_abs.swapaxes(-1, -2)) * scale
        for term in (self.slope_terms, self.additive):
            scores_abs = scores_abs + (0 if term is None else abs(term))
        dp_abs = ops.round(grouped_matmul(dout_abs, v_abs.swapaxes(-1, -2)) * self.factors)
        dlse_abs = 0 if dlse is None else abs(dlse)[..., 0]
        delta_abs = ops.round(abs(self.dout * self.out).sum(-1) + dlse_abs)
        dbias_abs = self.p * (dp_abs + delta_abs[..., None])
        ds_abs = dbias_abs * scale
        # The weights of the backward come from the LSE, a float32 number like the scores.
        lse_abs = xp.where(xp.isfinite(self.lse), abs(self.lse), 0)[..., None]
        weights_abs = 1 + xp.where(self.seen, ops.wide(scores_abs), 0) + lse_abs
        kept_abs = ops.wide(self.kept) * weights_abs
        # Delta has what out was rounded by: errors independent between rows and columns, each of
        # which weighs as many float32 last places as the dtype is coarser. Where terms cancel, and
        # in sums over many rows, they are what is left.
        coarser = EPSILON[ops.dtype_name] / EPSILON["float32"]
        of_out = (ops.wide(self.dout) * ops.wide(self.out)) ** 2
        of_out = coarser * of_out.sum(-1)[..., None] ** 0.5
        wide_p, wide_k, wide_q = map(ops.wide, (self.p, self.k, self.q))
        ds_of_out = wide_p * of_out
        dq_of_out = of_out * abs(grouped_matmul(wide_p, wide_k))
        dk_of_out = grouped_matmul_transposed(ds_of_out**2, wide_q**2) ** 0.5
        terms = {
            "out": grouped_matmul(self.kept, v_abs),
            "lse": xp.where(self.seen, scores_abs, 0),
            "dq": ops.wide(grouped_matmul(ds_abs, k_abs)) + dq_of_out * scale,
            "dk": ops.wide(grouped_matmul_transposed(ds_abs, q_abs)) + dk_of_out * scale,
            "dv": grouped_matmul_transposed(kept_abs, ops.wide(dout_abs)),
        }
        if self.additive is not None:
            of_rows = sum_to_shape(ds_of_out**2, self.bias_shape) ** 0.5
            terms["dbias"] = sum_to_shape(ops.wide(dbias_abs), self.bias_shape) + of_rows
        if self.sinks is not None:
            weights = self._sink_weights()
            of_rows = _sum_of_heads((weights * of_out[..., 0]) ** 2) ** 0.5
            terms["dsinks"] = _sum_of_heads(weights * ops.wide(delta_abs)) + of_rows
        return terms

    def _scores(self, q: Any, k: Any, rounded: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Masked scores, and tanh(score / softcap) or None, each step ``rounded``."""
        xp, score = self.xp, self.score
        scores = rounded(grouped_matmul(q, k.swapaxes(-1, -2)))
        scores = rounded(scores * score.scale)
        capped = None
        if score.softcap > 0:
            capped = rounded(xp.tanh(rounded(scores / score.softcap)))
            scores = rounded(capped * score.softcap)
        if self.slope_terms is not None:
            scores = rounded(scores - self.slope_terms)
        if self.additive is not None:
            scores = rounded(scores + self.additive)
        return xp.where(self.seen, scores, -float("inf")), capped

    def _softmax(self, scores: Any) -> tuple[Any, Any]:
        """Probabilities, 0 in rows without a key, and log-sum-exp, both in float32.

        The LSE of a row without a key is the sink, or -inf.
        """
        xp, some_key, sinks = self.xp, self.some_key, self.sinks
        if not scores.shape[-1]:
            lse = xp.full_like(scores.sum(-1), -float("inf"))
            return scores, lse if sinks is None else xp.zeros_like(lse) + sinks
        row_max = xp.where(some_key, xp.amax(scores, -1)[..., None], 0)
        if sinks is not None:
            row_max = xp.maximum(xp.where(some_key, row_max, -float("inf")), sinks[..., None])
        weights = xp.exp(scores - row_max)
        row_sum = weights.sum(-1)[..., None]
        if sinks is not None:
            row_sum = row_sum + xp.exp(sinks[..., None] - row_max)
        safe_sum = xp.where(row_sum > 0, row_sum, 1)
        lse = xp.where(row_sum > 0, row_max + xp.log(safe_sum), -float("inf"))
        return weights / safe_sum, lse[..., 0]

    def _sink_weights(self) -> Any:
        return self.xp.exp(self.sinks - self.lse)


class _Arithmetic:
    """Operations of one library in one dtype: ``round`` after each, ``wide`` for float32 sums."""

    def __init__(self, like: Any) -> None:
        self.dtype, self.dtype_name = like.dtype, dtype_name(like)
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


def _sum_of_heads(x: Any) -> Any:
    """(batch, heads_kv, group, rows) summed over batch and rows: (heads_q,)."""
    return x.sum(3).sum(0).reshape(-1)


def _largest(x: Any) -> float:
    return float(x.max()) if 0 not in x.shape else 0.0


def _groups(xp: Any, x: Any, heads_kv: int) -> Any:
    """(batch, seqlen, heads, head_dim) as (batch, heads_kv, group, seqlen, head_dim)."""
    batch, seqlen, heads, head_dim = x.shape
    group = heads // heads_kv if heads_kv else 1
    return xp.moveaxis(x.reshape(batch, seqlen, heads_kv, group, head_dim), 1, 3)


def _ungroup(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    return xp.moveaxis(x, 3, 1).reshape(*shape)
