"""What calls with one mask share on a GPU: which of its tiles are empty or full."""

import weakref
from typing import Any

from ....runtime.operation import Carried
from ....runtime.scratch import hold_memory, is_capturing, stream_number


class FoundTiles(Carried):
    """The bits of the tiles of one mask, by the kernels and the streams that have found them.

    A call gets it behind the captures of its mask, finds the bits that are missing, and leaves them
    here. A launch on another stream may run before those that find them, and in a CUDA graph they
    are found where that runs, so such bits are of no use to others.
    """

    def __init__(self) -> None:
        self.of_kernel: dict[tuple, dict[int, tuple[Any, bytes]]] = {}  # by `stream_number`
        self.parts: weakref.WeakKeyDictionary[Any, FoundTiles] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple:
        """A copy, also one in another process, finds its own: bits are known by their address."""
        return FoundTiles, ()

    def of(self, part: Any) -> "FoundTiles":
        """The tiles of a part of the queries and keys, kept as long as ``part`` lives."""
        return self.parts.setdefault(part, FoundTiles())

    def get(self, kernel: tuple, stream: int) -> tuple[Any, bytes] | None:
        """(their memory, what a kernel gets) for a launch on a stream (its pointer), or None.

        A graph that the stream records gets what was found before it, and holds its memory.
        """
        found = self.of_kernel.get(kernel, {})
        if not is_capturing(stream):
            return found.get(stream_number(stream))
        bits = next(iter(found.values()), None)
        if bits is not None:
            hold_memory(stream, bits[0])
        return bits

    def put(self, kernel: tuple, stream: int, bits: tuple[Any, bytes]) -> None:
        """Keep what a launch on this stream finds."""
        if not is_capturing(stream):
            self.of_kernel.setdefault(kernel, {})[stream_number(stream)] = bits
