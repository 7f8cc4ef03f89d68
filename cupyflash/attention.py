"""Attention in the vocabulary of this library; flash-attn's own signatures are in flash_attn.py."""

from .array import Array
from .dispatch import backward, forward

Window = tuple[int | None, int | None] | None


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(scale * q k^T) v without the matrix of scores in memory.

    Arrays are CuPy arrays, torch tensors (with autograd), or anything with DLPack or
    ``__cuda_array_interface__``; NumPy arrays and torch CPU tensors are computed on the CPU.
    Strides are free but for a contiguous last dimension, and nothing is copied.

    Query head h reads key head ``h // (heads_q // heads_kv)``. Query i lies on the diagonal at key
    ``i + seqlen_k - seqlen_q`` (with "top-left": at key i). A query that sees no key gives 0 and an
    LSE of -inf.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16 or float32; head_dim a multiple
            of 8 up to 256.
        k: (batch, seqlen_k, heads_kv, head_dim), dtype of q.
        v: like k.
        causal: no key right of the diagonal. True is "bottom-right"; "top-left" is what SDPA does.
        scale: of the scores; default ``1 / sqrt(head_dim)``.
        window: (left, right), the keys seen on each side of the diagonal; None or -1 is unlimited.
        softcap: scores become ``softcap * tanh(score / softcap)``, unless 0.
        alibi_slopes: float32 (heads_q,) or (batch, heads_q); subtracts slope * distance to the
            diagonal from a score.
        layout: "bshd", or "bhsd" with axes 1 and 2 of q, k, v and the result swapped.
        return_lse: return (out, lse); lse float32 (batch, heads_q, seqlen_q), natural logarithm.

    Returns:
        out like q, in the library and on the device and stream of q.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, values of options.
        NotImplementedError: a GPU, or a forced kernel family, that cannot compute this.

    Source: FlashAttention-2, arXiv:2307.08691.
    """
    options = (causal, scale, _hashable(window), softcap, layout)
    out, lse = forward("attention", q, k, v, options, alibi_slopes, need_lse=return_lse)
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of `attention` for libraries without autograd.

    Args:
        dout: gradient of out, like q.
        q, k, v: inputs of the forward.
        out, lse: its results.
        causal, scale, window, softcap, alibi_slopes, layout: as in the forward.
        deterministic: sum dq in a fixed order, so that equal calls give equal bits; slower.

    Returns:
        (dq, dk, dv), like q, k and v.

    Raises:
        As `attention`.
    """
    options = (causal, scale, _hashable(window), softcap, layout)
    return backward(
        "attention_backward", dout, q, k, v, out, lse, options, alibi_slopes,
        deterministic=deterministic,
    )  # fmt: skip


def _hashable(window: Window) -> Window:
    return tuple(window) if isinstance(window, list) else window
