"""Keys and values of new tokens into a preallocated cache."""

import math
from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.launch import Launch
from ...runtime.operation import Operation, Plan, Plans, is_followed
from ...runtime.overlap import Written
from ...runtime.specs import Spec, views_of
from ...runtime.structs import header
from . import kernels, reference

structs = header("decode/params.cuh")

CACHES = ("k_cache", "v_cache")  # the names of the arrays that decoding writes
NEW = Spec(("rows", "heads", "head_dim"), strides=2)
CACHE = Spec(("batch", "max_length", "heads", "head_dim"))
PLACES = Spec(("rows",), "int32")
SPECS = {
    "k": NEW,
    "v": NEW,
    "k_cache": CACHE,
    "v_cache": CACHE,
    "positions": PLACES,
    "sequences": PLACES._replace(optional=True),
}

_plans = Plans(wide=4)


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
    APPEND("cache_append", (k, v, k_cache, v_cache, positions, sequences), ())


def run(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[None, ...]:
    """`cache_append`, under the name of the function that was called."""
    check = lambda: views_of(function, library, SPECS, arrays, plain=True)  # noqa: E731
    if library.on_cpu(arrays[0]):
        views = check()
        given = [x for x in arrays if x is not None]
        Written(function, views, CACHES).check([library.pointer(x) for x in given])
        reference.append(function, library, *arrays)
        return ()
    if is_followed(library, arrays):
        check()
    key, pointers = _plans.key(library, arrays, function)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.add(key, AppendPlan(function, library, check(), key[-1]))
    plan.written.check(pointers)
    plan(pointers)
    library.wrote(*arrays[2:4])
    return ()


APPEND = Operation(run, native="k")


class AppendPlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, function: str, library: Any, views: Mapping[str, View], aligned: bool
    ) -> None:
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
            argument = self.launch.argument(*tensors, sequences, positions)
            self.launch.start(self.library.stream(self.device_id), argument)
