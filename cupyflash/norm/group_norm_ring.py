"""GroupNorm with channels last, one read: blocks that share a sample; `group_ring.cuh`."""

import ctypes
import dataclasses
from typing import Any, ClassVar

from ..runtime.array import Array
from ..runtime.config import ITEM_SIZE, KernelConfig
from ..runtime.gpu import architecture_of, multiprocessors
from ..runtime.launch import Launch, call_fields
from ..runtime.structs import bytes_behind, header
from ..runtime.tensor_map import MAX_MAP_STRIDE, TensorMaps, TensorMapSpec
from .groups import Groups
from .plan import launches_cooperatively
from .ring_shape import MAX_TEAMS, RING_BYTES, RING_THREADS, RingShape, Samples, ring_shape
from .ring_workspace import RECORD_BYTES, ring_workspaces, workspace_bytes

structs = header("norm/params.cuh")


@dataclasses.dataclass(frozen=True)
class RingConfig(KernelConfig):
    """A kernel through whose blocks' shared memory the samples pass.

    Attributes:
        base: its parameters but for the tensor maps.
        reads: these tensors.
    """

    cooperative: ClassVar[bool] = True
    smem_bytes: ClassVar[int] = RING_BYTES
    base: ClassVar[type[ctypes.Structure]]
    reads: ClassVar[tuple[str, ...]]
    threads: ClassVar[int] = RING_THREADS  # Those that collect, those that apply, and the others

    dtype: str
    weight: str
    activation: str


class GroupNormFwdRing(RingConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_ring_sm90.cu"
    params: ClassVar[type[ctypes.Structure]] = structs.GroupNormFwdRingParams
    base: ClassVar[type[ctypes.Structure]] = structs.GroupNormFwdRingBase
    reads: ClassVar[tuple[str, ...]] = ("x",)


class GroupNormBwdRing(RingConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_ring_sm90.cu"
    params: ClassVar[type[ctypes.Structure]] = structs.GroupNormBwdRingParams
    base: ClassVar[type[ctypes.Structure]] = structs.GroupNormBwdRingBase
    reads: ClassVar[tuple[str, ...]] = ("x", "dout")


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
        params = config.base(**groups.strides, shape=shape, ring=structs.GroupRing(*ring))
        blocks = multiprocessors(device) // ring.teams * ring.teams
        super().__init__(config, device, blocks, params)
        self.tail += bytes_behind(config.params, "base")
        self.maps = None
        if ring.slices > 1:
            self.maps = TensorMaps(slice_maps(config, groups, part), device)
        self.no_maps = bytes(config.params.maps.size)
        names = call_fields(params)
        self.mapped = [names.index(name) for name in config.reads]
        self.rows = ring.teams * ring.blocks
        rounds, found = 4 * MAX_TEAMS, RECORD_BYTES * ring.teams * ring.flight * part.groups
        self.offsets = rounds + found, rounds, 0  # of what is told, of what is found, of the rounds
        self.workspace = workspace_bytes(part.groups, ring.flight, ring.teams, self.rows)
        self.workspaces = ring_workspaces(device)

    def run(self, library: Any, stream: Any, like: Array, pointers: tuple[int, ...]) -> None:
        """``pointers``: the first parameters, those of the arrays."""
        # Held until the launch is queued.
        base, _workspace = self.workspaces.address(stream, library, like, self.workspace)
        words = self.pack(*pointers, *(base + offset for offset in self.offsets))
        maps = self.no_maps
        if self.maps is not None:
            maps = self.maps[tuple(pointers[i] for i in self.mapped)]
        self.start(stream, maps + words + self.tail)


def samples_of(config: RingConfig, groups: Groups) -> Samples:
    """What passes through the ring."""
    sizes = groups.batch, groups.num_groups, groups.channels, groups.positions
    return Samples(*sizes, ITEM_SIZE[config.dtype], len(config.reads))


def slice_maps(config: RingConfig, groups: Groups, part: Samples) -> list[TensorMapSpec]:
    """Of each tensor that is read; a box is what a slot has of a slice."""
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
    if not (groups.channels_last and aligned and groups.aligned):
        return None
    width = groups.num_groups * groups.channels
    dense = all(strides.position == width for strides in groups.strides.values())
    hopper = architecture_of(device).wgmma  # setmaxnreg exists in sm_90a alone
    if not (dense and hopper and launches_cooperatively(device)):
        return None
    mappable = all(0 < step < MAX_MAP_STRIDE for step in batch_steps(config, groups))
    ring = ring_shape(samples_of(config, groups), multiprocessors(device), mappable)
    return ring and RingLaunch(config, groups, eps, ring, device)
