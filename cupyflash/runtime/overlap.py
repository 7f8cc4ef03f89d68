"""Refuses calls in which an array that is written shares memory with another array.

If one block of a kernel reads memory that another block writes, the results depend on the order of
the blocks. All that depends on shapes and strides is computed once; a call only compares addresses.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy

from .array import View
from .config import ITEM_SIZE

MAX_VERDICTS = 1024  # results kept, since the distances of arrays may change with each call
MAX_WORK = 10**5  # candidates that numpy.shares_memory tries; beyond them memory counts as shared


class Written:
    """The arrays of all calls of one signature, some of which are written.

    Args:
        function: the name of the function in errors.
        views: views of all arrays, in the order of the pointers that `check` gets.
        written: names of the arrays that the call writes.

    Raises:
        ValueError: two elements of a written array may share memory.
    """

    def __init__(self, function: str, views: Mapping[str, View], written: Collection[str]) -> None:
        self.function, self.names, self.views = function, tuple(views), tuple(views.values())
        for name in written:
            if may_overlap_itself(views[name]):
                fact = f"{name} is written, so no two of its elements may share memory"
                raise ValueError(
                    f"{function}: {fact}, got {views[name].shape}, strides {views[name].strides}"
                )
        self.verdicts: dict[tuple[int, int, int], bool] = {}
        spans = [span(view) for view in self.views]
        self.pairs = [
            (i, j, spans[i][0] - spans[j][1], spans[i][1] - spans[j][0])
            for i, name in enumerate(self.names)
            for j, other in enumerate(self.names)
            if i != j and name in written and (i < j or other not in written)
        ]

    def check(self, pointers: Sequence[int]) -> None:
        """Raises ValueError if an array that is written shares memory with another one; 1 µs."""
        for i, j, low, high in self.pairs:
            if low < pointers[j] - pointers[i] < high:
                self._check_pair(i, j, pointers[j] - pointers[i])

    def _check_pair(self, i: int, j: int, distance: int) -> None:
        shared = self.verdicts.get((i, j, distance))
        if shared is None:
            shared = share_memory(self.views[i], self.views[j], distance)
            if len(self.verdicts) >= MAX_VERDICTS:
                self.verdicts.clear()
            self.verdicts[i, j, distance] = shared
        if shared:
            fact = f"{self.names[i]} is written, so it must share no memory with {self.names[j]}"
            raise ValueError(f"{self.function}: {fact}, got arrays that overlap")


def item_size(dtype: str) -> int:
    """The number of bytes of an element."""
    if dtype.startswith("float8"):  # NumPy knows it where ml_dtypes is imported alone
        return 1
    return ITEM_SIZE.get(dtype) or numpy.dtype(dtype).itemsize


def span(view: View) -> tuple[int, int]:
    """The first byte and the end of a view's memory, from its pointer; (0, 0) if it is empty."""
    if 0 in view.shape:
        return 0, 0
    item = item_size(view.dtype)
    steps = [(n - 1) * step * item for n, step in zip(view.shape, view.strides)]
    return sum(x for x in steps if x < 0), sum(x for x in steps if x > 0) + item


def may_overlap_itself(view: View) -> bool:
    """Whether two elements may share memory.

    They do not if each axis steps over all that the axes with smaller strides reach.
    """
    if 0 in view.shape:
        return False
    reach = 1
    for step, size in sorted((abs(y), n) for n, y in zip(view.shape, view.strides) if n > 1):
        if step < reach:
            return True
        reach += (size - 1) * step
    return False


def share_memory(first: View, second: View, distance: int) -> bool:
    """Whether some byte belongs to both.

    Args:
        distance: bytes from the pointer of the first to that of the second.
    """
    base = 2**48  # any address will do, because NumPy computes with it but reads nothing
    arrays = [numpy.asarray(_At(view, base + at)) for view, at in ((first, 0), (second, distance))]
    try:
        return numpy.shares_memory(*arrays, max_work=MAX_WORK)
    except RuntimeError:  # numpy's TooHardError
        return True


class _At:
    """Presents a view at any address to NumPy as an array."""

    def __init__(self, view: View, address: int) -> None:
        item = item_size(view.dtype)
        self.__array_interface__ = {
            "data": (address, False),
            "shape": view.shape,
            "strides": tuple(step * item for step in view.strides),
            "typestr": f"|V{item}",
            "version": 3,
        }
