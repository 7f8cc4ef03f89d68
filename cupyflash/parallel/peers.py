"""Memory that the GPUs of one host write for each other, by their copy engines.

Copy engines take no multiprocessor from the attention that runs meanwhile, and put rows where they
belong, so that no kernel packs or sorts them. The memory is torch's symmetric memory; NVLink's
multicast is not used.

Source: docs.pytorch.org/docs/stable/symmetric_memory.html; CUDA Driver API, cuStreamWriteValue32.
"""

import dataclasses
import functools
import platform
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import Team

ALIGNMENT = 256  # bytes of what lies in the memory
LEAST = 64 << 20  # the fewest bytes that are allocated
SIGNALS = 1  # the first channel of the signals; channel 0 is that of barriers
found: dict[tuple[Team, torch.device], "Peers | None"] = {}  # of each team that has asked


@dataclasses.dataclass
class Peers:
    """The memory of the GPUs of a team, and a stream that copies run on.

    A use begins with `enter` and ends with `leave`. All ranks make the same uses, of as many bytes.

    Attributes:
        main: the stream of the use.
        timeout: milliseconds after which a GPU that waits for another one gives up.
    """

    team: Team
    device: torch.device
    timeout: int
    stream: torch.cuda.Stream
    main: torch.cuda.Stream | None = None
    handle: Any = None
    memory: Tensor | None = None
    used: torch.cuda.Event | None = None

    def enter(self, size: int) -> None:
        """Waits, on the current stream, until all ranks are here; the memory is free then."""
        self.main = torch.cuda.current_stream(self.device)
        if self.used is not None:
            self.main.wait_event(self.used)
        if self.memory is None or self.memory.numel() < size:
            self._allocate(max(size, LEAST))
        self.handle.barrier(0, self.timeout)
        self.follow()

    def _allocate(self, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        torch.cuda.synchronize()
        self.handle = self.memory = None
        self.memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        self.handle = symmetric.rendezvous(self.memory, self.team.group.group_name)

    def leave(self) -> None:
        """Ends a use: the current stream waits for the copies, and what they read may go."""
        self.join()
        self.used = self.main.record_event()

    def tensor(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory of this rank from byte ``place`` on."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[place : place + size].view(dtype).view(shape)

    def put(
        self, rank: int, place: int, pitch: int, source: Tensor, rows: slice, *, own: bool = False
    ) -> None:
        """Copies rows of ``source`` to byte ``place`` of the memory of a rank.

        What is behind the first axis of ``source`` is contiguous.

        Args:
            pitch: bytes from row to row there.
            own: on the current stream, else on that of the copies.
        """
        stream = self.main if own else self.stream
        copy_rows(self.handle.buffer_ptrs[rank] + place, pitch, source, rows, stream)

    def follow(self, *read: Tensor) -> None:
        """Copies that follow wait for what is on the current stream, and read these tensors."""
        self.stream.wait_stream(self.main)
        for x in read:
            x.record_stream(self.stream)

    def join(self) -> None:
        """The current stream waits for the copies."""
        self.main.wait_stream(self.stream)

    def tell(self, rank: int, channel: int) -> None:
        """Signals a rank, once what runs on the stream of the copies is done."""
        place = self.team.size * (SIGNALS + channel) + self.team.rank
        pad = self.handle.get_signal_pad(rank, (place + 1,), torch.uint32)
        with torch.cuda.stream(self.stream):
            self.handle.stream_write_value32(pad, place, 1)

    def hear(self, rank: int, channel: int) -> None:
        """Waits, on the current stream, for the signal of a rank."""
        self.handle.wait_signal(rank, SIGNALS + channel, self.timeout)


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def copy_rows(
    target: int, pitch: int, source: Tensor, rows: slice, stream: torch.cuda.Stream
) -> None:
    """Copies rows of ``source`` to an address; a row there is ``pitch`` bytes behind the last one.

    What is behind the first axis of ``source`` is contiguous.
    """
    runtime = _runtime()
    height = rows.stop - rows.start
    width = source[0].numel() * source.element_size()
    step = source.stride(0) * source.element_size()
    if height and width:
        first = source.data_ptr() + rows.start * step
        kind = runtime.memcpyDefault
        runtime.memcpy2DAsync(target, pitch, first, step, width, height, kind, stream.cuda_stream)


@functools.cache
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


def peers_of(team: Team, device: torch.device) -> Peers | None:
    """The memory of a team; None where its ranks cannot reach the memory of each other.

    All ranks ask together, the first time.
    """
    if device.type != "cuda" or dist.get_backend(team.group) != "nccl":
        return None
    forget_destroyed()
    if (team, device) not in found:
        found[team, device] = _peers(team, device)
    return found[team, device]


def forget_destroyed() -> None:
    """Lets go of the memory of process groups that have been destroyed."""
    for key in list(found):
        try:
            dist.get_process_group_ranks(key[0].group)
        except (KeyError, ValueError):
            del found[key]


def _peers(team: Team, device: torch.device) -> Peers | None:
    facts: list[Any] = [None] * team.size
    visible = [_name(x) for x in range(torch.cuda.device_count())]
    mine = _name(device)
    dist.all_gather_object(facts, (platform.node(), mine), group=team.group)
    gpus = [gpu for host, gpu in facts if host == platform.node()]
    reached = len(set(gpus)) == team.size and all(
        gpu == mine or gpu in visible
        and torch.cuda.can_device_access_peer(visible.index(mine), visible.index(gpu))
        for gpu in gpus
    )  # fmt: skip
    dist.all_gather_object(facts, reached, group=team.group)
    if not all(facts):
        return None
    timeout = dist.distributed_c10d._get_default_timeout("nccl")
    milliseconds = int(timeout.total_seconds() * 1000)
    return Peers(team, device, milliseconds, torch.cuda.Stream(device))


def _name(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
