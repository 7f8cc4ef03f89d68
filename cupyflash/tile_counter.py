"""Counters from which persistent blocks take their tiles (``next_tile_index`` in tile_order.cuh).

Or by which the blocks of a launch know who is the last (last_block.cuh). A launch gets `COUNTERS`
of them. They are 0 between launches, so launches may share them as long as they follow each other,
as those on one stream do. A launch captured into a CUDA graph may run beside anything later, so it
gets its own for good.
"""

import functools
import itertools
import struct
import threading
from typing import Any

from .array import Array

POOL_SIZE = 8192  # launches on a device that have their own
COUNTERS = 64  # of a launch, next to each other: most use the first only
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one name for many streams
pack_pointer = struct.Struct("Q").pack
NULL = pack_pointer(0)  # blocks without a counter take turns


class TileCounters:
    """The counters of one device; looked up by stream, as the bytes of their address."""

    def __init__(self, device: int) -> None:
        import cupy

        self.runtime, self.current_stream = cupy.cuda.runtime, cupy.cuda.get_current_stream
        with cupy.cuda.Device(device):
            self.pool = cupy.zeros(POOL_SIZE * COUNTERS, cupy.int32)
            cupy.cuda.get_current_stream().synchronize()  # before any other stream counts
        self.numbers = itertools.count()  # next() is one step, whatever other threads do
        self.of_stream: dict[Any, bytes] = {}

    def __call__(self, stream: Any) -> bytes:
        """The counter for a launch on ``stream``, or on CuPy's current one if it is None."""
        pointer = (stream or self.current_stream()).ptr
        if pointer and self.runtime.streamIsCapturing(pointer):
            return self._new()
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

    def _new(self) -> bytes:
        number = next(self.numbers)
        if number >= POOL_SIZE:
            return NULL
        return pack_pointer(self.pool.data.ptr + 4 * COUNTERS * number)


@functools.cache
def tile_counters(device: int) -> TileCounters:
    """The counters of a device."""
    return TileCounters(device)
