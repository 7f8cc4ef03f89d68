"""The tolerance rule for attention: float64, and attention as a framework computes it.

same_precision.py is the yardstick, as a framework computes it.
"""

from typing import Any

from ..ops.attention import reference
from ..runtime.array import Array, array_namespace
from .inputs import Inputs
from .same_precision import same_precision_attention
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
