"""Functions of the NVIDIA driver that CuPy does not have, called by ctypes.

A stream may use fewer multiprocessors than the GPU has, in a green context or under MPS. The blocks
of a cooperative launch wait for each other, so all of them must run at the same time. The driver
refuses a grid that is too large for its context; the plan is then made again for the number of
multiprocessors that the context has.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_uint, c_void_p
from typing import Any

from ..jit.function import INVALID_CONTEXT, make_context_current

DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
TOO_LARGE = 720  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
SM_COUNT_AFFINITY = 0  # CU_EXEC_AFFINITY_TYPE_SM_COUNT
RESOURCE_BYTES = 256  # CUdevResource has 144, and grows with the driver
COUNT_OFFSET = 96  # offset of its field sm.smCount


@functools.cache
def function(name: str, *argument_types: Any) -> Callable[..., int]:
    """A function of the driver; it returns a status, 0 for success."""
    found = getattr(ctypes.CDLL(DRIVER), name)
    if argument_types:
        found.argtypes = argument_types
    return found


def with_context(call: Callable[..., int], *arguments: Any) -> int:
    """Calls the driver and returns the status, with a current context also in a new thread."""
    status = call(*arguments)
    if status == INVALID_CONTEXT:
        make_context_current()
        status = call(*arguments)
    return status


class GridTooLarge(RuntimeError):
    """A cooperative launch has more blocks than its stream can run at the same time.

    Attributes:
        multiprocessors: the number that the stream may use.
    """

    def __init__(self, blocks: int, multiprocessors: int) -> None:
        fact = f"{blocks} blocks must run at once, on {multiprocessors} multiprocessors"
        super().__init__(f"cupyflash: {fact}")
        self.multiprocessors = multiprocessors


class _Thread(threading.local):
    multiprocessors: int | None = None


_thread = _Thread()


@contextlib.contextmanager
def limit_multiprocessors(multiprocessors: int) -> Iterator[None]:
    """Context in which this thread makes plans for a GPU with this number of multiprocessors."""
    before, _thread.multiprocessors = _thread.multiprocessors, multiprocessors
    try:
        yield
    finally:
        _thread.multiprocessors = before


def multiprocessor_limit() -> int | None:
    """The number of `limit_multiprocessors` in this thread, or None outside of it."""
    return _thread.multiprocessors


def multiprocessors_of(stream: int) -> int | None:
    """The number of multiprocessors of a stream's green context, or else of the current context.

    It is None if the driver does not report it.

    Args:
        stream: address of the stream.
    """
    context = c_void_p()
    resource = ctypes.create_string_buffer(RESOURCE_BYTES)
    try:
        status = function("cuStreamGetGreenCtx")(c_void_p(stream), byref(context))
        if status == 0 and context.value:
            ask = function("cuGreenCtxGetDevResource")
        else:
            function("cuCtxGetCurrent")(byref(context))
            ask = function("cuCtxGetDevResource")
        status = ask(context, resource, c_int(SM_RESOURCE))
    except AttributeError:  # a driver without green contexts
        status = 1
    count = int.from_bytes(resource[COUNT_OFFSET : COUNT_OFFSET + 4], "little")
    known = [count] if status == 0 and count else []
    affinity = (c_uint * 8)()  # CUexecAffinityParam: type, number of multiprocessors under MPS
    ask = function("cuCtxGetExecAffinity")
    if ask(affinity, c_int(SM_COUNT_AFFINITY)) == 0 and affinity[1]:
        known.append(affinity[1])
    return min(known, default=None)
