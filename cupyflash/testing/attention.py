"""The tolerance rule for attention: float64, and attention as a framework computes it.

The yardstick computes in the dtype of its inputs: every operation reads and writes it (scores,
probabilities, output and all gradients are rounded); within an operation, sums and the softmax are
float32, as in PyTorch. torch tensors run real torch operations on their device. NumPy and CuPy have
no bfloat16 matrix products, so their operations run in float32 and round each result. Scores are
materialised.
"""

import functools
from typing import Any

import numpy

from ..ops.attention import reference
from ..ops.attention.score import (
    BIAS_LIMIT,
    ScoreFunction,
    group_bias,
    group_sinks,
    grouped_matmul,
    grouped_matmul_transposed,
    sum_to_shape,
)
from ..runtime.array import Array, array_namespace
from ..runtime.philox import Dropout
from .inputs import Inputs
from .tolerance import (
    EPSILON,
    Expected,
    Result,
    dtype_name,
    to_float64,
    where_matrices_multiply,
)

RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
ARRAYS = ("alibi_slopes", "bias", "key_mask", "sinks")  # options


def expected(inputs: Inputs, **options: Any) -> Expected:
    """Forward and backward of the inputs: in float64, and in their own dtype as the yardstick.

    Args:
        options: of ``cupyflash.attention`` without layout and lengths; arrays in the library of the
            inputs, dropout_seed an integer; and dlse, the gradient of the LSE.
    """
    tensors = [inputs.dout, inputs.q, inputs.k, inputs.v]
    if inputs.layout == "bhsd":
        tensors = [x.swapaxes(1, 2) for x in tensors]
    arrays = {name: options.pop(name) for name in ARRAYS if options.get(name) is not None}
    dtypes = {"lse": "float32"} | {f"d{name}": dtype_name(x) for name, x in arrays.items()}
    if type(inputs.q).__module__.partition(".")[0] == "cupy":
        tensors = [where_matrices_multiply(x) for x in tensors]
        arrays = {name: where_matrices_multiply(x) for name, x in arrays.items()}
    dout, q, k, v = map(to_float64, tensors)
    dlse = options.pop("dlse", None)
    exact_options = options | {name: _exact(x) for name, x in arrays.items()}
    of_gradients = {"dlse": None if dlse is None else to_float64(dlse)}
    if "bias" in arrays:
        of_gradients["bias_grad"] = dtypes["dbias"] != "bool"
    options |= arrays
    if inputs.cu_seqlens_q is None:
        out, lse = reference.attention_tiled(q, k, v, block=1024, **exact_options)
        gradients = reference.attention_tiled_backward(
            dout, q, k, v, out, lse, block=1024, **of_gradients, **exact_options
        )
        yardstick, terms = same_precision_attention(*tensors, dlse=dlse, **options)
    else:
        lengths = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        out, lse = reference.attention_varlen(q, k, v, *lengths, **exact_options)
        gradients = reference.attention_varlen_backward(
            dout, q, k, v, out, lse, *lengths, **of_gradients, **exact_options
        )
        yardstick, terms = _varlen_yardstick(tensors, lengths, dlse, options)
    exact = dict(zip(RESULTS, (out, lse, *gradients), strict=True))
    if "dbias" in yardstick:  # it has rank 5 there
        yardstick["dbias"] = yardstick["dbias"].reshape(exact["dbias"].shape)
    results = {}
    for name, x in yardstick.items():
        dtype, rounded, right = dtypes.get(name, inputs.dtype), None, exact[name]
        if name in ("dbias", "dsinks"):  # computed from what was rounded to the dtype of the inputs
            rounded = max(dtype, inputs.dtype, key=EPSILON.get)
        if inputs.layout == "bhsd" and name in ("out", "dq", "dk", "dv"):
            right, x = right.swapaxes(1, 2), x.swapaxes(1, 2)
        results[name] = Result(right, x, dtype, terms[name], rounded)
    return Expected(results)


def _exact(x: Any) -> Array:
    """The array in float64; a mask stays a mask."""
    return to_float64(x) != 0 if dtype_name(x) == "bool" else to_float64(x)


