"""Keys and values of new tokens into a preallocated cache."""

import math
from typing import Any

from ..runtime.array import Array, View, library_of
from ..runtime.checks import require_arrays, require_grid, require_int32, views_of
from ..runtime.config import ITEM_SIZE
from ..runtime.launch import Launch
from ..runtime.operation import Plan, Plans
from ..runtime.overlap import Written
from ..runtime.rows import is_contiguous
from ..runtime.structs import header
from . import kernels

structs = header("decode/params.cuh")

CACHES = ("k_cache", "v_cache")  # what is written

_plans = Plans(wide=4, plain=True)


def cache_append(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    sequences: Array | None = None,
) -> None:
    """k_cache[sequences[i], positions[i]] = k[i], and the same for v, in one launch.

    Arrays are NumPy or CuPy arrays or torch tensors.

    Args:
        k: (rows, heads, head_dim), float16, bfloat16 or float32; the heads of a row side by side,
            the stride of rows is free.
        v: like k.
        k_cache: (batch, max_length, heads, head_dim), dtype of k, contiguous.
        v_cache: like k_cache.
        positions: int32 (rows,). What lies on a GPU is not checked, as that would wait for it: a
            place that does not exist is left alone.
        sequences: like positions; None is 0, 1, 2, …

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, a cache that shares memory with another argument; on
            the CPU a place that does not exist.
        NotImplementedError: inputs that require a gradient.
    """
    append("cache_append", k, v, k_cache, v_cache, positions, sequences)


def append(
    function: str,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    sequences: Array | None,
) -> None:
    """`cache_append` under another name in its errors."""
    library = library_of(k)
    if library is None:
        got = type(k).__name__
        raise TypeError(f"{function}: k must be a NumPy, CuPy or torch array, got {got}")
    arrays = (k, v, k_cache, v_cache, positions, sequences)
    if library.on_cpu(k):
        views = _check(function, library, *arrays)
        given = [x for x in arrays if x is not None]
        Written(function, views, CACHES).check([library.pointer(x) for x in given])
        _on_cpu(function, library, *arrays)
        return
    plan, pointers = _plans.find(
        library,
        arrays,
        function,
        lambda: _check(function, library, *arrays),
        lambda views, aligned: AppendPlan(function, library, views, aligned),
    )
    plan.written.check(pointers)
    plan(pointers)
    library.wrote(k_cache, v_cache)


class AppendPlan(Plan):
    """The kernel for one signature."""

    def __init__(self, function: str, library: Any, views: dict[str, View], aligned: bool) -> None:
        k, v, cache = views["k"], views["v"], views["k_cache"]
        super().__init__(k.device)
        self.written = Written(function, views, CACHES)
        self.library = library
        rows, columns = k.shape[0], math.prod(k.shape[1:])
        self.empty = rows * columns == 0
        if self.empty:
            return
        params = structs.CacheAppendParams(
            rows=rows,
            k_stride=k.strides[0],
            v_stride=v.strides[0],
            columns=columns,
            batch=cache.shape[0],
            max_length=cache.shape[1],
        )
        steps = (columns, k.strides[0], v.strides[0])
        aligned = aligned and all(step * ITEM_SIZE[k.dtype] % 16 == 0 for step in steps)
        config = kernels.CacheAppend(k.dtype, kernels.vector(k.dtype, aligned))
        grid = require_grid(function, config.grid(rows * columns), k.shape)
        self.launch = Launch(config, k.device, grid, params)

    def run(self, pointers: list[int]) -> None:
        """``pointers`` of k, v, k_cache, v_cache, positions, sequences."""
        if not self.empty:
            *tensors, positions, sequences = pointers
            self.launch(self.library.stream(self.device_id), *tensors, sequences, positions)


def _check(
    function: str, library: Any, k: Array, v: Array, k_cache: Array, v_cache: Array,
    positions: Array, sequences: Array | None,
) -> dict[str, View]:  # fmt: skip
    """Views of all arrays that are there, in their order."""
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    places = {"positions": positions}
    if sequences is not None:
        places["sequences"] = sequences
    require_arrays(function, library, tensors | places)
    views = views_of(function, library, tensors)
    first, cache = views["k"], views["k_cache"]
    if len(first.shape) != 3 or len(cache.shape) != 4 or cache.shape[2:] != first.shape[1:]:
        fact = "k must be (rows, heads, head_dim) and k_cache (batch, max_length, heads, head_dim)"
        raise ValueError(f"{function}: {fact}, got {first.shape} and {cache.shape}")
    for name, like in (("v", first), ("v_cache", cache)):
        if views[name].shape != like.shape:
            fact = f"{name} must have the shape {like.shape}"
            raise ValueError(f"{function}: {fact}, got {views[name].shape}")
    for name, view in views.items():
        if view.dtype != first.dtype:
            fact = f"{name} must have the dtype of k"
            raise TypeError(f"{function}: {fact}, got {view.dtype} and {first.dtype}")
        whole = view if name in CACHES else View(view.shape[1:], view.strides[1:], "", 0)
        if not is_contiguous(whole):
            part = "contiguous" if whole is view else "contiguous in each row"
            fact = f"{name} must be {part}"
            raise ValueError(f"{function}: {fact}, got strides {view.strides}")
    for name, x in places.items():
        require_int32(function, library, name, x, first.shape[:1], first.device)
    return views | {name: library.view(x) for name, x in places.items()}


def _on_cpu(
    function: str, library: Any, k: Array, v: Array, k_cache: Array, v_cache: Array,
    positions: Array, sequences: Array | None,
) -> None:  # fmt: skip
    places = [range(len(k)) if sequences is None else library.to_list(sequences)]
    places.append(library.to_list(positions))
    for name, indices, size in zip(("sequences", "positions"), places, k_cache.shape):
        if len(indices) and not (min(indices) >= 0 and max(indices) < size):
            fact = f"{name} must be from 0 to {size - 1}"
            raise ValueError(f"{function}: {fact}, got {min(indices)} to {max(indices)}")
    for row, (sequence, position) in enumerate(zip(*places)):
        k_cache[sequence, position] = k[row]
        v_cache[sequence, position] = v[row]
