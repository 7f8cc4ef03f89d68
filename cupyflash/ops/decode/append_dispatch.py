"""The way from the arrays of `cache_append` to the kernel that writes rows, or to the CPU."""

from typing import Any

import numpy

from ... import environment
from ...runtime.array import Array
from ...runtime.operation import Plans
from ...runtime.overlap import Written
from ...runtime.specs import Spec, views_of
from . import kv_cache, reference
from .cached import CACHES
from .cached_checks import NARROW, SCALES, WrittenCaches, check_scales

FUNCTION = "cache_append"
NEW = Spec(("rows", "heads", "head_dim"), strides=1)
PLACES = Spec(("rows",), "int32", optional=True)
SPECS = {
    "k": NEW,
    "v": NEW,
    "k_cache": Spec(
        ("num_pages", "page_size", "heads", "head_dim"), " or ".join(("like k", *NARROW)), 1
    ),
    "v_cache": Spec(("num_pages", "page_size", "heads", "head_dim"), "like k_cache", 1),
    "positions": PLACES,
    "page_table": Spec(("batch", "max_pages"), "int32", 1, optional=True),
    "sequences": PLACES,
    "slots": Spec(("rows",), "int64", optional=True),
    **SCALES,
}

_plans = Plans(wide=4)


def run(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[None, ...]:
    """`cache_append`; the arrays are those of `SPECS`."""
    if library.on_cpu(arrays[0]):
        written = _written(function, library, arrays)
        written.check([library.pointer(x) for x in arrays if x is not None])
        *new, k_cache, v_cache = arrays[:4]
        slots = _slots(function, library, arrays)
        reference.append(library, *new, (k_cache, v_cache), slots, arrays[-2:])
        return ()
    key, pointers = _plans.key(library, arrays, function)
    written = _plans.get(key)
    if written is None:
        written = _plans.add(key, _written(function, library, arrays))
    written.check([y for x, y in zip(arrays, pointers) if x is not None])
    if environment.current().debug:
        _slots(function, library, arrays)
    kv_cache.append(function, library, (*arrays[:8], None, *arrays[8:]))
    library.wrote(*arrays[2:4], *(x for x in arrays[-2:] if x is not None))
    return ()


def _written(function: str, library: Any, arrays: tuple[Array | None, ...]) -> Written:
    *_, positions, table, sequences, slots, _, _ = arrays
    others = [x is not None for x in (positions, table, sequences)]
    if any(others) if slots is not None else not others[0]:
        fact = "positions must be int32 (rows,), with or without sequences and a page_table, or "
        got = "both or neither" if slots is None or others[0] else "slots and a table or sequences"
        raise TypeError(f"{function}: {fact}slots alone int64 (rows,), got {got}")
    views = views_of(function, library, SPECS, arrays, plain=True)
    cache = views["k_cache"].shape
    written = [*CACHES, *(SCALES if check_scales(function, views, cache[:3]) else ())]
    if table is None and slots is None:
        return Written(function, views, written)
    return WrittenCaches(function, views, written, CACHES)


def _slots(function: str, library: Any, arrays: tuple[Array | None, ...]) -> numpy.ndarray:
    """The slot of each row, on the CPU.

    Raises:
        ValueError: a place that does not exist.
    """
    k, _, cache, _, positions, table, sequences, slots, *_ = arrays
    pages, size = cache.shape[:2]
    numbers = lambda x: numpy.asarray(library.to_list(x), "int64")  # noqa: E731
    if slots is not None:
        found = numbers(slots)
        _require_within(function, "slots", found, -1, pages * size)
        return found
    keys = numbers(positions)
    rows = numpy.arange(len(k)) if sequences is None else numbers(sequences)
    _require_within(function, "sequences", rows, 0, pages if table is None else len(table))
    _require_within(function, "positions", keys, 0, size * (1 if table is None else table.shape[1]))
    if table is not None:
        table = numbers(table).reshape(tuple(table.shape))
        rows = table[rows, keys // max(1, size)]
        _require_within(function, "page_table", rows, 0, pages)
        keys = keys % max(1, size)
    return rows * size + keys


def _require_within(function: str, name: str, x: numpy.ndarray, least: int, end: int) -> None:
    if x.size and not least <= x.min() <= x.max() < end:
        fact = f"{name} must be from {least} to {end - 1}"
        raise ValueError(f"{function}: {fact}, got {x.min()} to {x.max()}")
