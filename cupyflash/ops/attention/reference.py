"""Attention in plain array code: the oracle of the tests, and what runs where there is no GPU.

Forward, for each query row i (s_ij from :mod:`cupyflash.ops.attention.score`)::

    lse_i = log sum_j exp(s_ij)        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j

Backward, from do = dL/do and dlse = dL/dlse::

    dv_j = sum_i p_ij do_i             dp_ij = do_i . v_j              delta_i = do_i . o_i - dlse_i
    ds_ij = p_ij (dp_ij - delta_i)     x_ij = ds_ij * ds_ij/d(q_i . k_j)
    dq_i = sum_j x_ij k_j              dk_j = sum_i x_ij q_i           dbias_ij = ds_ij

A sink is one more score of each row of its head, whose value is a vector of zeros; dropout replaces
p_ij in o and dv, and dp_ij, by themselves times 0 or 1 / (1 - dropout_p).

``attention_tiled``, from :mod:`cupyflash.ops.attention.online_softmax`, keeps one tile of scores
in memory; ``attention_varlen`` calls it for one sequence after the other.

All functions take NumPy or CuPy arrays, q (batch, seqlen_q, heads_q, head_dim) and k, v (batch,
seqlen_k, heads_kv, head_dim), where v may have a head_dim of its own, and the options of
``cupyflash.attention``: causal, scale, window, softcap, alibi_slopes, bias, sinks, dropout_p,
dropout_seed (an integer). They compute in float64 for float64 inputs, else in float32; results have
the dtype of the inputs, but the LSE and the gradients of bias and sinks that of the computation. A
row that sees no key gives 0 and -inf. Nothing is checked here: ``cupyflash.attention`` does that.
"""

from collections.abc import Iterator
from typing import Any

from cupyflash.ops.attention.online_softmax import attention_tiled, attention_tiled_backward

from ...runtime.array import Array, array_namespace, compute_dtype
from .options import Gradients
from .score import tile_of

__all__ = [
    "attention_tiled",
    "attention_tiled_backward",
    "attention_varlen",
    "attention_varlen_backward",
]


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Attention of sequences with lengths of their own, packed or padded.

    Args:
        q: (total_q, heads_q, head_dim) if there are cu_seqlens_q, else (batch, seqlen_q, heads_q,
            head_dim); k, v likewise.
        cu_seqlens_q: (batch + 1,) integers from 0, not decreasing; sequence b has the rows
            cu_seqlens_q[b] … cu_seqlens_q[b + 1]. So is cu_seqlens_k.
        seqused_q: (batch,), the first rows of each sequence that count; None: all. So is seqused_k.

    Returns:
        out like q, and the LSE (heads_q, total_q) or (batch, heads_q, seqlen_q); 0 and -inf in rows
        that do not count.
    """
    xp = array_namespace(q)
    out = xp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = xp.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -xp.inf, compute_dtype(q))
    sequences = _sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    for at_q, at_k, at_lse, place in sequences:
        out[at_q], lse[at_lse] = attention_tiled(
            q[at_q], k[at_k], v[at_k], **_of_sequence(*place, options)
        )
    return out, lse


def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    *,
    dlse: Array | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of :func:`attention_varlen`, like (q, k, v, bias, sinks)."""
    total = _zero_gradients(q, k, v, options)
    sequences = _sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    for at_q, at_k, at_lse, place in sequences:
        found = attention_tiled_backward(
            *(dout[at_q], q[at_q], k[at_k], v[at_k], out[at_q], lse[at_lse]),
            dlse=None if dlse is None else dlse[at_lse],
            **_of_sequence(*place, options),
        )
        total.dq[at_q], total.dk[at_k], total.dv[at_k] = found[:3]
        if found.dbias is not None:
            _bias_of(total.dbias, *place)[...] += found.dbias
        if found.dsinks is not None:
            total.dsinks[...] += found.dsinks
    return total


def _zero_gradients(q: Array, k: Array, v: Array, options: dict[str, Any]) -> Gradients:
    """Zeros like (q, k, v, bias, sinks), None for what has no gradient."""
    xp, dtype = array_namespace(q), compute_dtype(q)
    learned = options["bias"] if options.get("bias_grad") else None, options.get("sinks")
    return Gradients(
        *(xp.zeros(x.shape, x.dtype) for x in (q, k, v)),
        *(None if x is None else xp.zeros(x.shape, dtype) for x in learned),
    )


def _sequences(
    q: Array,
    k: Array,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    seqused_q: Array | None,
    seqused_k: Array | None,
) -> Iterator[tuple[tuple, tuple, tuple, tuple[int, slice, slice]]]:
    """The places of each sequence, as a batch of one.

    Yields:
        Its indices in q, in k and in the LSE; and (its number, its rows, its columns).
    """
    queries, keys = _rows(q, cu_seqlens_q, seqused_q), _rows(k, cu_seqlens_k, seqused_k)
    for b, ((at_q, rows), (at_k, cols)) in enumerate(zip(queries, keys)):
        yield at_q, at_k, (at_q[0], slice(None), at_q[1]), (b, rows, cols)


def _rows(
    x: Array, cu_seqlens: Array | None, seqused: Array | None
) -> Iterator[tuple[tuple, slice]]:
    """The index of each sequence in x, and its rows counted from its own first one."""
    if cu_seqlens is None:
        starts, lengths = [0] * len(x), [x.shape[1]] * len(x)
    else:
        *starts, _ = ends = cu_seqlens.tolist()
        lengths = [end - start for start, end in zip(ends, ends[1:])]
    lengths = lengths if seqused is None else seqused.tolist()
    for b, (start, length) in enumerate(zip(starts, lengths)):
        batch = slice(b, b + 1) if cu_seqlens is None else None
        yield (batch, slice(start, start + length)), slice(0, length)


def _of_sequence(b: int, rows: slice, cols: slice, options: dict[str, Any]) -> dict[str, Any]:
    """The options of sequence b, which ``options`` has for the whole batch."""
    text = options.get("text")
    slopes, bias, mask = (options.get(name) for name in ("alibi_slopes", "bias", "key_mask"))
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes[b]
    if bias is not None:
        bias = _bias_of(bias, b, rows, cols)
    if mask is not None:
        mask = mask[b : b + 1, cols]
    arrays = {"alibi_slopes": slopes, "bias": bias, "key_mask": mask}
    arrays["text"] = None if text is None else text._replace(first_batch=b)
    return options | arrays | {"first_sequence": b}


def _bias_of(bias: Array, b: int, rows: slice, cols: slice) -> Array:
    """View of the part of a bias that concerns sequence b."""
    part = bias[tile_of(bias, rows, cols)]
    return part[b : b + 1] if part.ndim == 4 and part.shape[0] > 1 else part
