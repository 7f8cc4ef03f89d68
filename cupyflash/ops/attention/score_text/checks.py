"""The checks of the text of a call: the options beside it, and the arrays that it reads."""

from collections.abc import Iterator, Mapping
from typing import Any

from ....runtime.array import View, device_name
from ....runtime.overlap import item_size
from .text import Text

MOST_STEPS = 2**31  # elements between neighbours of an axis, and bytes of the last one: 32 bits


def check_text(
    function: str,
    options: Any,
    extras: Mapping[str, View],
    captures: tuple[View | None, ...],
    q: View,
    places: Mapping[str, int],
) -> None:
    """Checks the text of the options with the arrays of this call.

    Args:
        captures: None for numbers.
        places: how many batches, heads, queries and keys there are, by the names in a text; those
            that are known without waiting for the GPU.

    Raises:
        TypeError: the dtype or rank of an array is not that of the text.
        ValueError: devices; strides that are too large; other scores beside that of the text; fewer
            elements than a place counts.
    """
    text = options.text
    for name, given in (
        ("softcap", options.softcap != 0),
        ("alibi_slopes", "alibi_slopes" in extras),
    ):
        if text.score and given:
            fact = f"{name} must be left out beside score=, which can say it itself"
            raise ValueError(f"{function}: {fact}, got both")
    for capture, view in zip(text.captures, captures, strict=True):
        if view is None:
            continue
        if (view.dtype, len(view.shape)) != (capture.dtype, capture.rank):
            fact = f"{capture.name} must be {capture.dtype} with {capture.rank} axes"
            raise TypeError(f"{function}: {fact}, got {view.dtype} {view.shape}")
        if view.device != q.device:
            devices = f"{device_name(view.device)} and q on {device_name(q.device)}"
            fact = f"{capture.name}, which the score or mask reads, must be on the device of q"
            raise ValueError(f"{function}: {fact}, got {capture.name} on {devices}")
        steps = [abs(x) for n, x in zip(view.shape, view.strides) if n > 1]
        if max(steps, default=0) >= MOST_STEPS:
            fact = f"the strides of {capture.name} must be less than {MOST_STEPS} elements"
            raise ValueError(f"{function}: {fact}, got {view.strides}")
        last = abs(view.strides[-1]) if view.shape and view.shape[-1] > 1 else 0
        if last * item_size(view.dtype) >= MOST_STEPS:
            fact = f"the last stride of {capture.name} must be less than {MOST_STEPS} bytes"
            raise ValueError(f"{function}: {fact}, got {last * item_size(view.dtype)}")
    shapes = {x.name: view.shape for x, view in zip(text.captures, captures) if view is not None}
    _check_sizes(function, text, shapes, places)


def _check_sizes(
    function: str, text: Text, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, int]
) -> None:
    """Raises ValueError where a place counts more elements than an array has."""
    for name, axis, place in _read_by_places(text):
        if shapes[name][axis] < places.get(place, 0):
            fact = f"axis {axis} of {name} must have at least {places[place]} elements"
            got = f"{shapes[name]}, where the text reads it by {place}"
            raise ValueError(f"{function}: {fact}, got {got}")


def _read_by_places(text: Text) -> Iterator[tuple[str, int, str]]:
    """(array, axis, name of the place) of each array that a place alone is an index of.

    Reads behind a condition are left out, since it may keep them inside of the array.
    """
    from .write import nodes  # imported when a call has a text

    for tree in (text.score_tree, text.mask_tree):
        for node in () if tree is None else nodes(tree, unconditional=True):
            for axis, index in enumerate(node.args if node.op == "capture" else ()):
                if index.op == "name":
                    yield node.value.name, axis, index.value
