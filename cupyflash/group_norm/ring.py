"""GroupNorm in NHWC with one read: blocks share samples that pass through their shared memory.

`nhwc_ring.cuh` has the algorithm. Here is how the blocks share the samples (`ring_shape`), the
memory through which they talk (`RingWorkspaces`) and the launch.

Launches that follow each other on a stream share one workspace, whatever their shapes are: their
tags count on. It is allocated beside the memory pools of CuPy and torch, since a CUDA graph that
torch records must not find memory in its pool that somebody keeps.
"""

import functools
from typing import Any, NamedTuple

from ..norm.plan import launches_cooperatively
from ..runtime.array import Array
from ..runtime.config import ITEM_SIZE
from ..runtime.gpu import all_multiprocessors, architecture_of, multiprocessors
from ..runtime.launch import Launch
from ..runtime.scratch import MAX_WORKSPACES, is_capturing, stream_number
from ..runtime.structs import bytes_behind, header
from ..runtime.tensor_map import MAX_MAP_STRIDE, TensorMaps, TensorMapSpec
from .groups import Groups
from .kernels import RingConfig

structs = header("group_norm/params.cuh")
_RING = header("group_norm/nhwc_ring.cuh")
CONSUMERS, SLOT_PACKS = _RING.CONSUMERS, _RING.SLOT_PACKS
RING_BYTES = _RING.RING_BYTES
MAX_SLOTS, MAX_FLIGHT = _RING.MAX_SLOTS, _RING.MAX_FLIGHT
MAX_GROUPS, MAX_TEAMS = _RING.MAX_RING_GROUPS, _RING.MAX_TEAMS
ROUNDS_BYTES = 4 * MAX_TEAMS  # at the head of a workspace: the rounds that each team has made
RUN_BYTES, GROUP_BYTES = 8, 24  # of a sample in flight: of a run of a thread, of a group
SHARE_BYTES = 16 * CONSUMERS  # where dweight and dbias are added up, of two tensors

# Samples of a round, one of each team: enough to hide how long blocks wait for each other, little
# enough to leave room for the next ones.
ROUND_BYTES = 11 << 20
MIN_ROUND_BYTES = 5 << 19  # three launches take less for many samples of less
MIN_BLOCK_BYTES = 32 << 10  # what a block reads while the others tell it about one sample
SLICE_BYTES = 128  # of a position; by 64 the memory is read at three quarters of the rate
MAX_BOX, BOX_ALIGNMENT = 256, 128  # of a tensor map: columns; bytes in shared memory


