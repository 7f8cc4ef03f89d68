"""Memory that the GPUs of one host write for each other, by their copy engines or by a kernel.

Copy engines take no multiprocessor from the attention that runs meanwhile, and put rows where they
belong, so that no other kernel packs or sorts them. Where the copies are many and small, one kernel
writes them all. The memory is torch's symmetric memory; NVLink's multicast is not used.

Source: docs.pytorch.org/docs/stable/symmetric_memory.html; CUDA Driver API, cuStreamWriteValue32.
"""

import dataclasses
import functools
import math
import platform
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.transfer import kernels
from ..runtime.torch_library import raw_stream
from . import choice
from .tokens import ranges
from .transport import Team

ALIGNMENT = 256  # bytes of what lies in the memory
LEAST = 64 << 20  # the fewest bytes that are allocated
SIGNALS = 1  # the first channel of the signals; channel 0 is that of barriers
found: dict[tuple[Team, torch.device], "Peers | None"] = {}  # of each team that has asked


class Source(NamedTuple):
    """An array whose rows are copied.

    Attributes:
        x: what is behind its first axis is contiguous.
        place: where row 0 goes, in bytes from the beginning of the memory of a rank.
        pitch: bytes from row to row there.
        step: bytes from what one rank gets of a row to what the next one gets.
    """

    x: Tensor
    place: int
    pitch: int
    step: int = 0

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return math.prod(self.x.shape[1:]) * self.x.element_size()

    @property
    def rows(self) -> kernels.Rows:
        pitch = self.x.stride(0) * self.x.element_size()
        return kernels.Rows(self.x.data_ptr(), pitch, self.step, self.place, self.pitch, self.width)


class Copies:
    """Rows that one rank writes for others, and for itself.

    Args:
        team: of the rank; those that follow it get their rows first, it gets its own last.
        device: of the rank.
        columns: four arrays of integers: the ranks that get them, the first of some rows, the first
            of these rows there, how many.
    """

    def __init__(self, team: Team, device: torch.device, *columns: Any) -> None:
        self.device = device
        table = numpy.stack([numpy.asarray(x, numpy.int64) for x in columns], axis=1)
        order = numpy.argsort((table[:, 0] - team.rank - 1) % team.size, kind="stable")
        self.table = table[order]
        self.total = int(self.table[:, 3].sum())  # rows of all copies

    @functools.cached_property
    def by_rank(self) -> dict[int, list[tuple[int, int, int]]]:
        """(row, row there, rows) of the copies of each rank, in the order of the ranks."""
        copies: dict[int, list[tuple[int, int, int]]] = {}
        for rank, *copy in self.table.tolist():
            copies.setdefault(rank, []).append(tuple(copy))
        return copies

    @functools.cached_property
    def moves(self) -> Tensor:
        """int32 (rows, 3) on the device: of each row its rank, its row, and its row there."""
        rank, row, there, rows = self.table.T
        columns = numpy.repeat(rank, rows), ranges(row, row + rows), ranges(there, there + rows)
        moves = numpy.stack(columns, axis=1).astype(numpy.int32)
        return torch.from_numpy(moves).to(self.device)


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

    def send(self, copies: Copies, sources: Sequence[Source], channel: int) -> None:
        """Copies rows on the stream of the copies, and signals the other ranks that get some."""
        at_once = self._by_kernel(copies, sources, self.stream)
        for rank, some in copies.by_rank.items():
            if not at_once:
                self._by_engine(rank, some, sources, self.stream)
            if rank != self.team.rank:
                self.tell(rank, channel)

    def keep(self, copies: Copies, sources: Sequence[Source]) -> None:
        """Copies rows of this rank to its own memory, on the current stream."""
        if not self._by_kernel(copies, sources, self.main):
            for rank, some in copies.by_rank.items():
                self._by_engine(rank, some, sources, self.main)

    def _by_kernel(self, copies: Copies, sources: Sequence[Source], stream: Any) -> bool:
        """Copies all rows in one launch, unless the copy engines are better."""
        count = len(copies.table) * len(sources)
        size = copies.total * sum(x.width for x in sources)
        if self.team.size > kernels.MOST_PEERS or choice.engines_pay(count, size):
            return False
        moves = copies.moves.data_ptr(), len(copies.moves)
        where = self.device.index, raw_stream(stream.cuda_stream), self.handle.buffer_ptrs
        kernels.put_rows(*where, *moves, [x.rows for x in sources])
        return True

    def _by_engine(
        self,
        rank: int,
        copies: Iterable[tuple[int, int, int]],
        sources: Sequence[Source],
        stream: Any,
    ) -> None:
        arrays = [x.rows for x in sources]
        for row, there, rows in copies:
            for at in arrays:
                target = self.handle.buffer_ptrs[rank] + at.place + there * at.pitch_there
                first = at.source + rank * at.step + row * at.pitch
                copy_rows(target, at.pitch_there, first, at.pitch, at.width, rows, stream)

    def sum(self, parts: Tensor, sums: Sequence[Tensor], places: Sequence[int]) -> None:
        """Sums of slots into rows, on the current stream.

        Args:
            parts: int32 (rows, 3): for each row the first slot, how many there are, and how far the
                next one lies behind it.
            sums: the results, contiguous; of each the slots lie from byte ``places`` on.
        """
        slots = self.memory.data_ptr()
        arrays = [
            (slots + place, x.data_ptr(), math.prod(x.shape[1:])) for x, place in zip(sums, places)
        ]
        stream, dtype = raw_stream(self.main.cuda_stream), str(sums[0].dtype).removeprefix("torch.")
        kernels.sum_rows(self.device.index, stream, dtype, parts.data_ptr(), len(parts), arrays)

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
    target: int, pitch_there: int, source: int, pitch: int, width: int, rows: int, stream: Any
) -> None:
    """Copies rows of ``width`` bytes from an address to another one."""
    runtime = _runtime()
    if rows and width:
        where = target, pitch_there, source, pitch, width, rows
        runtime.memcpy2DAsync(*where, runtime.memcpyDefault, stream.cuda_stream)


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
