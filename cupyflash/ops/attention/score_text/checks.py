"""The checks of the text of a call: the options beside it, and the arrays that it reads."""

from collections.abc import Mapping
from typing import Any

from ....runtime.array import View, device_name
from ....runtime.overlap import item_size

MOST_STEPS = 2**31  # elements between neighbours of an axis, and bytes of the last one: 32 bits


def check_text(
    function: str,
    options: Any,
    extras: Mapping[str, View],
    captures: tuple[View | None, ...],
    q: View,
) -> None:
    """Checks the text of the options with the arrays of this call.

    Args:
        captures: None for numbers.

    Raises:
        TypeError: the dtype or rank of an array is not that of the text.
        ValueError: devices; strides that are too large; other scores beside that of the text.
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
