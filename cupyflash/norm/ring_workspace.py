"""Global memory through which the blocks of a GroupNorm ring talk; `group_ring.cuh`.

Launches that follow each other on a stream share one workspace, whatever their shapes are: their
tags count on. It is allocated beside the memory pools of CuPy and torch, since a CUDA graph that
torch records must not find memory in its pool that somebody keeps.
"""

import functools
from typing import Any

from ..runtime.array import Array
from ..runtime.gpu import all_multiprocessors
from ..runtime.scratch import is_capturing
from .ring_shape import MAX_FLIGHT, MAX_GROUPS, MAX_TEAMS

RECORD_BYTES = 16
MAX_STREAMS = 32  # of a device, with a workspace of their own
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one name for many streams


class RingWorkspaces:
    """The workspaces of one device, one for each stream."""

    def __init__(self, device: int) -> None:
        import cupy

        self.runtime, self.current_stream = cupy.cuda.runtime, cupy.cuda.get_current_stream
        self.memory, self.device = cupy.cuda.Memory, cupy.cuda.Device(device)
        # Of the whole GPU: the first plan may have been made for a part of it.
        blocks = all_multiprocessors(device)
        self.bytes = workspace_bytes(MAX_GROUPS, MAX_FLIGHT, MAX_TEAMS, blocks)
        self.of_stream: dict[int, Any] = {}

    def address(self, stream: Any, library: Any, like: Array, size: int) -> tuple[int, Any]:
        """The address of ``size`` bytes for a launch on ``stream``, and what has to live meanwhile.

        A captured launch may run beside anything later, so it gets memory of its own, which is the
        graph's: allocated by ``library``, as all of a call is. So does one on a stream beyond
        `MAX_STREAMS`.
        """
        pointer = (stream or self.current_stream()).ptr
        captured = is_capturing(pointer)
        found = None if captured else self.of_stream.get(pointer)
        if found is None:
            full = len(self.of_stream) >= MAX_STREAMS or pointer == _PER_THREAD_STREAM
            if captured or full:
                own = library.zeros_int32(size // 4, like)
                return library.pointer(own), own
            with self.device:
                made = self.memory(self.bytes)
                self.runtime.memsetAsync(made.ptr, 0, self.bytes, pointer)
            found = self.of_stream.setdefault(pointer, made)
        return found.ptr, found


def workspace_bytes(groups: int, flight: int, teams: int, blocks: int) -> int:
    """The counters of the teams, what ``blocks`` tell each other, and what teams find.

    Args:
        groups: of a sample, or of a slice of one.
        flight: samples about which a team talks at a time.
        blocks: of all teams.
    """
    return 4 * MAX_TEAMS + RECORD_BYTES * flight * groups * (blocks + teams)


@functools.cache
def ring_workspaces(device: int) -> RingWorkspaces:
    """The workspaces of a device."""
    return RingWorkspaces(device)
