"""What calls with one mask share on a GPU: which of its tiles are empty or full."""

import weakref
from typing import Any

from ....runtime.operation import Carried


class FoundTiles(Carried):
    """The bits of the tiles of one mask, by the kernels that have found them.

    A call gets it behind the captures of its mask, finds the bits that are missing, and leaves them
    here.
    """

    def __init__(self) -> None:
        self.of_kernel: dict[tuple, Any] = {}
        self.parts: weakref.WeakKeyDictionary[Any, FoundTiles] = weakref.WeakKeyDictionary()

    def of(self, part: Any) -> "FoundTiles":
        """The tiles of a part of the queries and keys, kept as long as ``part`` lives."""
        return self.parts.setdefault(part, FoundTiles())
