"""Declarations of the arrays of a call, and the check that they are what was declared.

Each topic declares its arrays once, by name, in the order of its arguments::

    SPECS = {
        "x": Spec((..., "columns"), strides="free"),
        "weight": Spec(("columns",), "like x or float32", optional=True),
    }
    views = views_of("rms_norm", library, SPECS, (x, weight), columns=range(1, MAX_COLUMNS))

Whatever relates two arrays is in the names: of axes, and of the arrays that another is like.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

    @property
    def choices(self) -> list[Axes]:
        """The shapes of which it must have one."""
        return self.axes if isinstance(self.axes, list) else [self.axes]


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
        views: of arrays that have a spec each. The order is that of the specs.
        first: the name and view of the array that the others are like; default the first of them.
        say: returns the name of an array for errors.
        lengths: of axes by name: those that are known beforehand, or the range of one that is not.

    Raises:
        As `views_of`.
    """
    checks = _Checks(function, specs, say, lengths, {} if first is None else dict([first]))
    for name in specs:
        if name in views:
            checks.seen.setdefault(name, views[name])
            checks.dtype(name)
            checks.device(name)
            checks.shape(name)
            checks.strides(name)
    return checks.lengths


class _Checks:
    """The checks of the arrays of one call, one array after the other.

    Attributes:
        lengths: of the axes that are known so far, by name, and those of `...` together.
        ranges: of other axes.
        seen: the arrays that were checked, and the one that is being checked.
    """

    def __init__(
        self,
        function: str,
        specs: Mapping[str, Spec],
        say: Callable[[str], str],
        lengths: Mapping[str, int | range],
        seen: dict[str, View],
    ) -> None:
        self.function, self.specs, self.say, self.seen = function, specs, say, seen
        self.ranges = {x: allowed for x, allowed in lengths.items() if isinstance(allowed, range)}
        self.lengths = {x: n for x, n in lengths.items() if x not in self.ranges}

    @property
    def first(self) -> str:
        return next(iter(self.seen))

    def dtype(self, name: str) -> None:
        allowed: dict[str, str] = {}  # the dtypes, as the error says them
        anything, dtype = dict(zip(ITEM_SIZE, ITEM_SIZE)), self.seen[name].dtype
        for word in self.specs[name].dtype.split(" or "):
            like = word.removeprefix("like").strip() or self.first
            if word == "narrower":
                allowed = anything if "float32" in allowed else allowed
            elif not word.startswith("like"):
                allowed.setdefault(word, word)
            elif like == name:
                allowed |= anything
            else:
                allowed[self.seen[like].dtype] = f"{self.seen[like].dtype} like {self.say(like)}"
        if dtype not in allowed:
            *most, last = allowed.values()
            last = f"{', '.join(most)} or {last}" if most else last
            raise TypeError(f"{self.function}: {self.say(name)} must be {last}, got {dtype}")

    def device(self, name: str) -> None:
        device, expected = self.seen[name].device, self.seen[self.first].device
        if not isinstance(device, int):
            fact = f"{self.say(name)} must be on a CPU or a CUDA device"
            raise ValueError(f"{self.function}: {fact}, got {device}")
        if device != expected:
            where = f"{self.say(self.first)} on device {device_name(expected)}"
            where += f" and {self.say(name)} on device {device_name(device)}"
            fact = "all arrays must be on the same device"
            raise ValueError(f"{self.function}: {fact}, got {where}")

    def shape(self, name: str) -> None:
        """Compares the lengths that are known, and learns the others."""
        spec, shape = self.specs[name], self.seen[name].shape
        matches = (_match(choice, shape, self.lengths) for choice in spec.choices)
        lengths = next((x for x in matches if x is not None), None)
        if lengths is None:
            here = " or ".join(_text(choice, self.lengths) for choice in spec.choices)
            names = " or ".join(_text(choice, {}) for choice in spec.choices)
            fact = f"{self.say(name)} must have shape {here}" + f" for {names}" * (here != names)
            got = [
                str(shape),
                *(f"{self.say(x)} {self.seen[x].shape}" for x in self._related(name)),
            ]
            raise ValueError(f"{self.function}: {fact}, got {' beside '.join(got)}")
        for axis in lengths.keys() & self.ranges.keys() - self.lengths.keys():
            allowed = self.ranges[axis]
            if lengths[axis] not in allowed:
                multiple = f"a multiple of {allowed.step} " * (allowed.step > 1)
                fact = f"{axis} of {self.say(name)} {_text(spec.choices[0], {})} must be {multiple}"
                fact += f"from {allowed[0]} to {allowed[-1]}"
                raise ValueError(f"{self.function}: {fact}, got {shape}")
        self.lengths = lengths

    def _related(self, name: str) -> Iterator[str]:
        """The arrays before this one that have a named axis in common with it."""
        named = lambda x: {  # noqa: E731
            axis for choice in self.specs[x].choices for axis in choice if not isinstance(axis, int)
        }
        for other in self.seen:
            if other != name and other in self.specs and named(other) & named(name):
                yield other

    def strides(self, name: str) -> None:
        view, kind = self.seen[name], self.specs[name].strides
        rank = len(view.shape)
        if kind == "free" or 0 in view.shape:
            return
        called, first = self.say(name), self.say(self.first)
        if kind == "dense":
            expected = dense_like(self.seen[self.first])
            fits = all(a == b for a, b, n in zip(view.strides, expected, view.shape) if n > 1)
            fact = f"{called} must be dense" + f", with the strides of {first}" * (called != first)
        else:
            last = rank if kind == "contiguous" else min(rank, kind)
            rows = View(view.shape[rank - last :], view.strides[rank - last :], "", 0)
            fits = not last or is_contiguous(rows)
            fact = f"{called} must be contiguous"
            if last < rank:
                fact = f"the last dimension of {called} must be contiguous"
            if 1 < last < rank:
                fact = (
                    f"{called} must be contiguous in each row, which is its last {last} dimensions"
                )
        if not fits:
            raise ValueError(f"{self.function}: {fact}, got strides {view.strides}")


def _match(axes: Axes, shape: tuple[int, ...], known: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """The known lengths with those of a shape, or None if the shape does not fit."""
    lengths = dict(known)
    if ... in axes:
        place, more = axes.index(...), max(0, len(shape) - len(axes) + 1)
        rest = lengths.setdefault(..., shape[place : place + more])
        axes = (*axes[:place], *rest, *axes[place + 1 :])
    if len(axes) != len(shape):
        return None
    wanted = (lengths.setdefault(x, n) if isinstance(x, str) else x for x, n in zip(axes, shape))
    return lengths if all(n == m for n, m in zip(shape, wanted)) else None


def _text(axes: Axes, known: Mapping[Any, Any]) -> str:
    """A shape, with the lengths that are known instead of the names of their axes."""
    parts: list[Any] = []
    for axis in axes:
        parts += known.get(..., ["..."]) if axis is ... else [known.get(axis, axis)]
    return f"({', '.join(map(str, parts))}{',' * (len(parts) == 1)})"
