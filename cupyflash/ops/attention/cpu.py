"""The CPU path: NumPy arrays and torch CPU tensors through the tiled algorithm of the reference."""

from typing import Any

import numpy

from ...runtime.array import Array, silent
from . import reference
from .options import Extras, Gradients, Options
from .score_text.call import TextCall


@silent
def forward(
    library: Any,
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    extras: Extras,
    captures: tuple = (),
) -> tuple[Array, Array]:
    """(out, lse) of checked arrays; the captures are those of the text of the options."""
    qkv = [_rows_first(library.to_numpy(x), options) for x in (q, k, v)]
    function, lengths, arguments = _call(library, options, extras, captures)
    out, lse = getattr(reference, function)(*qkv, *lengths, **arguments)
    return library.from_numpy(_rows_first(out, options), q), library.from_numpy(lse)


@silent
def backward(
    library: Any,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: Options,
    extras: Extras,
    bias_grad: bool,
    dlse: Array | None,
    captures: tuple = (),
) -> tuple[Array | None, ...]:
    """Gradients of checked arrays, behind them those of the captures; always deterministic."""
    tensors = [_rows_first(library.to_numpy(x), options) for x in (dout, q, k, v, out)]
    tensors.append(library.to_numpy(lse))
    function, lengths, arguments = _call(library, options, extras, captures)
    text = arguments["text"]
    if text is not None:
        text = arguments["text"] = text.with_gradients()
    found = getattr(reference, f"{function}_backward")(
        *tensors,
        *lengths,
        bias_grad=bias_grad,
        dlse=None if dlse is None else library.to_numpy(dlse),
        **arguments,
    )
    first = [library.from_numpy(_rows_first(x, options), y) for x, y in zip(found, (q, k, v))]
    dbias = dsinks = None
    if bias_grad:
        dbias = library.from_numpy(found.dbias.astype(arguments["bias"].dtype), extras.bias)
    if extras.sinks is not None:
        dsinks = library.from_numpy(found.dsinks.astype(arguments["sinks"].dtype), extras.sinks)
    gradients = Gradients(*first, dbias, dsinks)
    if text is None:
        return gradients
    sums = [text.gradients.get(capture.name) for capture in text.text.captures]
    return *gradients, *(
        None if sum_ is None else library.cast(library.from_numpy(sum_), x)
        for sum_, x in zip(sums, captures)
    )


def _rows_first(x: numpy.ndarray, options: Options) -> numpy.ndarray:
    """Between layouts "bhsd" and "bshd", either way, without a copy."""
    return x.swapaxes(1, 2) if options.layout == "bhsd" else x


def _call(
    library: Any, options: Options, extras: Extras, captures: tuple
) -> tuple[str, list[numpy.ndarray | None], dict[str, Any]]:
    """The name of the function of the reference, its lengths, and its options."""
    window = options.window
    if window is not None:
        window = tuple(None if side in (None, -1) else side for side in window)
    arrays = Extras(*(None if x is None else library.to_numpy(x) for x in extras))
    arguments = {
        "causal": options.causal,
        "scale": options.scale,
        "window": window,
        "softcap": options.softcap,
        "dropout_p": options.dropout_p,
        "dropout_seed": 0 if arrays.dropout_seed is None else int(arrays.dropout_seed.item()),
        "alibi_slopes": arrays.alibi_slopes,
        "bias": arrays.bias,
        "key_mask": arrays.key_mask,
        "sinks": arrays.sinks,
        "text": None,
    }
    if options.text is not None:
        captures = captures[: len(options.text.captures)]  # the CPU has no use for tiles
        values = (x if isinstance(x, int | float) else library.to_numpy(x) for x in captures)
        arguments["text"] = TextCall(options.text, tuple(values))
    lengths = [arrays.cu_seqlens_q, arrays.cu_seqlens_k, arrays.seqused_q, arrays.seqused_k]
    if all(x is None for x in lengths):
        return "attention_tiled", [], arguments
    return "attention_varlen", lengths, arguments