def _varlen_yardstick(
    tensors: list, lengths: tuple[Any, Any], dlse: Any, options: dict
) -> tuple[dict[str, Array], dict[str, float]]:
    """The yardstick sequence by sequence, in float64 arrays with the shapes of the packed ones."""
    dout, q, k, v = tensors
    ends_q, ends_k = (cu_seqlens.tolist() for cu_seqlens in lengths)
    options = dict(options)
    alibi_slopes = options.pop("alibi_slopes", None)
    parts: dict[str, list] = {name: [] for name in RESULTS}
    largest = dict.fromkeys(RESULTS, 0.0)
    for b in range(len(ends_q) - 1):
        rows, cols = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        per_batch = alibi_slopes is not None and alibi_slopes.ndim == 2
        one, terms = same_precision_attention(
            dout[rows][None],
            q[rows][None],
            k[cols][None],
            v[cols][None],
            alibi_slopes=alibi_slopes[b] if per_batch else alibi_slopes,
            first_sequence=b,
            dlse=None if dlse is None else dlse[None, :, rows],
            **options,
        )
        for name, result in one.items():
            parts[name].append(to_float64(result if name == "dsinks" else result[0]))
            largest[name] = max(largest[name], terms[name])
    joined = {
        name: sum(arrays)
        if name == "dsinks"
        else array_namespace(arrays[0]).concatenate(arrays, axis=1 if name == "lse" else 0)
        for name, arrays in parts.items()
        if arrays
    }
    return joined, largest


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
    dlse: Any = None,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Forward and backward in the dtype of q, for q (batch, seqlen_q, heads_q, head_dim) and dout
    like out.

    Args:
        alibi_slopes: float32 array of the same library, (heads_q,) or (batch, heads_q).
        bias: array of the same library that broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
        key_mask: bool array of the same library (batch, seqlen_k).
        sinks: array of the same library (heads_q,), finite.
        first_sequence: index of the first sequence in the batch, for dropout.
        dlse: float32 gradient of the LSE (batch, heads_q, seqlen_q) of the same library.
        options: causal, scale, window, softcap as in ``cupyflash.attention``.

    Returns:
        The results out like q with the head_dim of v, dq, dk, dv, lse (batch, heads_q, seqlen_q),
        and dbias and dsinks where there are a floating bias and sinks. The LSE is float32 whatever
        the inputs are, so its yardstick is computed in float32. And for each result its terms: the
        largest sum of the magnitudes of what was added up, in which a float32 rounding error of any
        summation order is a few last places.
    """
    ops = _Arithmetic(q)
    xp, heads_kv = ops.xp, k.shape[2]
    q_groups, dout_groups = (_groups(xp, ops.load(x), heads_kv) for x in (q, dout))
    k_heads, v_heads = ops.load(k).swapaxes(1, 2), ops.load(v).swapaxes(1, 2)
    score = ScoreFunction.of(q_groups, k_heads, **options)
    offset = numpy.arange(score.seqlen_k) - numpy.arange(score.seqlen_q)[:, None] - score.diagonal
    seen = (offset >= -score.left) & (offset <= score.right)
    seen, additive = ops.constant(seen), None
    if bias is not None:
        is_bool = str(bias.dtype).endswith("bool")
        bias = group_bias(bias if is_bool else ops.load(bias), k_heads)
        seen = seen & (bias if is_bool else bias > -BIAS_LIMIT)
        additive = None if is_bool else xp.where(seen, bias, 0)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, None]
    some_key = seen.sum(-1)[..., None] > 0
    slope_terms = None
    if alibi_slopes is not None:
        rows = alibi_slopes.shape[0] if alibi_slopes.ndim == 2 else 1
        slopes = alibi_slopes.reshape(rows, *q_groups.shape[1:3], 1, 1)
        slope_terms = slopes * ops.constant(numpy.abs(offset).astype("float32"))
    sink_groups = None if sinks is None else ops.wide(ops.load(group_sinks(sinks, q_groups)))
    scores_of = functools.partial(_scores, xp, score, seen, slope_terms, additive)

    scores, capped = scores_of(q_groups, k_heads, ops.round)
    weights, wide_lse = _softmax(xp, ops.wide(scores), some_key, sink_groups)
    p = ops.round(weights)
    factors, kept = 1.0, p
    if dropout := Dropout.of(dropout_p, dropout_seed, first_sequence):
        factors = ops.constant(dropout.factors(numpy.zeros(p.shape, "float32"), 0, 0))
        kept = ops.round(p * factors)
    out = ops.round(grouped_matmul(kept, v_heads))

    dv = ops.round(grouped_matmul_transposed(kept, dout_groups))
    dp = ops.round(grouped_matmul(dout_groups, v_heads.swapaxes(-1, -2)) * factors)
    delta = (ops.wide(dout_groups) * ops.wide(out)).sum(-1)[..., None]
    dlse_abs = 0
    if dlse is not None:
        delta = delta - dlse.reshape(delta.shape)
        dlse_abs = abs(dlse).reshape(delta.shape[:-1])
    ds = ops.round(ops.wide(p) * (ops.wide(dp) - delta))
    learned = {}
    if additive is not None:
        learned["dbias"] = ops.round(sum_to_shape(ds, bias.shape))
    if sinks is not None:
        sink_weights = xp.exp(sink_groups - wide_lse)
        learned["dsinks"] = _sum_of_heads(-sink_weights * delta[..., 0])
    if capped is not None:
        ds = ops.round(ops.wide(ds) * (1 - ops.wide(capped) ** 2))
    ds = ops.round(ds * score.scale)
    dq = ops.round(grouped_matmul(ds, k_heads))
    dk = ops.round(grouped_matmul_transposed(ds, q_groups))

    wide_scores, _ = scores_of(ops.wide(q_groups), ops.wide(k_heads), lambda x: x)
    _, lse = _softmax(xp, wide_scores, some_key, sink_groups)
    # This computes every sum again with magnitudes.
    q_abs, k_abs, v_abs, dout_abs = map(abs, (q_groups, k_heads, v_heads, dout_groups))
    scores_abs = grouped_matmul(q_abs, k_abs.swapaxes(-1, -2)) * score.scale
    for term in (slope_terms, additive):
        scores_abs = scores_abs + (0 if term is None else abs(term))
    dp_abs = ops.round(grouped_matmul(dout_abs, v_abs.swapaxes(-1, -2)) * factors)
    delta_abs = ops.round(abs(dout_groups * out).sum(-1) + dlse_abs)
    dbias_abs = p * (dp_abs + delta_abs[..., None])
    ds_abs = dbias_abs * score.scale
    # The weights of the backward come from the LSE, a float32 number like the scores.
    lse_abs = xp.where(xp.isfinite(wide_lse), abs(wide_lse), 0)[..., None]
    kept_abs = ops.wide(kept) * (1 + xp.where(seen, ops.wide(scores_abs), 0) + lse_abs)
    # Delta has what out was rounded by: errors independent between rows and columns, each of which
    # weighs as many float32 last places as the dtype is coarser. Where terms cancel, and in sums
    # over many rows, they are what is left.
    coarser = EPSILON[dtype_name(q)] / EPSILON["float32"]
    of_out = coarser * ((ops.wide(dout_groups) * ops.wide(out)) ** 2).sum(-1)[..., None] ** 0.5
    ds_of_out, wide_dout = ops.wide(p) * of_out, ops.wide(dout_abs)
    dq_of_out = of_out * abs(grouped_matmul(ops.wide(p), ops.wide(k_heads)))
    dk_of_out = grouped_matmul_transposed(ds_of_out**2, ops.wide(q_groups) ** 2) ** 0.5
    terms = {
        "out": grouped_matmul(kept, v_abs),
        "lse": xp.where(seen, scores_abs, 0),
        "dq": ops.wide(grouped_matmul(ds_abs, k_abs)) + dq_of_out * score.scale,
        "dk": ops.wide(grouped_matmul_transposed(ds_abs, q_abs)) + dk_of_out * score.scale,
        "dv": grouped_matmul_transposed(kept_abs, wide_dout),
    }
    if additive is not None:
        of_rows = sum_to_shape(ds_of_out**2, bias.shape) ** 0.5
        terms["dbias"] = sum_to_shape(ops.wide(dbias_abs), bias.shape) + of_rows
    if sinks is not None:
        of_rows = _sum_of_heads((sink_weights * of_out[..., 0]) ** 2) ** 0.5
        terms["dsinks"] = _sum_of_heads(sink_weights * ops.wide(delta_abs)) + of_rows
    results = {
        "out": _ungroup(xp, out, dout.shape),
        "lse": lse.reshape(q.shape[0], q.shape[2], q.shape[1]),
        "dq": _ungroup(xp, dq, q.shape),
        "dk": dk.swapaxes(1, 2),
        "dv": dv.swapaxes(1, 2),
        **learned,
    }
    return results, {name: _largest(x) for name, x in terms.items()}


def _scores(
    xp: Any,
    score: ScoreFunction,
    seen: Any,
    slope_terms: Any,
    bias: Any,
    q: Any,
    k: Any,
    rounded: Any,
) -> tuple[Any, Any]:
    """Masked scores, and tanh(score / softcap) or None, each step ``rounded``."""
    scores = rounded(grouped_matmul(q, k.swapaxes(-1, -2)))
    scores = rounded(scores * score.scale)
    capped = None
    if score.softcap > 0:
        capped = rounded(xp.tanh(rounded(scores / score.softcap)))
        scores = rounded(capped * score.softcap)
    if slope_terms is not None:
        scores = rounded(scores - slope_terms)
    if bias is not None:
        scores = rounded(scores + bias)
    return xp.where(seen, scores, -float("inf")), capped


def _softmax(xp: Any, scores: Any, some_key: Any, sinks: Any) -> tuple[Any, Any]:
    """Probabilities, 0 in rows without a key, and log-sum-exp, both in float32.

    The LSE of a row without a key is the sink, or -inf.
    """
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
