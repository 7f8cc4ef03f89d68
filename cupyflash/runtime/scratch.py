"""Memory that launches need: memory that a CUDA graph holds, and counters that blocks share.

**Graphs.** A graph repeats its launches with the addresses that they were captured with. torch
gives a graph a memory pool of its own. Under CuPy the scratch memory of a call would return to the
common pool when the call ends, and replays of the graph would overwrite the memory of whoever gets
it next. So the memory is held until the graph, and everything that was instantiated from it, has
been destroyed. The driver reports this through a user object (CUDA driver API, "Graph Management":
cuUserObjectCreate, cuGraphRetainUserObject).

The driver calls the destructor of a user object on a thread of its own, where neither Python nor
CUDA may be called. The destructor here is ``sem_post`` of the C library. The semaphores are tested
when the next launch is captured. Memory cannot be freed there, since cudaFree ends the capture: the
next array that CuPy allocates outside of captures frees it (`CupyLibrary.held`).

**Counters.** Persistent blocks take their tiles from a counter (``next_tile_index`` in
tile_order.cuh), or find out by it which of them is the last (weight_shares.cuh). A launch gets
`COUNTERS` counters, or more from another pool. They are 0 between launches, so launches that follow
each other, as those on one stream do, may share them. A launch that is captured into a CUDA graph
may later run beside any other, so it has counters of its own as long as the graph exists.

**Streams.** The handle of a stream does not say which stream it is. CUDA gives the handle of a
stream that has been destroyed to the next one at once, also while work of the first is pending, and
that work may run beside the work of the next. So what belongs to a stream is found by the number
that the driver gives each one (`stream_number`). Nobody knows when the work of a destroyed stream
has ended, so its counters and workspaces are not given to another. Their number is limited, and
launches on streams beyond it do without, or have memory of their own for each call. What a call
allocates comes from its library: CuPy's pool, too, finds memory by the handle of the stream.
"""

import contextlib
import ctypes
import functools
import gc
import os
import struct
import threading
from collections.abc import Callable, Iterator
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from . import driver
from .array import Array

POOL_SIZE = 8192  # the number of launches or streams of a device that have counters of their own
WIDE_POOL_SIZE = 2048  # the same of those that need more than `COUNTERS`
MAX_STREAMS = POOL_SIZE // 2  # streams that have counters; the rest is left to captured launches
COUNTERS = 64  # neighbouring counters of a launch; most kernels use only the first
_LEGACY_STREAM = 1  # cudaStreamLegacy; 0 is another name of it
pack_pointer = struct.Struct("Q").pack
NULL = pack_pointer(0)  # blocks without a counter take turns
_SEMAPHORE_BYTES = 64  # sem_t has 16 to 32
_MOVE = _NO_DESTRUCTOR_SYNC = 1  # CU_GRAPH_USER_OBJECT_MOVE, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_collecting, _collected = threading.Lock(), list[bool]()  # for each `no_garbage_collected`


def is_capturing(stream: int) -> bool:
    """Whether a stream (its pointer) records a graph; the legacy default stream never does."""
    import cupy

    return bool(stream) and cupy.cuda.runtime.streamIsCapturing(stream)


def stream_number(stream: int) -> int:
    """A number that no other stream of this process has or had; of the legacy default stream, 0.

    Source: CUDA driver API, "Stream Management": cuStreamGetId.

    Raises:
        RuntimeError: the driver does not know the stream.
    """
    if stream <= _LEGACY_STREAM:
        return 0
    number = c_uint64()
    ask = driver.function("cuStreamGetId", c_void_p, c_void_p)
    error = driver.with_context(ask, stream, ctypes.byref(number))
    if error:
        raise RuntimeError(f"cupyflash: stream {stream:#x} has no number, CUDA error {error}")
    return number.value


@contextlib.contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Context for the capture of a graph; several threads may be in it.

    Memory of CuPy that is part of a cycle, as that of a model may be, is freed by Python's garbage
    collector, and cudaFree is an error that ends the capture.
    """
    with _collecting:
        _collected.append(gc.isenabled())  # only the first one can be True
        gc.disable()
    try:
        yield
    finally:
        with _collecting:
            if _collected.pop():
                gc.enable()


def when_graph_is_gone(stream: int, release: Callable[[], None]) -> None:
    """Calls ``release`` some time after the graph that ``stream`` records has been destroyed.

    Until then it holds everything that ``release`` refers to. The call comes from a thread that
    captures another launch, so it must free no memory (`hold_memory`). It never comes where the C
    library has no POSIX semaphores (Windows).
    """
    _graphs.collect()
    _graphs.retain(stream, release)


def hold_memory(stream: int, memory: Any) -> None:
    """Keeps an object, whose memory the graph uses that ``stream`` records, while it exists.

    Afterwards it is in `unused_memory`.
    """
    when_graph_is_gone(stream, functools.partial(unused_memory.append, memory))


@contextlib.contextmanager
def array_operations(like: Array) -> Iterator[None]:
    """Context for array operations on ``like`` and arrays beside it.

    CuPy computes on the current device, so that of ``like`` is current. If the stream of that
    device records a graph, the graph holds all memory that CuPy allocates, since nothing else can
    hold temporary arrays. torch does both; the context does nothing for arrays that are not CuPy's.
    """
    if type(like).__module__.partition(".")[0] != "cupy":
        yield
        return
    import cupy

    with like.device:
        stream = cupy.cuda.get_current_stream().ptr
        if not is_capturing(stream):
            yield
            return
        held, allocate = [], cupy.cuda.get_allocator()

        def allocate_and_hold(size: int) -> object:
            memory = allocate(size)
            held.append(memory)
            return memory

        hold_memory(stream, held)
        with cupy.cuda.using_allocator(allocate_and_hold):
            yield


class Graphs:
    """The semaphores of the graphs that exist, each with the functions to call at its end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[int, list[Callable[[], None]]] = {}  # keys: addresses of the semaphores
        self.of_graph: dict[tuple[int, int], int] = {}  # (stream, capture) -> its semaphore

    def retain(self, stream: int, release: Callable[[], None]) -> None:
        """Registers ``release`` for the graph of a capture, which has one semaphore."""
        graph, capture = _capture(stream)
        with self.lock:
            semaphore = self.of_graph.get((graph, capture))
            if semaphore is None:
                semaphore = _semaphore_of(graph)
                self.of_graph[graph, capture] = semaphore
                self.waiting[semaphore] = []
            self.waiting[semaphore].append(release)

    def collect(self) -> None:
        """Calls the functions that belong to graphs which have been destroyed."""
        with self.lock:
            gone = [x for x in self.waiting if _posted(x)]
            releases = [release for x in gone for release in self.waiting.pop(x)]
            self.of_graph = {key: x for key, x in self.of_graph.items() if x not in gone}
        for semaphore in gone:
            _c_library().free(semaphore)
        for release in releases:
            release()


