"""GroupNorm with channels last, one read: blocks that share a sample; `group_ring.cuh`."""

import ctypes
import dataclasses
from typing import Any, ClassVar, NamedTuple

from ..array import Array, View
from ..kernel_config import ITEM_SIZE, KernelConfig
from ..kernel_launch import Launch, capability_of, multiprocessors
from ..tile_counter import NULL, tile_counters
from .groups import Groups
from .params import GroupNormBwdRingParams, GroupNormFwdRingParams, GroupRing
from .plan import launches_cooperatively

CAPABILITY = (9, 0)  # setmaxnreg exists where code is made for one architecture only
# As in group_ring.cuh.
CONSUMERS, OTHERS, SLOT_PACKS = 256, 256, 2
MAX_SLOTS, MAX_FLIGHT, MAX_GROUPS = 64, 8, 64
RING_BYTES = 225 << 10  # what RingStorage leaves of the shared memory
RUN_BYTES, GROUP_BYTES = 8, 24  # of a sample in flight: of a run of a thread, of a group
RECORD_BYTES = 16
# Samples of a round, one of each team: enough to hide how long blocks wait for each other, little
# enough to leave room for the next ones.
ROUND_BYTES = 11 << 20
MAX_TEAMS = 8
MIN_ROUND_BYTES = 5 << 19  # three launches take less for many samples of less
MIN_BLOCK_BYTES = 32 << 10  # what a block reads while the others tell it about one sample


@dataclasses.dataclass(frozen=True)
class RingConfig(KernelConfig):
    """A kernel through whose blocks' shared memory the samples pass.

    Attributes:
        tensors: that it reads.
    """

    cooperative: ClassVar[bool] = True
    smem_bytes: ClassVar[int] = RING_BYTES
    tensors: ClassVar[int]

    dtype: str
    weight: str
    activation: str

    @property
    def threads(self) -> int:
        """Those that collect, those that apply, and the others."""
        return 2 * CONSUMERS + OTHERS


class GroupNormFwdRing(RingConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_ring_sm90.cu"
    params: ClassVar[type[ctypes.Structure]] = GroupNormFwdRingParams
    tensors: ClassVar[int] = 1


class GroupNormBwdRing(RingConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_ring_sm90.cu"
    params: ClassVar[type[ctypes.Structure]] = GroupNormBwdRingParams
    tensors: ClassVar[int] = 2


class RingShape(NamedTuple):
    """How blocks share the samples: fields of `GroupRing`."""

    teams: int
    blocks: int
    span: int
    slots: int
    sample_slots: int
    flight: int
    runs: int


def ring_shape(
    batch: int,
    num_groups: int,
    channels: int,
    positions: int,
    item: int,
    tensors: int,
    processors: int,
) -> RingShape | None:
    """For groups of ``channels``; None where a sample does not fit or is too small."""
    width = channels * num_groups
    packs, vector, position = width * item // 16, 16 // item, width * item * tensors
    if num_groups > MAX_GROUPS or packs > CONSUMERS:
        return None
    sample = position * positions
    most = max(1, min(MAX_TEAMS, batch, processors, ROUND_BYTES // sample))
    if batch > most and most * sample < MIN_ROUND_BYTES:
        return None
    slot_positions = CONSUMERS // packs * (SLOT_PACKS // tensors)
    runs = max((p + vector - 1) // channels - p // channels + 1 for p in range(0, width, vector))
    in_flight = RUN_BYTES * runs * CONSUMERS + GROUP_BYTES * num_groups
    best: tuple[int, RingShape] | None = None
    for teams in range(1, most + 1):
        span = -(-positions // (processors // teams))
        work = -(-batch // teams) * max(span * position, MIN_BLOCK_BYTES)
        fit = _ring(-(-span // slot_positions), slot_positions * position, in_flight)
        if fit and (best is None or work <= best[0]):
            slots, flight = fit
            blocks, sample_slots = -(-positions // span), -(-span // slot_positions)
            best = work, RingShape(teams, blocks, span, slots, sample_slots, flight, runs)
    return best and best[1]


def _ring(sample_slots: int, slot_bytes: int, in_flight: int) -> tuple[int, int] | None:
    """(slots, samples in flight): the most slots that the kernel allows, more than a sample has.

    Beside the slots it takes ``in_flight`` bytes for each sample in flight.
    """
    best = None
    for flight in range(1, MAX_FLIGHT + 1):
        left = RING_BYTES - flight * in_flight
        slots = min(MAX_SLOTS, left // slot_bytes, (flight + 1) * sample_slots - 1)
        if slots > sample_slots and (best is None or slots > best[0]):
            best = slots, flight
    return best


class RingLaunch(Launch):
    """All blocks are on the GPU at once, so that they can wait for each other.

    Attributes:
        rows: blocks that have positions.
    """

    has_scratch = True

    def __init__(
        self, config: RingConfig, device: int, groups: Groups, eps: float, ring: RingShape
    ) -> None:
        vector = 16 // ITEM_SIZE[config.dtype]
        params = config.params(
            **groups.strides, shape=groups.shape(eps, vector), ring=GroupRing(*ring)
        )
        blocks = multiprocessors(device) // ring.teams * ring.teams
        super().__init__(config, device, blocks, params)
        self.rows = ring.teams * ring.blocks
        found = RECORD_BYTES * ring.teams * ring.flight * groups.num_groups
        self.offsets = 0, found * ring.blocks, found * (ring.blocks + 1)
        self.workspace_words = self.offsets[-1] // 4 + ring.teams
        self.counters = tile_counters(device)
        self.workspaces: dict[bytes, Array] = {}

    def run(self, library: Any, stream: Any, like: Array, pointers: tuple[int, ...]) -> None:
        """``pointers``: the first parameters, those of the arrays."""
        # Launches that may run at once have different counters, and so different workspaces.
        counter = self.counters(stream)
        workspace = self.workspaces.get(counter)
        if workspace is None:
            workspace = library.zeros_int32(self.workspace_words, like)
            if counter != NULL:  # else CUDA graphs have taken all of them
                self.workspaces[counter] = workspace
        base = library.pointer(workspace)
        self(stream, *pointers, *(base + offset for offset in self.offsets))


def ring_launch(
    config: RingConfig, x: View, groups: Groups, eps: float, aligned: bool
) -> RingLaunch | None:
    """None where three launches do it: see `ring_shape`."""
    if not (groups.channels_last and aligned and groups.aligned):
        return None
    width = groups.num_groups * groups.channels
    dense = all(strides.position == width for strides in groups.strides.values())
    hopper = capability_of(x.device) == CAPABILITY
    if not (dense and hopper and launches_cooperatively(x.device)):
        return None
    sizes = groups.batch, groups.num_groups, groups.channels, groups.positions
    item, processors = ITEM_SIZE[x.dtype], multiprocessors(x.device)
    ring = ring_shape(*sizes, item, config.tensors, processors)
    return ring and RingLaunch(config, x.device, groups, eps, ring)
