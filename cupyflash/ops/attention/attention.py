"""Attention in the vocabulary of this library; flash-attn's own signatures are in flash_attn.py."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ...runtime.array import Array
from ...runtime.checks import plain_flag
from .foreign import refuse, refuses_foreign
from .operations import BACKWARD, FORWARD
from .options import Gradients, plain_options

if TYPE_CHECKING:  # imported when a call has a score or a mask
    from .score_text.arguments import ScoreGradients
    from .score_text.scores import Mask, Score

Window = tuple[int | None, int | None] | None


@refuses_foreign
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
    bias: Array | None = None,
    sinks: Array | None = None,
    score: "Score | Callable | None" = None,
    mask: "Mask | Callable | None" = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str = "ieee",
    **foreign: NoReturn,
) -> Array | tuple[Array, Array]:
    """softmax(scale * q k^T) v without the matrix of scores in memory.

    Arrays are CuPy arrays, torch tensors (with autograd), or anything with DLPack or
    ``__cuda_array_interface__``; NumPy arrays and torch CPU tensors are computed on the CPU.
    Strides are free but for a contiguous last dimension. Nothing is copied, unless head_dim is no
    multiple of 8 or v has another one: then a GPU gets copies of q, k and v with columns of zeros
    behind, and out and the gradients are views of columns of wider arrays. Hopper needs no copies
    for a v of 128 columns beside q and k of up to 192, without options that change the scores.

    Query head h reads key head ``h // (heads_q // heads_kv)``. Query i lies on the diagonal at key
    ``i + seqlen_k - seqlen_q`` (with "top-left": at key i). A query that sees no key gives 0 and an
    LSE of -inf.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16 or float32; head_dim from 1 to
            256.
        k: (batch, seqlen_k, heads_kv, head_dim), dtype of q.
        v: like k; its head_dim may be another one, from 1 to 256.
        causal: no key right of the diagonal. True is "bottom-right"; "top-left" is what SDPA does.
        scale: of the scores; default ``1 / sqrt(head_dim)``.
        window: (left, right), the keys seen on each side of the diagonal; None or -1 is unlimited.
        softcap: scores become ``softcap * tanh(score / softcap)``, unless 0.
        alibi_slopes: float32 (heads_q,) or (batch, heads_q); subtracts slope * distance to the
            diagonal from a score.
        bias: added to the scores, after softcap and ALiBi: broadcasts to (batch, heads_q, seqlen_q,
            seqlen_k), whatever the layout; any strides. Dtype of q, float32, or bool, where False
            is -inf. Below -2^24, where float32 has no digit left for the score, means -inf too, and
            above 2^24 means 2^24. A long bool one is fastest on Hopper if 8 heads or more share it,
            by an axis of length 1 or stride 0: at each call its bits are found once for all of them
            (at most 128 MiB), and what it hides is skipped in whole tiles.
        sinks: (heads_q,), float32 or dtype of q: a logit beside those of the keys, without a value;
            it enters the LSE. A query that sees no key has it as its LSE.
        score: a function of (score, batch, head, query, key) or a `cupyflash.Score`, whose number
            takes the place of ``scale * q k^T``; what the other options do comes after it. The
            arrays that it reads have gradients under torch. A function without branches is traced
            at its first call, and its text is remembered; any other is traced at each call. A
            `Score` is traced once. Not with softcap and alibi_slopes.
        mask: a function of (batch, head, query, key), a `cupyflash.Mask` or a BlockMask of torch:
            True where the query sees the key; what causal, window and bias hide stays hidden.
        dropout_p: probability, in steps of 2^-16, with which a weight becomes 0 after the softmax;
            the others are divided by 1 - dropout_p. The LSE is that of all weights.
        dropout_seed: from 0 to 2^63 - 1, or int64 of one element on the device of q; equal seeds
            drop the same weights. None draws one from the generator of the library.
        seqused_q: int32 (batch,), the rows of each sequence that count; the others are not read,
            their out is 0, their LSE -inf. The bottom-right diagonal ends at these lengths.
        seqused_k: the same for keys. The values are checked on the CPU, and on a GPU with
            CUPYFLASH_DEBUG=1.
        layout: "bshd", or "bhsd" with axes 1 and 2 of q, k, v and the result swapped.
        return_lse: return (out, lse); lse float32 (batch, heads_q, seqlen_q), natural logarithm,
            differentiable like out.
        deterministic: sum all gradients in a fixed order, so that equal calls give equal bits;
            slower. The gradient of a bias that is broadcast has such an order if all sequences, and
            perhaps all heads, share it, in float16 or bfloat16, with a head_dim up to 64, without
            softcap, slopes, dropout and seqused, and on tensor cores, which do not take unaligned
            arrays; the backward raises otherwise. Without this option that gradient is summed in
            this order too, but for sequences of at most 64 queries and keys with a head_dim up to
            32. The gradients of the arrays that a score reads are sums without rounding, which take
            48 bytes of GPU memory for each element of these arrays.
            torch's switch ``torch.use_deterministic_algorithms`` asks for it too.
        precision: of the products of float32 arrays: "ieee", as accurate as float32 arithmetic (on
            tensor cores the factors have 22 bits, which shows where few terms are added), or
            "tf32", with factors of 11 bits and faster. Only this option decides; the global
            settings of torch (``torch.backends.fp32_precision``, ``allow_tf32``) change nothing.
            Where "tf32" has no kernel, the products are those of "ieee".

    Options are numbers of Python or NumPy, or arrays of no dimensions in the host's memory; one on
    a GPU is refused, as reading it would wait for the GPU, and so is one that requires a gradient.

    Returns:
        out like q, with the head_dim of v, in the library and on the device and stream of q.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, values of options.
        NotImplementedError: a GPU, or a forced backend, that cannot compute this; gradients
            of slopes or options, forward-mode derivatives; in the backward, what has no fixed order
            where one is asked for.
        IndexError: on a CPU, an index of the score or mask outside of its array.

    Sources: FlashAttention-2, arXiv:2307.08691; sinks: gpt-oss, arXiv:2508.10925; random numbers:
    Philox4x32-7, Salmon et al. 2011.
    """
    if foreign:
        refuse(attention, foreign)
    options = plain_options(
        "attention", causal=causal, scale=scale, window=window, softcap=softcap, layout=layout,
        dropout_p=dropout_p, deterministic=deterministic, precision=precision,
    )  # fmt: skip
    if return_lse is not False:
        return_lse = plain_flag("attention", "return_lse", return_lse)
    arrays = (q, k, v)
    if not alibi_slopes is bias is sinks is dropout_seed is seqused_q is seqused_k is None:
        arrays += (None, None, alibi_slopes, bias, sinks, dropout_seed, seqused_q, seqused_k)
    if not score is mask is None:
        from .score_text.arguments import with_text

        options, arrays = with_text("attention", options, arrays, 3, score, mask)
    out, lse = FORWARD("attention", arrays, (options, return_lse))
    return (out, lse) if return_lse else out


@refuses_foreign
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
    bias: Array | None = None,
    sinks: Array | None = None,
    score: "Score | Callable | None" = None,
    mask: "Mask | Callable | None" = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    layout: str = "bshd",
    bias_grad: bool = False,
    score_grad: bool = False,
    deterministic: bool = False,
    precision: str = "ieee",
    dlse: Array | None = None,
    **foreign: NoReturn,
) -> "tuple[Array, Array, Array] | Gradients | ScoreGradients":
    """Gradients of `attention` for libraries without autograd.

    The weights are computed anew from the LSE, whose rounding changes them by about |lse| * 2^-24.
    Where nothing of them is left, from 2^24 on, the gradients of a row are NaN, and with it those
    of the keys that it sees; out itself is right for scores of any size.

    The keys may be a part of those that the queries attend to, as where several GPUs or several
    steps divide them: then out and lse are those of all keys, dk and dv are final, and the dq (and
    with bias_grad the dbias of a bias that parts share) of all parts add up to that of all keys. A
    causal mask, a window and ALiBi count keys from the first one of the call, sinks belong to lse,
    and each part returns all of dsinks. Dropout has no parts.

    In float32 on tensor cores a weight below 2^-51 adds nothing to a gradient, and one below 2^-28
    adds fewer than 22 bits: gradients of keys that no query attends to are accurate relative to the
    largest gradient of the head.

    Args:
        dout: gradient of out, like out.
        q, k, v: inputs of the forward.
        out, lse: its results, or those of more keys, of which k and v are a part.
        causal to layout: as in the forward; dropout needs the seed that the forward had.
        bias_grad: also the gradient of the bias, summed over the axes on which it is broadcast.
        score_grad: also the gradients of the floating-point arrays that the score reads.
        deterministic, precision: as in `attention`.
        dlse: gradient of the LSE, like lse; None is 0. Rows with an LSE of -inf do not count.

    Returns:
        (dq, dk, dv), like q, k and v; with sinks or bias_grad a named tuple (dq, dk, dv, dbias,
        dsinks), None where there is none. With score_grad it ends with dcaptures, a dictionary of
        gradients by the names that the text of the score has for the arrays.

    Raises:
        As `attention`.
    """
    if foreign:
        refuse(attention_backward, foreign)
    function, arrays = "attention_backward", (dout, q, k, v, out, lse, dlse)
    options = plain_options(
        function, causal=causal, scale=scale, window=window, softcap=softcap, layout=layout,
        dropout_p=dropout_p, deterministic=deterministic, precision=precision,
    )  # fmt: skip
    bias_grad = plain_flag(function, "bias_grad", bias_grad)
    if not alibi_slopes is bias is sinks is dropout_seed is seqused_q is seqused_k is None:
        arrays += (None, None, alibi_slopes, bias, sinks, dropout_seed, seqused_q, seqused_k)
    if not score is mask is None:
        from .score_text.arguments import with_text

        options, arrays = with_text(function, options, arrays, 7, score, mask)
    score_grad = plain_flag(function, "score_grad", score_grad)
    if score_grad:
        from .score_text.arguments import ScoreGradients, gradients_by_name, with_gradients

        options = with_gradients(function, options)
        found = BACKWARD(function, arrays, (options, bias_grad))
        return ScoreGradients(*found[:5], gradients_by_name(options, found[5:]))
    dq, dk, dv, *learned = BACKWARD(function, arrays, (options, bias_grad))
    learned = learned[:2]  # without those of captures
    return Gradients(dq, dk, dv, *learned) if bias_grad or sinks is not None else (dq, dk, dv)