class Samples(NamedTuple):
    """The samples that pass through the ring, channels last.

    Attributes:
        groups: of a sample, or of a slice of one.
        channels: of a group.
        item: bytes of an element.
        tensors: of this shape that are read.
        slices: into which each sample is parted.
    """

    batch: int
    groups: int
    channels: int
    positions: int
    item: int
    tensors: int
    slices: int = 1

    def parted(self, slices: int) -> "Samples":
        """Into so many slices of whole groups."""
        return self._replace(groups=self.groups // slices, slices=slices)

    @property
    def columns(self) -> int:
        """Channels that lie side by side."""
        return self.groups * self.channels

    @property
    def row(self) -> int:
        """Bytes of a position of a tensor."""
        return self.columns * self.item

    @property
    def bytes(self) -> int:
        """Bytes of a sample, or of a slice of one."""
        return self.row * self.positions * self.tensors

    @property
    def slot_positions(self) -> int:
        """Positions of a slot of the ring: rows of threads, with one position or two each."""
        return CONSUMERS // (self.row // 16) * (SLOT_PACKS // self.tensors)

    @property
    def possible(self) -> bool:
        """Whether a kernel takes these rows."""
        if self.groups > MAX_GROUPS or self.row > 16 * CONSUMERS or self.row % 16:
            return False
        box = self.slot_positions * self.row
        return self.slices == 1 or (self.columns <= MAX_BOX and box % BOX_ALIGNMENT == 0)


class RingShape(NamedTuple):
    """How blocks share the samples: fields of `GroupRing`."""

    slices: int
    teams: int
    blocks: int
    span: int
    slots: int
    sample_slots: int
    flight: int
    runs: int


def ring_shape(samples: Samples, processors: int, mappable: bool) -> RingShape | None:
    """For so many multiprocessors; None where a sample does not fit or is too small.

    Samples are parted into the fewest slices that are no more than a round each, or else into the
    most that fit; without tensor maps, not at all.
    """
    shape = None
    for slices in (n for n in range(1, samples.groups + 1) if samples.groups % n == 0):
        part = samples.parted(slices)
        if slices > 1 and (part.row < SLICE_BYTES or not mappable):
            break
        found = _shape(part, processors) if part.possible else None
        shape = found or shape
        if found and part.bytes <= ROUND_BYTES:
            break
    return shape


def _shape(samples: Samples, processors: int) -> RingShape | None:
    most = max(1, min(MAX_TEAMS, samples.batch, processors, ROUND_BYTES // samples.bytes))
    many = samples.batch * samples.slices > most
    if many and most * samples.bytes < MIN_ROUND_BYTES:
        return None
    size, pack, slot_positions = samples.channels, 16 // samples.item, samples.slot_positions
    packs = range(0, samples.columns, pack)
    runs = max((p + pack - 1) // size - p // size + 1 for p in packs)
    best: tuple[int, RingShape] | None = None
    for teams in range(1, most + 1):
        span = -(-samples.positions // (processors // teams))
        of_block = max(span * samples.row * samples.tensors, MIN_BLOCK_BYTES)
        work = -(-samples.batch // teams) * of_block
        blocks, sample_slots = -(-samples.positions // span), -(-span // slot_positions)
        fit = _slots(samples, runs, sample_slots)
        if fit and (best is None or work <= best[0]):
            best = work, RingShape(samples.slices, teams, blocks, span, *fit, runs)
    return best and best[1]


def _slots(samples: Samples, runs: int, sample_slots: int) -> tuple[int, int, int] | None:
    """(slots, those of a sample, samples in flight): the most slots, more than a sample has."""
    slot_bytes = samples.slot_positions * samples.row * samples.tensors
    in_flight = RUN_BYTES * runs * CONSUMERS + GROUP_BYTES * samples.groups
    best = None
    for flight in range(1, MAX_FLIGHT + 1):
        left = RING_BYTES - SHARE_BYTES * (samples.tensors - 1) - flight * in_flight
        slots = min(MAX_SLOTS, left // slot_bytes, (flight + 1) * sample_slots - 1)
        if slots > sample_slots and (best is None or slots > best[0]):
            best = slots, sample_slots, flight
    return best


RECORD_BYTES = 16


class RingWorkspaces:
    """The workspaces of one device, one for each stream."""

    def __init__(self, device: int) -> None:
        import cupy

        self.runtime, self.current_stream = cupy.cuda.runtime, cupy.cuda.get_current_stream
        self.memory, self.device = cupy.cuda.Memory, cupy.cuda.Device(device)
        # The blocks of the whole GPU count: the first plan may have been made for a part of it.
        blocks = all_multiprocessors(device)
        self.bytes = workspace_bytes(MAX_GROUPS, MAX_FLIGHT, MAX_TEAMS, blocks)
        self.of_stream: dict[int, Any] = {}  # by `stream_number`

    def address(self, stream: Any, library: Any, like: Array, size: int) -> tuple[int, Any]:
        """The address of ``size`` bytes for a launch on ``stream``, and what has to live meanwhile.

        A captured launch may run beside anything later, so it gets memory of its own, which is the
        graph's: allocated by ``library``, as all of a call is. So does one on a stream beyond
        `MAX_WORKSPACES`.
        """
        pointer = (stream or self.current_stream()).ptr
        captured = is_capturing(pointer)
        number = None if captured else stream_number(pointer)
        found = self.of_stream.get(number)
        if found is None:
            if captured or len(self.of_stream) >= MAX_WORKSPACES:
                own = library.zeros_int32(size // 4, like)
                return library.pointer(own), own
            with self.device:
                made = self.memory(self.bytes)
                self.runtime.memsetAsync(made.ptr, 0, self.bytes, pointer)
            found = self.of_stream.setdefault(number, made)
        return found.ptr, found


def workspace_bytes(groups: int, flight: int, teams: int, blocks: int) -> int:
    """The counters of the teams, what ``blocks`` tell each other, and what teams find.

    Args:
        groups: of a sample, or of a slice of one.
        flight: samples about which a team talks at a time.
        blocks: of all teams.
    """
    return ROUNDS_BYTES + RECORD_BYTES * flight * groups * (blocks + teams)


@functools.cache
def ring_workspaces(device: int) -> RingWorkspaces:
    """The workspaces of a device."""
    return RingWorkspaces(device)


class RingLaunch(Launch):
    """All blocks are on the GPU at once, so that they can wait for each other.

    Attributes:
        rows: blocks that have positions.
    """

    has_scratch = True

    def __init__(
        self, config: RingConfig, groups: Groups, eps: float, ring: RingShape, device: int
    ) -> None:
        part = samples_of(config, groups).parted(ring.slices)
        shape = groups.shape(eps, 16 // part.item)
        fields = groups.strides | {"shape": shape, "ring": structs.GroupRing(*ring)}
        blocks = multiprocessors(device) // ring.teams * ring.teams
        super().__init__(config, device, blocks, structs.GroupNormRingBase(**fields))
        self.tail += bytes_behind(config.params, "base")
        self.maps = None
        if ring.slices > 1:
            self.maps = TensorMaps(slice_maps(config, groups, part), device)
        self.maps_bytes = config.params.maps.size
        self.reads = len(config.reads)
        self.rows = ring.teams * ring.blocks
        rounds, found = ROUNDS_BYTES, RECORD_BYTES * ring.teams * ring.flight * part.groups
        self.offsets = rounds + found, rounds, 0  # of partials, statistics, rounds
        self.workspace = workspace_bytes(part.groups, ring.flight, ring.teams, self.rows)
        self.workspaces = ring_workspaces(device)

    def run(self, library: Any, stream: Any, like: Array, pointers: tuple[int, ...]) -> None:
        """``pointers`` of the arrays, in the order of `GroupNormRingBase`: first x and dout."""
        # Held until the launch is queued.
        base, _workspace = self.workspaces.address(stream, library, like, self.workspace)
        words = self.pack(*pointers, *(base + offset for offset in self.offsets))
        maps = self.maps[pointers[: self.reads]] if self.maps is not None else b""
        self.start(stream, maps.ljust(self.maps_bytes, b"\0") + words + self.tail)


def samples_of(config: RingConfig, groups: Groups) -> Samples:
    """The samples that pass through the ring."""
    sizes = groups.batch, groups.num_groups, groups.channels, groups.positions
    return Samples(*sizes, ITEM_SIZE[config.dtype], len(config.reads))


def slice_maps(config: RingConfig, groups: Groups, part: Samples) -> list[TensorMapSpec]:
    """The map of each tensor that is read; a TMA tile is the part of a slice in a slot."""
    columns = part.columns * part.slices
    row = columns * part.item
    dims = columns, part.positions, 1, part.batch
    box = {"box_rows": part.slot_positions, "box_columns": part.columns, "swizzled": False}
    return [
        TensorMapSpec(config.dtype, dims, (row, row, step), **box)
        for step in batch_steps(config, groups)
    ]


def batch_steps(config: RingConfig, groups: Groups) -> list[int]:
    """Bytes between samples of what is read; those of a dense tensor if there is only one."""
    sample = groups.size * groups.num_groups
    strides = (groups.strides[f"{name}_strides"].batch for name in config.reads)
    return [(n if groups.batch > 1 else sample) * ITEM_SIZE[config.dtype] for n in strides]


def ring_launch(
    config: RingConfig, groups: Groups, eps: float, device: int, aligned: bool
) -> RingLaunch | None:
    """None where three launches do it: see `ring_shape`."""
    if not (groups.nhwc and aligned and groups.aligned):
        return None
    width = groups.num_groups * groups.channels
    dense = all(strides.position == width for strides in groups.strides.values())
    hopper = architecture_of(device).wgmma  # setmaxnreg exists in sm_90a alone
    if not (dense and hopper and launches_cooperatively(device)):
        return None
    mappable = all(0 < step < MAX_MAP_STRIDE for step in batch_steps(config, groups))
    ring = ring_shape(samples_of(config, groups), multiprocessors(device), mappable)
    return ring and RingLaunch(config, groups, eps, ring, device)
