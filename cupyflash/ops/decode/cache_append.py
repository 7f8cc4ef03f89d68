"""Keys and values of new tokens into a preallocated cache."""

from typing import Any

from ...runtime.array import Array
from ...runtime.operation import Operation, Plans, is_followed
from ...runtime.overlap import Written
from ...runtime.specs import Spec, views_of
from . import kv_cache, reference
from .cached import CACHES

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
    written = _plans.get(key)
    if written is None:
        written = _plans.add(key, Written(function, check(), CACHES))
    written.check([x for x in pointers if x])
    k, v, k_cache, v_cache, positions, sequences = arrays
    places = (positions, None, sequences, None, None)
    kv_cache.append(function, library, (k, v, k_cache, v_cache, *places, None, None))
    library.wrote(*arrays[2:4])
    return ()


APPEND = Operation(run, native="k")