_graphs = Graphs()
unused_memory: list[Any] = []  # memory that destroyed graphs held, to be freed outside of captures


def _capture(stream: int) -> tuple[int, int]:
    """The graph that a stream records, and the number of the capture."""
    status, number, graph = c_int(), c_uint64(), c_void_p()
    ask = driver.function("cuStreamGetCaptureInfo_v2", *[c_void_p] * 6)
    error = ask(stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None)
    if error or status.value != _ACTIVE:
        raise RuntimeError(
            f"cupyflash: the capture of stream {stream:#x} must be going on, got status "
            f"{status.value}, CUDA error {error}"
        )
    return graph.value, number.value


def _semaphore_of(graph: int) -> int:
    """A new semaphore that is posted when the graph is destroyed; it is not freed before that."""
    library = _c_library()
    if library is None:
        return -len(_graphs.waiting) - 1  # a key that no other graph has
    semaphore = library.calloc(1, _SEMAPHORE_BYTES)
    library.sem_init(semaphore, 0, 0)
    user_object = c_void_p()
    create = driver.function("cuUserObjectCreate", c_void_p, c_void_p, c_void_p, c_uint, c_uint)
    retain = driver.function("cuGraphRetainUserObject", c_void_p, c_void_p, c_uint, c_uint)
    post = ctypes.cast(library.sem_post, c_void_p)
    error = create(ctypes.byref(user_object), semaphore, post, 1, _NO_DESTRUCTOR_SYNC)
    error = error or retain(graph, user_object, 1, _MOVE)
    if error:
        raise RuntimeError(f"cupyflash: a CUDA graph cannot hold memory, CUDA error {error}")
    return semaphore


def _posted(semaphore: int) -> bool:
    return semaphore > 0 and _c_library().sem_trywait(semaphore) == 0


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    if os.name == "nt":
        return None
    library = ctypes.CDLL(None)
    library.calloc.restype, library.calloc.argtypes = c_void_p, (c_size_t, c_size_t)
    library.free.argtypes = library.sem_trywait.argtypes = (c_void_p,)
    library.sem_init.argtypes = (c_void_p, c_int, c_uint)
    return library


class TileCounters:
    """The counters of one device, ``width`` for a launch; a look-up by stream returns the bytes of
    their address.
    """

    def __init__(self, device: int, width: int = COUNTERS) -> None:
        import cupy

        size, self.width = POOL_SIZE if width == COUNTERS else WIDE_POOL_SIZE, width
        self.current_stream = cupy.cuda.get_current_stream
        with cupy.cuda.Device(device):
            self.pool = cupy.zeros(size * width, cupy.int32)
            cupy.cuda.get_current_stream().synchronize()  # before any other stream counts
        # The free numbers. pop() and append() are atomic, so other threads cannot interfere.
        self.numbers = list(reversed(range(size)))
        self.of_stream: dict[int, bytes] = {}  # keys: `stream_number`

    def __call__(self, stream: Any) -> bytes:
        """The counter for a launch on ``stream``, or on CuPy's current one if it is None."""
        pointer = self._pointer(stream)
        if is_capturing(pointer):
            return self._captured(pointer)
        number = stream_number(pointer)
        found = self.of_stream.get(number)
        if found is None:
            found = self._new() if len(self.of_stream) < MAX_STREAMS else NULL
            if found != NULL:
                found = self.of_stream.setdefault(number, found)
        return found

    def address(self, stream: Any, library: Any, like: Array, count: int = 0) -> tuple[int, Any]:
        """The address of the counters of a launch that needs them, and an array or None.

        If all counters are taken, or the launch needs more (``count``), they are a new array, made
        by ``library`` on the device of ``like``, which the caller keeps until the launch is queued.
        """
        counters = int.from_bytes(self(stream), "little") if count <= self.width else 0
        if counters:
            return counters, None
        own = library.zeros_int32(max(count, self.width), like)
        return library.pointer(own), own

    def is_capturing(self, stream: Any) -> bool:
        """Whether a launch on ``stream`` (None: CuPy's current one) becomes part of a graph."""
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
        return pack_pointer(self.pool.data.ptr + 4 * self.width * number)


@functools.cache
def tile_counters(device: int, width: int = COUNTERS) -> TileCounters:
    """The counters of a device, ``width`` for a launch."""
    return TileCounters(device, width)
