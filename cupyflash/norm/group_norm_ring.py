"""GroupNorm with channels last, one read: blocks that share a sample; `group_ring.cuh`."""

import ctypes
import dataclasses
from typing import Any, ClassVar

from ..array import Array, View
from ..attention.problem import MAX_MAP_STRIDE
from ..kernel_config import ITEM_SIZE, KernelConfig
from ..kernel_launch import Launch, call_fields, capability_of, multiprocessors
from ..tensor_map import TensorMaps, TensorMapSpec
from ..tile_counter import NULL, tile_counters
from .groups import Groups
from .params import (
    GroupNormBwdRingBase,
    GroupNormBwdRingParams,
    GroupNormFwdRingBase,
    GroupNormFwdRingParams,
    GroupRing,
)
from .plan import launches_cooperatively
from .ring_shape import CONSUMERS, RING_BYTES, RingShape, Samples, ring_shape

CAPABILITY = (9, 0)  # setmaxnreg exists where code is made for one architecture only
OTHERS = 256  # as in group_ring.cuh: threads that neither collect nor apply
RECORD_BYTES = 16


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
    base: ClassVar[type[ctypes.Structure]] = GroupNormFwdRingBase
    reads: ClassVar[tuple[str, ...]] = ("x",)


class GroupNormBwdRing(RingConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_ring_sm90.cu"
    params: ClassVar[type[ctypes.Structure]] = GroupNormBwdRingParams
    base: ClassVar[type[ctypes.Structure]] = GroupNormBwdRingBase
    reads: ClassVar[tuple[str, ...]] = ("x", "dout")


class RingLaunch(Launch):
    """All blocks are on the GPU at once, so that they can wait for each other.

    Attributes:
        rows: blocks that have positions.
    """

    has_scratch = True

    def __init__(
        self, config: RingConfig, groups: Groups, eps: float, samples: Samples, ring: RingShape,
        device: int,
    ) -> None:  # fmt: skip
        vector = 16 // samples.item
        params = config.base(
            **groups.strides, shape=groups.shape(eps, vector), ring=GroupRing(*ring)
        )
        blocks = multiprocessors(device) // ring.teams * ring.teams
        super().__init__(config, device, blocks, params)
        self.tail += bytes(config.params.padding.size)
        self.maps = None
        if ring.slices > 1:
            self.maps = slice_maps(config, groups, samples.parted(ring.slices), device)
        self.no_maps = bytes(config.params.maps.size)
        names = call_fields(params)
        self.mapped = [names.index(name) for name in config.reads]
        self.rows = ring.teams * ring.blocks
        found = RECORD_BYTES * ring.teams * ring.flight * samples.groups // ring.slices
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
        words = self.pack(*pointers, *(base + offset for offset in self.offsets))
        maps = self.no_maps
        if self.maps is not None:
            maps = self.maps[tuple(pointers[i] for i in self.mapped)]
        self.start(stream, maps + words + self.tail)


def slice_maps(config: RingConfig, groups: Groups, slices: Samples, device: int) -> TensorMaps:
    """Of each tensor that is read; a box is what a slot has of it."""
    columns = slices.columns * slices.slices
    row = columns * slices.item
    dims = columns, slices.positions, 1, slices.batch
    box = {"box_rows": slices.slot_positions, "box_columns": slices.columns, "swizzled": False}
    steps = [batch_step(groups, name) * slices.item for name in config.reads]
    return TensorMaps(
        [TensorMapSpec(config.dtype, dims, (row, row, n), **box) for n in steps], device
    )


def batch_step(groups: Groups, name: str) -> int:
    """Elements between samples; one that a map may have where there is a single sample."""
    sample = groups.size * groups.num_groups
    return groups.strides[f"{name}_strides"].batch if groups.batch > 1 else sample


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
    samples = Samples(*sizes, ITEM_SIZE[x.dtype], len(config.reads))
    steps = [batch_step(groups, name) * samples.item for name in config.reads]
    mappable = all(0 < step < MAX_MAP_STRIDE for step in steps)
    ring = ring_shape(samples, multiprocessors(x.device), mappable)
    return ring and RingLaunch(config, groups, eps, samples, ring, x.device)
