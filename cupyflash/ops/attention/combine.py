"""Attention over parts of the keys, combined into attention over all of them.

With out_i and lse_i of part i::

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

Array operations of the caller's library do it, so that torch has its gradient.
"""

from typing import Any

from ...runtime import loaded
from ...runtime.array import Array, ArrayT, array_namespace, compiling, silent
from ...runtime.lookup import from_foreign, library_of, to_foreign
from ...runtime.scratch import array_operations

FUNCTION = "flash_attn_combine"
DTYPES = ("float16", "bfloat16", "float32")


def flash_attn_combine(
    out_partial: ArrayT, lse_partial: Array, out: Array | None = None, out_dtype: Any = None
) -> tuple[ArrayT, ArrayT]:
    """Combine the results of attention over parts of the keys, as flash-attn 3 does.

    A part whose LSE is -inf saw no key and does not count, whatever its out_partial holds. Where no
    part counts, the result is 0 and -inf. Differentiable with torch: as the LSE of `attention` has
    a gradient, attention over parts of the keys has the gradients of attention over all of them.

    Args:
        out_partial: (parts, batch, seqlen, heads, head_dim), or (parts, total, heads, head_dim) of
            packed sequences; float16, bfloat16 or float32.
        lse_partial: float32 (parts, batch, seqlen, heads) or (parts, total, heads), any strides:
            the LSE of `attention` with heads and seqlen swapped.
        out: where to write the result, an array like it; not with a gradient.
        out_dtype: of the result, as the library names it; default that of ``out``, or of
            out_partial.

    Returns:
        out (batch, seqlen, heads, head_dim) and lse (batch, seqlen, heads) float32, or without the
        axis of the sequences.

    Raises:
        TypeError, ValueError: dtypes, shapes, libraries.
        NotImplementedError: ``out`` together with gradients.
    """
    if not compiling() and library_of(out_partial) is None:
        arrays = (out_partial, lse_partial, *(() if out is None else (out,)))
        arrays = [x if library_of(x) else from_foreign(FUNCTION, x) for x in arrays]
        results = flash_attn_combine(*arrays, out_dtype=out_dtype)
        return tuple(to_foreign(x, out_partial) for x in results)
    if out_dtype is None:
        out_dtype = getattr(out_partial if out is None else out, "dtype", None)
    _check(out_partial, lse_partial, out, out_dtype)
    is_torch = _module(out_partial) == "torch"
    if is_torch and out is not None and _wants_gradient(out_partial, lse_partial, out):
        fact = "out is not written where gradients are wanted: it must be None"
        raise NotImplementedError(f"{FUNCTION}: {fact}, got a tensor")
    xp = loaded.torch if is_torch else array_namespace(out_partial)
    with array_operations(out_partial):
        combined = _combined if is_torch else silent(_combined)
        result, lse = combined(xp, out_partial, lse_partial, is_torch, out_dtype)
        if out is None:
            return result, lse
        out[...] = result
    return out, lse


def _wants_gradient(*tensors: Array) -> bool:
    return loaded.torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _combined(
    xp: Any, out_partial: Array, lse_partial: Array, is_torch: bool, out_dtype: Any
) -> tuple[Array, Array]:
    """(out, lse), computed in float32; out in ``out_dtype``."""
    infinity = float("inf")
    # This shifts all exponents alike, so it has no gradient.
    largest = xp.amax(lse_partial.detach() if is_torch else lse_partial, 0)
    largest = xp.where(largest == -infinity, 0, largest)
    weights = xp.exp(lse_partial - largest)
    total = weights.sum(0)
    none = total == 0
    total = xp.where(none, 1, total)
    lse = xp.where(none, -infinity, largest + xp.log(total))
    weights = (weights / total)[..., None]
    values = out_partial.float() if is_torch else out_partial.astype("float32", copy=False)
    # A part that does not count may hold NaN, and 0 * NaN is NaN.
    result = (weights * xp.where(weights == 0, 0, values)).sum(0)
    return result.to(out_dtype) if is_torch else result.astype(out_dtype, copy=False), lse


def _check(out_partial: Array, lse_partial: Array, out: Array | None, out_dtype: Any) -> None:
    arrays = {"out_partial": out_partial, "lse_partial": lse_partial}
    if out is not None:
        arrays["out"] = out
    for name, x in arrays.items():
        if _module(x) != _module(out_partial) or not hasattr(x, "dtype"):
            got = f"{_module(x)}.{type(x).__name__}"
            raise TypeError(f"{FUNCTION}: {name} must be an array like out_partial, got {got}")
        devices = getattr(x, "device", None), getattr(out_partial, "device", None)
        if devices[0] != devices[1]:
            fact = f"{name} must be on the device of out_partial"
            raise ValueError(f"{FUNCTION}: {fact}, got {devices[0]} and {devices[1]}")
    of_lse = {"lse_partial": lse_partial.dtype}
    dtypes = {"out_partial": out_partial.dtype, "out_dtype": out_dtype}
    for name, dtype in (of_lse | dtypes).items():
        allowed = DTYPES[-1:] if name in of_lse else DTYPES
        if _name(dtype) not in allowed:
            got = f"{' or '.join(allowed)}, got {dtype}"
            raise TypeError(f"{FUNCTION}: {name} must be {got}")
    shape = tuple(out_partial.shape)
    if len(shape) not in (4, 5) or min(shape[0], shape[-1]) < 1:
        axes = "(parts, batch, seqlen, heads, head_dim) or (parts, total, heads, head_dim)"
        fact = f"out_partial must be {axes}, parts and head_dim at least 1"
        raise ValueError(f"{FUNCTION}: {fact}, got {shape}")
    if tuple(lse_partial.shape) != shape[:-1]:
        fact = f"lse_partial must be {shape[:-1]}"
        raise ValueError(f"{FUNCTION}: {fact}, got {tuple(lse_partial.shape)}")
    if out is not None and (tuple(out.shape), _name(out.dtype)) != (shape[1:], _name(out_dtype)):
        fact = f"out must be {_name(out_dtype)} {shape[1:]}"
        raise ValueError(f"{FUNCTION}: {fact}, got {_name(out.dtype)} {tuple(out.shape)}")


def _module(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _name(dtype: Any) -> str:
    """Returns the name of a dtype in any form that a library takes."""
    if _module(dtype) == "torch":
        return str(dtype).removeprefix("torch.")
    return getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
