"""Seeded inputs for any library, dtype, layout and storage."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy

STORAGES = ("contiguous", "transposed", "packed", "padded", "unaligned")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors of one attention problem in the caller's library.

    q, dout (batch, seqlen_q, heads_q, head_dim); k, v (batch, seqlen_k, heads_kv, head_dim), where
    v and dout may have a head_dim of their own; with layout "bhsd" axes 1 and 2 are swapped. Packed
    sequences (cu_seqlens given) have no batch axis.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    dtype: str
    layout: str = "bshd"
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None


def to_library(array: numpy.ndarray, library: str, device: str = "cpu") -> Any:
    """A NumPy array as an array of "numpy", "cupy" or "torch" (on ``device``)."""
    if library == "torch":
        import torch

        return torch.from_numpy(array).to(device)
    if library == "cupy":
        import cupy

        return cupy.asarray(array)
    return array


def cast(array: numpy.ndarray, dtype: str, library: str, device: str = "cpu") -> Any:
    """float32 values rounded to ``dtype`` in the given library."""
    if library == "torch":
        import torch

        return torch.from_numpy(array).to(getattr(torch, dtype)).to(device)
    if dtype == "bfloat16":
        import ml_dtypes

        return to_library(array.astype(ml_dtypes.bfloat16), library)
    return to_library(array.astype(dtype), library)


def make_inputs(
    library: str,
    dtype: str,
    *,
    batch: int = 2,
    seqlen_q: int,
    seqlen_k: int | None = None,
    heads_q: int = 4,
    heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    layout: str = "bshd",
    storage: str = "contiguous",
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Standard normal inputs, the same values for every library, layout and storage.

    Args:
        library: "numpy", "cupy" or "torch".
        dtype: "float16", "bfloat16" or "float32".
        storage: where the tensors lie. "contiguous"; "transposed": contiguous in the other layout;
            "packed": slices of one qkv tensor; "padded": slices of a tensor with more rows and
            columns, aligned to 16 bytes; "unaligned": the same, not aligned. What lies between is
            NaN.
        head_dim_v: of v and dout; default ``head_dim``. Not with "packed".
        device: of torch tensors.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    heads_kv = heads_q if heads_kv is None else heads_kv
    axes_q, axes_k = (batch, seqlen_q, heads_q), (batch, seqlen_k, heads_kv)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    rng = numpy.random.default_rng(seed)
    values = [
        rng.standard_normal((*axes, columns), dtype="float32")
        for axes, columns in (
            (axes_q, head_dim),
            (axes_k, head_dim),
            (axes_k, head_dim_v),
            (axes_q, head_dim_v),
        )
    ]
    if layout == "bhsd":
        values = [x.swapaxes(1, 2) for x in values]
    if storage == "packed":
        *qkv, dout = values
        tensors = _packed(qkv, layout, dtype, library, device)
        tensors.append(cast(numpy.ascontiguousarray(dout), dtype, library, device))
    else:
        tensors = [_stored(x, storage, dtype, library, device) for x in values]
    return Inputs(*tensors, dtype=dtype, layout=layout)


def make_varlen_inputs(
    library: str,
    dtype: str,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    heads_q: int = 4,
    heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    storage: str = "contiguous",
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Packed sequences: :func:`make_inputs` with a batch of one, and int32 cu_seqlens."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    batch_of_one = make_inputs(
        library,
        dtype,
        batch=1,
        seqlen_q=sum(lengths_q),
        seqlen_k=sum(lengths_k),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        storage=storage,
        device=device,
        seed=seed,
    )
    cu_seqlens_q, cu_seqlens_k = (
        to_library(numpy.cumsum([0, *lengths]).astype("int32"), library, device)
        for lengths in (lengths_q, lengths_k)
    )
    tensors = (x[0] for x in (batch_of_one.q, batch_of_one.k, batch_of_one.v, batch_of_one.dout))
    return Inputs(*tensors, dtype, "bshd", cu_seqlens_q, cu_seqlens_k)


def make_alibi_slopes(
    heads_q: int, library: str, *, batch: int | None = None, device: str = "cpu", seed: int = 0
) -> Any:
    """float32 slopes between 0 and 0.3, (heads_q,) or (batch, heads_q)."""
    shape = (heads_q,) if batch is None else (batch, heads_q)
    slopes = 0.3 * numpy.random.default_rng(seed).random(shape, dtype="float32")
    return to_library(slopes, library, device)


def _stored(values: numpy.ndarray, storage: str, dtype: str, library: str, device: str) -> Any:
    if storage == "contiguous":
        return cast(numpy.ascontiguousarray(values), dtype, library, device)
    if storage == "transposed":
        other = numpy.ascontiguousarray(values.swapaxes(1, 2))
        return cast(other, dtype, library, device).swapaxes(1, 2)
    extra = 8 if storage == "padded" else 1
    a, b, c, d = values.shape
    memory = numpy.full((a, b + 2, c + 1, d + 2 * extra), numpy.nan, "float32")
    inside = (slice(None), slice(1, b + 1), slice(0, c), slice(extra, extra + d))
    memory[inside] = values
    return cast(memory, dtype, library, device)[inside]


def _packed(
    qkv: list[numpy.ndarray], layout: str, dtype: str, library: str, device: str
) -> list[Any]:
    """q, k, v as slices of one tensor (batch, longest seqlen, heads_q + 2 heads_kv, head_dim)."""
    heads_axis, rows_axis = (2, 1) if layout == "bshd" else (1, 2)
    shape = list(qkv[0].shape)
    shape[heads_axis] = sum(x.shape[heads_axis] for x in qkv)
    shape[rows_axis] = max(x.shape[rows_axis] for x in qkv)
    memory = numpy.full(shape, numpy.nan, "float32")
    parts, head = [], 0
    for x in qkv:
        part = [slice(None)] * 4
        part[heads_axis] = slice(head, head + x.shape[heads_axis])
        part[rows_axis] = slice(0, x.shape[rows_axis])
        memory[tuple(part)] = x
        parts.append(tuple(part))
        head += x.shape[heads_axis]
    tensor = cast(memory, dtype, library, device)
    return [tensor[part] for part in parts]
