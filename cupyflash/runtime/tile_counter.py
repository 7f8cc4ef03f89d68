"""Counters from which persistent blocks take their tiles (``next_tile_index`` in tile_order.cuh).

Or by which the blocks of a launch know who is the last (last_block.cuh). A launch gets `COUNTERS`
of them. They are 0 between launches, so launches may share them as long as they follow each other,
as those on one stream do. A launch captured into a CUDA graph may run beside anything later, so it
has its own as long as the graph exists.
"""

import functools
import struct
import threading
from typing import Any

from .array import Array
from .graph_memory import is_capturing, when_graph_is_gone

POOL_SIZE = 8192  # launches on a device that have their own
COUNTERS = 64  # of a launch, next to each other: most use the first only
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one name for many streams
pack_pointer = struct.Struct("Q").pack
NULL = pack_pointer(0)  # blocks without a counter take turns


class TileCounters:
    """The counters of one device; looked up by stream, as the bytes of their address."""

    def __init__(self, device: int) -> None:
        import cupy

        self.current_stream = cupy.cuda.get_current_stream
        with cupy.cuda.Device(device):
            self.pool = cupy.zeros(POOL_SIZE * COUNTERS, cupy.int32)
            cupy.cuda.get_current_stream().synchronize()  # before any other stream counts
        # The numbers that nobody has; pop() and append() are one step, whatever other threads do.
        self.numbers = list(reversed(range(POOL_SIZE)))
        self.of_stream: dict[Any, bytes] = {}

    def __call__(self, stream: Any) -> bytes:
        """The counter for a launch on ``stream``, or on CuPy's current one if it is None."""
        pointer = self._pointer(stream)
        if is_capturing(pointer):
            return self._captured(pointer)
        key = pointer
        if pointer == _PER_THREAD_STREAM:
            key = pointer, threading.get_ident()
        found = self.of_stream.get(key)
        return self.of_stream.setdefault(key, self._new()) if found is None else found

    def address(self, stream: Any, library: Any, like: Array) -> tuple[int, Array | None]:
        """The counters of a launch that cannot do without, and what has to live until it is queued.

        Where CUDA graphs have taken all of them it is an array of its own, made by ``library`` on
        the device of ``like``.
        """
        counters = int.from_bytes(self(stream), "little")
        if counters:
            return counters, None
        own = library.zeros_int32(COUNTERS, like)
        return library.pointer(own), own

    def is_capturing(self, stream: Any) -> bool:
        """Whether a launch on ``stream``, or on CuPy's current one, becomes part of a graph."""
        return is_capturing(self._pointer(stream))

    def _pointer(self, stream: Any) -> int:
        return (stream or self.current_stream()).ptr

    def _new(self) -> bytes:
        try:
            return self._at(self.numbers.pop())
        except IndexError:
            return NULL

    def _captured(self, stream: int) -> bytes:
        try:
            number = self.numbers.pop()
        except IndexError:
            return NULL
        when_graph_is_gone(stream, functools.partial(self.numbers.append, number))
        return self._at(number)

    def _at(self, number: int) -> bytes:
        return pack_pointer(self.pool.data.ptr + 4 * COUNTERS * number)


@functools.cache
def tile_counters(device: int) -> TileCounters:
    """The counters of a device."""
    return TileCounters(device)
