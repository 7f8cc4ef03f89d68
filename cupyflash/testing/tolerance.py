"""The tolerance rule.

The error against float64 is at most twice the error of the same formula computed in the same dtype
(:mod:`cupyflash.testing.same_precision`), plus rounding: one last place of the largest result in
its dtype, and one float32 last place of the largest sum of magnitudes behind a result, since the
baseline may have been lucky where few numbers are compared or where terms cancel. No tolerance is
set by hand, so no test can be loosened.
"""

import dataclasses
import functools
from typing import Any

import numpy

from cupyflash.attention import reference
from cupyflash.testing.inputs import Inputs, to_library
from cupyflash.testing.same_precision import EPSILON, same_precision_attention

from ..runtime.array import Array, array_namespace

RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
ARRAYS = ("alibi_slopes", "bias", "sinks")  # options


def to_float64(array: Any) -> Array:
    """Any array in float64: a NumPy array, or a CuPy array if a GPU holds and can multiply it."""
    if type(array).__module__.partition(".")[0] != "torch":
        return _where_matrices_multiply(array).astype("float64")
    array = array.detach().double()
    if array.device.type == "cpu":
        return array.numpy()
    import cupy

    return _where_matrices_multiply(cupy.from_dlpack(array))


def _where_matrices_multiply(array: Any) -> Any:
    """A CuPy array as NumPy array where CuPy has no cuBLAS, as in the light install; else as is."""
    if array_namespace(array) is numpy or _cupy_multiplies():
        return array
    return array.get()


@functools.cache
def _cupy_multiplies() -> bool:
    import cupy

    try:
        return bool((cupy.eye(2) @ cupy.eye(2))[0, 0] == 1)
    except (ImportError, RuntimeError, OSError):
        return False


def assert_close_to_float64(
    actual: Any, exact: Any, baseline: Any, dtype: str, name: str, *, terms: float = 0.0
) -> None:
    """Check one result against float64 and print what was compared.

    Args:
        actual: the result under test, of any library.
        exact: the same in float64.
        baseline: the same computed in ``dtype`` throughout; its error sets the tolerance.
        dtype: of the result, or the coarser one that its own inputs were rounded to.
        name: of the result, for messages.
        terms: the largest sum of magnitudes behind a result.

    Raises:
        AssertionError: shapes differ, a NaN or an infinity in the wrong place, or the largest error
            is beyond 2 * (largest error of baseline) + rounding.
    """
    assert tuple(actual.shape) == tuple(exact.shape), (
        f"{name}: shape must be {tuple(exact.shape)}, got {tuple(actual.shape)}"
    )
    if not exact.size:
        return
    actual, exact, baseline = map(to_float64, (actual, exact, baseline))
    xp = array_namespace(exact)
    error, baseline_error = _error(actual, exact), _error(baseline, exact)
    magnitude = xp.where(xp.isfinite(exact), xp.abs(exact), 0).max()
    rounding = EPSILON[dtype] * float(magnitude) + EPSILON["float32"] * terms
    allowed = 2 * float(baseline_error.max()) + rounding
    assert numpy.isfinite(allowed), f"{name}: the baseline itself is not finite"
    worst = numpy.unravel_index(int(error.argmax()), error.shape)
    index = tuple(int(i) for i in worst)
    message = (
        f"{name}: max error {float(error[index]):.3g}, allowed {allowed:.3g} (of that rounding "
        f"{rounding:.3g}), worst at {index}: got {float(actual[index]):.6g}, "
        f"float64 {float(exact[index]):.6g}; {int((error > allowed).sum())} of {error.size} beyond"
    )
    print(message)
    assert float(error[index]) <= allowed, message


def _error(actual: Array, exact: Array) -> Array:
    """|actual - exact|: 0 where both are the same infinity, inf where actual is NaN."""
    xp = array_namespace(exact)
    same = actual == exact
    error = xp.abs(xp.where(same, 0, actual) - xp.where(same, 0, exact))
    return xp.where(xp.isnan(error), xp.inf, error)


@dataclasses.dataclass(frozen=True)
class Expected:
    """float64 results of a problem, their baselines and terms by name, in layout bshd."""

    inputs: Inputs
    exact: dict[str, Array]
    baseline: dict[str, Any]
    terms: dict[str, float]
    dtypes: dict[str, str]  # of the results that are not in the dtype of the inputs

    def check(self, **results: Any) -> None:
        """Check results by their names in `RESULTS`, in the layout and dtypes of the inputs."""
        for name, result in results.items():
            dtype = self.dtypes.get(name, self.inputs.dtype)
            found = str(result.dtype).removeprefix("torch.")
            assert found == dtype, f"{name}: dtype must be {dtype}, got {found}"
            if name in ("dbias", "dsinks"):  # of what was rounded to the dtype of the inputs
                dtype = max(dtype, self.inputs.dtype, key=EPSILON.get)
            if self.inputs.layout == "bhsd" and name in ("out", "dq", "dk", "dv"):
                result = result.swapaxes(1, 2)
            assert_close_to_float64(
                result,
                self.exact[name],
                self.baseline[name],
                dtype,
                name,
                terms=self.terms[name],
            )


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
    dtypes = {"lse": "float32"} | {f"d{name}": _dtype(x) for name, x in arrays.items()}
    if type(inputs.q).__module__.partition(".")[0] == "cupy":
        tensors = [_where_matrices_multiply(x) for x in tensors]
        arrays = {name: _where_matrices_multiply(x) for name, x in arrays.items()}
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
        baseline, terms = same_precision_attention(*tensors, dlse=dlse, **options)
    else:
        lengths = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        out, lse = reference.attention_varlen(q, k, v, *lengths, **exact_options)
        gradients = reference.attention_varlen_backward(
            dout, q, k, v, out, lse, *lengths, **of_gradients, **exact_options
        )
        baseline, terms = _varlen_baseline(tensors, lengths, dlse, options)
    exact = dict(zip(RESULTS, (out, lse, *gradients), strict=True))
    if "dbias" in baseline:  # of rank 5
        baseline["dbias"] = baseline["dbias"].reshape(exact["dbias"].shape)
    return Expected(inputs, exact, baseline, terms, dtypes)


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _exact(x: Any) -> Array:
    """In float64, but a mask stays one."""
    return to_float64(x) != 0 if _dtype(x) == "bool" else to_float64(x)


def _varlen_baseline(
    tensors: list, lengths: tuple[Any, Any], dlse: Any, options: dict
) -> tuple[dict[str, Array], dict[str, float]]:
    """The baseline sequence by sequence, in float64 arrays with the shapes of the packed ones."""
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


def poison_free_memory(library: str, device: str, sizes: list[int]) -> None:
    """Leave NaN in freed blocks of these sizes (bytes), which the allocator hands out next.

    Every byte is 0xFF, a NaN in each floating dtype: a kernel that leaves a result unwritten shows.
    """
    block = [to_library(numpy.full(size, 0xFF, "uint8"), library, device) for size in sizes]
    del block
