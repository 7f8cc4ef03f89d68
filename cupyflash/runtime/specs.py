"""Declarations of the arrays of a call, and the check that they are what was declared.

Each topic declares its arrays once, by name, in the order of its arguments::

    SPECS = {
        "x": Spec((..., "columns"), strides="free"),
        "weight": Spec(("columns",), "like x or float32", optional=True),
    }
    views = views_of("rms_norm", library, SPECS, (x, weight), columns=range(1, MAX_COLUMNS))

Whatever relates two arrays is in the names: of axes, and of the arrays that another is like.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .array import Array, View, device_name, library_of
from .checks import require_plain
from .config import ITEM_SIZE
from .rows import dense_like, is_contiguous

Axes = tuple[Any, ...]  # lengths, names, and ... for any number of dimensions


class Spec(NamedTuple):
    """An array of a call, as it must be.

    Attributes:
        axes: the length of each dimension, or its name: dimensions of one name have one length,
            and `...` stands for the same dimensions everywhere. A list of such tuples: any of them.
        dtype: words with " or " between them: a dtype; "like NAME", the dtype of an array that
            stands before; "like", that of the first, which is itself of any floating-point dtype;
            "narrower", any floating-point dtype beside one of float32.
        strides: "contiguous"; how many of the last dimensions are; "free"; or "dense", without gaps
            and with the axes in memory in the order of those of the first array.
        optional: the array may be None.
        instead: the argument may be this instead of an array, for errors.
    """

    axes: Axes | list[Axes]
    dtype: str = "like"
    strides: str | int = "contiguous"
    optional: bool = False
    instead: str = ""


def views_of(
    function: str,
    library: Any,
    specs: Mapping[str, Spec],
    arrays: Sequence[Array | None],
    *,
    first: tuple[str, View] | None = None,
    say: Callable[[str], str] = str,
    plain: bool = False,
    **lengths: int | range,
) -> dict[str, View]:
    """Views of the arrays that are there, if each of them is what its spec says.

    Args:
        arrays: in the order of the specs.
        plain: nothing in torch may follow what is done to the arrays.
        first, say, lengths: as for `check_views`.

    Raises:
        TypeError: libraries, dtypes, None where an array is needed.
        ValueError: devices, shapes, strides.
        NotImplementedError: gradients, transforms, tensors without memory.
    """
    given = {
        name: x
        for (name, spec), x in zip(specs.items(), arrays, strict=True)
        if x is not None or not spec.optional
    }
    like = say(first[0] if first else next(iter(given)))
    for name, x in given.items():
        require_library(function, library, say(name), x, like, specs[name].instead)
    if plain:
        require_plain(function, library, tuple(given.values()))
    views = {name: library.view(x) for name, x in given.items()}
    check_views(function, specs, views, first=first, say=say, **lengths)
    return views


def require_library(
    function: str, library: Any, name: str, x: Any, like: str, instead: str = ""
) -> None:
    """Raises TypeError unless an array is of the library of the array named ``like``."""
    if library_of(x) is not library:
        got = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}".removeprefix("builtins.")
        allowed = f"{instead} or a {library.name}" if instead else f"a {library.name}"
        raise TypeError(f"{function}: {name} must be {allowed} like {like}, got {got}")


def check_views(
    function: str,
    specs: Mapping[str, Spec],
    views: Mapping[str, View],
    *,
    first: tuple[str, View] | None = None,
    say: Callable[[str], str] = str,
    **lengths: int | range,
) -> dict[Any, Any]:
    """The lengths of all named axes, if each array is what its spec says.

    Args:
        first: the name and view of the array that the others are like; default that of ``views``.
        say: returns the name of an array for errors.
        lengths: of axes by name: those that are known beforehand, or the range of those that are
            not.

    Raises:
        As `views_of`.
    """
    ranges = {axis: length for axis, length in lengths.items() if isinstance(length, range)}
    known: dict[Any, Any] = {axis: n for axis, n in lengths.items() if axis not in ranges}
    seen = {} if first is None else {first[0]: first[1]}
    for name, view in views.items():
        spec, called = specs[name], say(name)
        seen.setdefault(name, view)
        like = next(iter(seen))
        _check_dtype(function, name, spec.dtype, seen, say)
        if not isinstance(view.device, int):
            fact = f"{called} must be on a CPU or a CUDA device"
            raise ValueError(f"{function}: {fact}, got {view.device}")
        if view.device != seen[like].device:
            here, there = device_name(seen[like].device), device_name(view.device)
            where = f"{say(like)} on device {here} and {called} on device {there}"
            raise ValueError(f"{function}: all arrays must be on the same device, got {where}")
        known = _check_shape(function, called, view.shape, spec.axes, known, ranges)
        _check_strides(function, called, view, spec.strides, (say(like), seen[like]))
    return known


def _check_dtype(
    function: str, name: str, words: str, seen: Mapping[str, View], say: Callable[[str], str]
) -> None:
    """The dtype of the array of this name, the last of those that were seen."""
    allowed: dict[str, str] = {}  # the dtypes, as the error says them
    anything = dict(zip(ITEM_SIZE, ITEM_SIZE))
    for word in words.split(" or "):
        like = word.removeprefix("like").strip() or next(iter(seen))
        if word == "narrower":
            allowed = anything if "float32" in allowed else allowed
        elif not word.startswith("like"):
            allowed.setdefault(word, word)
        elif like == name:
            allowed |= anything
        else:
            allowed[seen[like].dtype] = f"{seen[like].dtype} like {say(like)}"
    if seen[name].dtype not in allowed:
        *most, last = allowed.values()
        fact = (
            f"{say(name)} must be {', '.join(most)} or {last}"
            if most
            else f"{say(name)} must be {last}"
        )
        raise TypeError(f"{function}: {fact}, got {seen[name].dtype}")


def _check_shape(
    function: str,
    name: str,
    shape: tuple[int, ...],
    axes: Axes | list[Axes],
    known: dict[Any, Any],
    ranges: Mapping[str, range],
) -> dict[Any, Any]:
    """The lengths that are known, with those of the axes of this array."""
    possible = axes if isinstance(axes, list) else [axes]
    for choice in possible:
        lengths = _match(choice, shape, known)
        if lengths is not None:
            break
    else:
        here = " or ".join(_text(choice, known) for choice in possible)
        names = " or ".join(_text(choice, {}) for choice in possible)
        fact = f"{name} must have shape {here}" + f" for {names}" * (here != names)
        raise ValueError(f"{function}: {fact}, got {shape}")
    for axis in lengths.keys() & ranges.keys() - known.keys():
        if lengths[axis] not in ranges[axis]:
            step, end = ranges[axis].step, ranges[axis][-1]
            allowed = f"a multiple of {step} " * (step > 1) + f"from {ranges[axis].start} to {end}"
            fact = f"{axis} of {name} {_text(choice, {})} must be {allowed}"
            raise ValueError(f"{function}: {fact}, got {shape}")
    return lengths


def _match(axes: Axes, shape: tuple[int, ...], known: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """The known lengths with those of a shape, or None if the shape does not fit."""
    lengths = dict(known)
    if ... in axes:
        place, more = axes.index(...), max(0, len(shape) - len(axes) + 1)
        rest = lengths.setdefault(..., shape[place : place + more])
        axes = (*axes[:place], *rest, *axes[place + 1 :])
    if len(axes) != len(shape):
        return None
    fits = (
        n == (lengths.setdefault(x, n) if isinstance(x, str) else x) for x, n in zip(axes, shape)
    )
    return lengths if all(fits) else None


def _text(axes: Axes, known: Mapping[Any, Any]) -> str:
    """A shape, with the lengths that are known instead of the names of their axes."""
    parts = [
        part for x in axes for part in (known.get(x, ("...",)) if x is ... else (known.get(x, x),))
    ]
    return f"({', '.join(map(str, parts))}{',' * (len(parts) == 1)})"


def _check_strides(
    function: str, name: str, view: View, strides: str | int, first: tuple[str, View]
) -> None:
    rank = len(view.shape)
    if strides == "free" or 0 in view.shape:
        return
    if strides == "dense":
        like, expected = first[0], dense_like(first[1])
        if all(a == b for a, b, size in zip(view.strides, expected, view.shape) if size > 1):
            return
        fact = f"{name} must be dense" + f", with the strides of {like}" * (name != like)
    else:
        last = rank if strides == "contiguous" else strides
        part = View(view.shape[rank - last :], view.strides[rank - last :], "", 0)
        if not last or is_contiguous(part):
            return
        fact = f"{name} must be contiguous"
        if last < rank:
            fact = f"the last dimension of {name} must be contiguous"
            if last > 1:
                fact = f"{name} must be contiguous in each row, which is its last {last} dimensions"
    raise ValueError(f"{function}: {fact}, got strides {view.strides}")
