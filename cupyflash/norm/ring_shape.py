"""How blocks share samples that pass through their shared memory; `group_ring.cuh`."""

from typing import NamedTuple

from ..runtime.structs import header

_RING = header("norm/group_ring.cuh")
CONSUMERS, SLOT_PACKS = _RING.CONSUMERS, _RING.SLOT_PACKS
RING_BYTES, RING_THREADS = _RING.RING_BYTES, _RING.RING_THREADS
MAX_SLOTS, MAX_FLIGHT = _RING.MAX_SLOTS, _RING.MAX_FLIGHT
MAX_GROUPS, MAX_TEAMS = _RING.MAX_RING_GROUPS, _RING.MAX_TEAMS
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
    """What passes through the ring, channels last.

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
        """Of a sample, or of a slice of one."""
        return self.row * self.positions * self.tensors

    @property
    def slot_positions(self) -> int:
        """Of a slot of the ring: rows of threads, with one position or two each."""
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
