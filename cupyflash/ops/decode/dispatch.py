"""The way from the arrays of a call with a cache to the plan that computes it, or to the CPU."""

from typing import Any, NamedTuple

from ... import environment
from ...runtime.array import Array, View
from ...runtime.operation import Plans
from ...runtime.overlap import Written
from . import reference
from .cached import ARRAYS, CACHES, CachedOptions, CachedShape
from .cached_checks import SCALES, WrittenCaches, check, check_values, name_of
from .plans import decode_plan
from .steps import AppendsBefore, StepsPlan

SINKS, OUT = ARRAYS.index("sinks"), ARRAYS.index("out")

_plans = Plans(wide=5)


class _Prepared(NamedTuple):
    """What calls of one signature share."""

    shape: CachedShape
    options: CachedOptions
    written: Written
    plan: Any


def run(
    function: str,
    library: Any,
    arrays: tuple[Array | None, ...],
    options: tuple[CachedOptions, int | None, bool],
) -> tuple[Array, Array | None]:
    """(out, lse) of arrays of one library; ``arrays`` are those of `ARRAYS`."""
    if library.on_cpu(arrays[0]):
        shape, found, views = check(function, library, arrays, *options)
        given = [library.pointer(x) for x in arrays if x is not None]
        _written(function, shape, views).check(given)
        check_values(function, library, arrays, shape, found)
        out, lse = reference.attention_with_cache(library, arrays, shape, found)
        return out, lse if found.return_lse else None
    settings = environment.current()
    key, pointers = _plans.key(library, arrays, (function, options, settings.backend))
    aligned = key is not None and key[-1] and pointers[OUT] % 16 == 0
    key = key and (*key, aligned)
    prepared = _plans.get(key)
    if prepared is None:
        prepared = _prepare(function, library, arrays, options, aligned)
        _plans.add(key, prepared)
    prepared.written.check([y for x, y in zip(arrays, pointers) if x is not None])
    if settings.debug:
        check_values(function, library, arrays, prepared.shape, prepared.options)
    if arrays[SINKS] is not None:
        sinks = library.float32(arrays[SINKS])
        arrays = (*arrays[:SINKS], sinks, *arrays[SINKS + 1 :])
        pointers[SINKS] = library.pointer(sinks)
    results = prepared.plan(arrays, pointers)
    library.wrote(*_changed(arrays, prepared.shape))
    return results


def _prepare(
    function: str,
    library: Any,
    arrays: tuple[Array | None, ...],
    options: tuple[CachedOptions, int | None, bool],
    aligned: bool,
) -> _Prepared:
    shape, found, views = check(function, library, arrays, *options)
    shape = shape._replace(aligned=aligned)
    plan = plan_of(function, library, shape, found, views)
    return _Prepared(shape, found, _written(function, shape, views), plan)


def plan_of(
    function: str,
    library: Any,
    shape: CachedShape,
    options: CachedOptions,
    views: dict[str, View],
) -> Any:
    """The plan of a checked call on a GPU, which is called with its arrays and their pointers."""
    if shape.new_keys is not None:
        rest = shape._replace(appends=False, counted=False, new_keys=None)
        others = {name: x for name, x in views.items() if name not in ("k", "v")}
        plan = plan_of(function, library, rest, options, others)
        return AppendsBefore(function, library, shape.new_keys, plan)
    plan = decode_plan(library, shape, options, views)
    return plan or StepsPlan(function, library, shape, options, views)


def _written(function: str, shape: CachedShape, views: dict[str, Any]) -> Written:
    """The arrays that the call writes, under the names of the caller."""
    written = [*(CACHES if shape.appends else ()), *({"out"} & views.keys())]
    written += SCALES if shape.appends and shape.computes_scales else ()
    say = {name: name_of(function, name) for name in views}
    views, written = {say[name]: x for name, x in views.items()}, [say[name] for name in written]
    if "page_table" in say:
        return WrittenCaches(function, views, written, (say[CACHES[0]], say[CACHES[1]]))
    return Written(function, views, written)


def _changed(arrays: tuple[Array | None, ...], shape: CachedShape) -> list[Array]:
    call = dict(zip(ARRAYS, arrays))
    names = (*((*CACHES, *SCALES) if shape.appends else ()), "out")
    return [call[name] for name in names if call[name] is not None]
