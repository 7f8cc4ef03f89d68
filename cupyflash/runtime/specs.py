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

from .array import Array, View, device_name
from .checks import require_plain
from .config import ITEM_SIZE
from .lookup import library_of, refuse_tracer
from .rows import dense_like, is_contiguous

Axes = tuple[Any, ...]  # lengths, names, and ... for any number of dimensions
FLOATING = dict.fromkeys(ITEM_SIZE, "")
INTEGERS = {"int32", "int64"}


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
        note: what else an error about the shape should say of the axes.
    """

    axes: Axes | list[Axes]
    dtype: str = "like"
    strides: str | int = "contiguous"
    optional: bool = False
    instead: str = ""
    note: str = ""

    @property
    def choices(self) -> list[Axes]:
        """The shapes of which it must have one."""
        return self.axes if isinstance(self.axes, list) else [self.axes]


NO_SPECS: Mapping[str, Spec] = {}


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
    like = first[0] if first else next(iter(given))
    require_library(function, library, given, like, say, specs)
    if plain:
        require_plain(function, library, tuple(given.values()))
    views = {name: library.view(x) for name, x in given.items()}
    check_views(function, specs, views, first=first, say=say, **lengths)
    return views


def require_library(
    function: str,
    library: Any,
    arrays: Mapping[str, Any],
    like: str,
    say: Callable[[str], str] = str,
    specs: Mapping[str, Spec] = NO_SPECS,
) -> None:
    """Raises an error unless all arrays are of this library, as the one named ``like`` is."""
    for name, x in arrays.items():
        if library_of(x) is not library:
            refuse_tracer(function, x, say(name))
            instead = specs[name].instead if name in specs else ""
            allowed = f"{instead} or a {library.name}" if instead else f"a {library.name}"
            got = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
            fact = f"{say(name)} must be {allowed} like {say(like)}"
            got = got.removeprefix("builtins.")
            if isinstance(x, int | float | list | tuple):
                dtype = specs[name].dtype if name in specs else ""
                got += f" (write {_conversion(library.name, say(name), say(like), dtype)})"
            raise TypeError(f"{function}: {fact}, got {got}")


def _conversion(library: str, name: str, like: str, dtype: str) -> str:
    """Code that makes an array of a library of a list or a number."""
    if library == "torch.Tensor":
        dtype = f"dtype=torch.{dtype}, " if dtype in INTEGERS else ""
        return f"torch.tensor({name}, {dtype}device={like}.device)"
    dtype = f", dtype='{dtype}'" if dtype in INTEGERS else ""
    return f"{library.partition('.')[0]}.asarray({name}{dtype})"


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
    for name, spec in specs.items():
        if name in views:
            checks.check(name, spec, views[name])
    return checks.lengths


class _Checks:
    """The checks of the arrays of one call, one array after the other.

    Attributes:
        lengths: of the axes that are known so far, by name, and those of `...` together.
        ranges: of other axes.
        seen: the arrays that were checked, and the one that is being checked.
        first: the name of the first of them.
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
        self.first = next(iter(seen), "")

    def check(self, name: str, spec: Spec, view: View) -> None:
        """Raises an error if the array is not what its spec says."""
        self.seen[name], self.first = view, self.first or name
        self._dtype(name, spec.dtype, view.dtype)
        if view.device != self.seen[self.first].device or not isinstance(view.device, int):
            self._refuse_device(name, view.device)
        self._shape(name, spec, view.shape)
        if spec.strides != "free" and 0 not in view.shape:
            self._strides(name, spec.strides, view)

    def _dtype(self, name: str, words: str, dtype: str) -> None:
        if words == "like" and dtype == self.seen[self.first].dtype and dtype in FLOATING:
            return
        allowed: dict[str, str] = {}  # key: a dtype; value: the name of an array that has it
        for word in words.split(" or "):
            like = word[5:] or self.first
            if word == "narrower":
                allowed = FLOATING if "float32" in allowed else allowed
            elif not word.startswith("like"):
                allowed.setdefault(word, "")
            elif like == name:
                allowed = FLOATING
            else:
                allowed[self.seen[like].dtype] = like
        if dtype not in allowed:
            texts = [f"{x} like {self.say(like)}" if like else x for x, like in allowed.items()]
            fact = " or ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)
            got = dtype
            if dtype in INTEGERS and (wanted := INTEGERS & allowed.keys()):
                got += f" (write {self.say(name)}.to(torch.{min(wanted)}), or .astype"
                got += f"('{min(wanted)}') of CuPy and NumPy)"
            raise TypeError(f"{self.function}: {self.say(name)} must be {fact}, got {got}")

    def _refuse_device(self, name: str, device: int | str) -> None:
        fact, got = f"{self.say(name)} must be on a CPU or a CUDA device", device
        if isinstance(device, int):
            fact = "all arrays must be on the same device"
            got = f"{self.say(self.first)} on device {device_name(self.seen[self.first].device)}"
            got += f" and {self.say(name)} on device {device_name(device)}"
        raise ValueError(f"{self.function}: {fact}, got {got}")

    def _shape(self, name: str, spec: Spec, shape: tuple[int, ...]) -> None:
        """Compares the lengths that are known, and learns the others."""
        for choice in spec.choices:
            learned = self._match(choice, shape)
            if learned is not None:
                break
        else:
            here = " or ".join(_text(choice, self.lengths) for choice in spec.choices)
            names = " or ".join(_text(choice, {}) for choice in spec.choices)
            fact = f"{self.say(name)} must have shape {here}" + f" for {names}" * (here != names)
            fact += f" {spec.note}" * bool(spec.note)
            beside = "".join(f" beside {self.say(x)} {y.shape}" for x, y in self._related(name))
            raise ValueError(f"{self.function}: {fact}, got {shape}{beside}")
        for axis, length in learned.items():
            if axis in self.ranges and length not in self.ranges[axis]:
                allowed = self.ranges[axis]
                multiple = f"a multiple of {allowed.step} " * (allowed.step > 1)
                fact = f"{axis} of {self.say(name)} must be {multiple}from {allowed[0]} to"
                got = f"{length} in {_text(choice, {})} = {shape}"
                raise ValueError(f"{self.function}: {fact} {allowed[-1]}, got {got}")
            self.lengths[axis] = length

    def _match(self, axes: Axes, shape: tuple[int, ...]) -> dict[Any, Any] | None:
        """The lengths of axes that were not known, or None if the shape does not fit."""
        learned: dict[Any, Any] = {}
        if ... in axes:
            place, more = axes.index(...), max(0, len(shape) - len(axes) + 1)
            rest = self.lengths.get(...)
            if rest is None:
                rest = learned[...] = shape[place : place + more]
            axes = (*axes[:place], *rest, *axes[place + 1 :])
        if len(axes) != len(shape):
            return None
        for axis, length in zip(axes, shape):
            if isinstance(axis, str):
                known = self.lengths if axis in self.lengths else learned
                axis = known.setdefault(axis, length)
            if axis != length:
                return None
        return learned

    def _related(self, name: str) -> Iterator[tuple[str, View]]:
        """The arrays before this one that have a named axis in common with it."""
        named = lambda x: {  # noqa: E731
            axis for choice in self.specs[x].choices for axis in choice if not isinstance(axis, int)
        }
        for other, view in self.seen.items():
            if other != name and other in self.specs and named(other) & named(name):
                yield other, view

    def _strides(self, name: str, strides: str | int, view: View) -> None:
        if strides == "dense":
            expected = dense_like(self.seen[self.first])
            fits = all(a == b for a, b, n in zip(view.strides, expected, view.shape) if n > 1)
            fact = "{} must be dense" + ", with the strides of {}" * (name != self.first)
        else:
            rank = len(view.shape)
            last = rank if strides == "contiguous" else strides
            fits = is_contiguous(view, last)
            fact = "{} must be contiguous"
            if last < rank:
                rows = f"{fact} in each row, which is its last {last} dimensions"
                fact = f"the last dimension of {fact}" if last == 1 else rows
        if not fits:
            fact = fact.format(self.say(name), self.say(self.first))
            raise ValueError(f"{self.function}: {fact}, got strides {view.strides}")


def _text(axes: Axes, known: Mapping[Any, Any]) -> str:
    """A shape, with the lengths that are known instead of the names of their axes."""
    parts: list[Any] = []
    for axis in axes:
        parts += known.get(..., ["..."]) if axis is ... else [known.get(axis, axis)]
    return f"({', '.join(map(str, parts))}{',' * (len(parts) == 1)})"
