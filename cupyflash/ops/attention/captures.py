"""The captures of a text of the caller's own, as the kernels get them: in front of the arguments.

`Captures` of the generated header and this module lay them out alike: an array is its address and
its strides in bytes, a number has 8 bytes, and the whole is filled up to a multiple of 64 bytes,
so that tensor maps behind it stay aligned. ``cuda_src/attention/text/captures.cuh`` has the types.
"""

import struct
from collections.abc import Sequence
from typing import Any

from ...runtime.array import View
from ...runtime.overlap import item_size

ALIGNMENT = 64
NUMBERS = {"float": "f4x", "int": "i4x"}  # what Python numbers are packed as, by their dtype


def size_of(text: Any) -> int:
    """Bytes of the captures of a `Text`."""
    return struct.calcsize(_format(text))


def _format(text: Any) -> str:
    parts = [NUMBERS.get(x.dtype, f"Q{x.rank}q") for x in text.captures]
    size = struct.calcsize(f"={''.join(parts)}")
    return f"={''.join(parts)}{-size % ALIGNMENT}x"


def byte_strides(capture: Any, view: View | None) -> tuple[int, ...]:
    """The strides of an array in bytes; () for a number."""
    if view is None or capture.dtype in NUMBERS:
        return ()
    return tuple(step * item_size(capture.dtype) for step in view.strides)


class PackedCaptures:
    """Packs the captures of the calls of one plan, whose arrays have these views.

    Args:
        views: in the order of the captures of the text; what stands for a number is not read.
    """

    def __init__(self, text: Any, views: Sequence[View | None]) -> None:
        self.pack = struct.Struct(_format(text)).pack
        self.strides = tuple(map(byte_strides, text.captures, views))

    def __call__(self, values: Sequence[int | float]) -> bytes:
        """The bytes for these addresses and numbers, in the same order."""
        return self.pack(*(x for value, of in zip(values, self.strides) for x in (value, *of)))
