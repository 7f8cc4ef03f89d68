"""GroupNorm: what calls of one signature share, and how they run."""

from collections.abc import Mapping
from typing import Any

from .array import Array, View
from .checks import require_grid
from .groups import Groups, dense_like, layout_of
from .kernel_launch import Launch, Plan, multiprocessors
from .kernels import group_norm as kernels
from .norm_params import GroupNormBwdParams, GroupNormFwdParams
from .norm_plan import sum_launch

SPLIT_BLOCKS = 16  # for each multiprocessor, of the kernels that share groups between blocks
MAX_SPLITS = 256


class ForwardPlan(Plan):
    """The one or two forward kernels for one signature."""

    def __init__(
        self,
        function: str,
        library: Any,
        views: Mapping[str, View],
        aligned: bool,
        num_groups: int,
        eps: float,
        activation: str,
    ) -> None:
        x, weight = views["x"], views["weight"]
        super().__init__(x.device)
        self.library, self.shape = library, x.shape
        self.stats_shape = (x.shape[0], num_groups, 2)
        self.strides, self.partials_shape = dense_like(x, layout_of(function, "x", x)), None
        self.empty = 0 in x.shape
        if self.empty:
            return
        groups = Groups(function, views | {"out": x._replace(strides=self.strides)}, num_groups)
        kind = (x.dtype, weight.dtype, activation, groups.channels_last)
        picked = kernels.forward(*kind, groups.size, aligned and groups.aligned)
        grid = groups.batch * num_groups
        if isinstance(picked, tuple):
            pieces = -(-groups.size // picked[0].piece)
            groups.splits = splits_of(pieces, grid, x.device)
            grid *= groups.splits
            self.partials_shape = (grid, 3)
        else:
            picked = (picked,)
        params = GroupNormFwdParams(**groups.strides, shape=groups.shape(eps))
        grid = require_grid(function, grid, x.shape)
        self.launches = [Launch(config, x.device, grid, params) for config in picked]

    def run(
        self, x: Array, pointers: tuple[int, int, int], need_stats: bool
    ) -> tuple[Array, Array | None]:
        """``pointers`` of x, weight, bias."""
        library, pointer = self.library, self.library.pointer
        out = library.empty_strided(self.shape, self.strides, x)
        stats = library.empty_float32(self.stats_shape, x) if need_stats else None
        if self.empty:
            return out, library.zeros_like(stats) if need_stats else None
        partials = None
        if self.partials_shape is not None:
            partials = library.empty_float32(self.partials_shape, x)
        arguments = (
            *pointers,
            pointer(out),
            pointer(stats) if need_stats else 0,
            0 if partials is None else pointer(partials),
        )
        stream = library.stream(self.device_id)
        for launch in self.launches:
            launch(stream, *arguments)
        return out, stats


class BackwardPlan(Plan):
    """The backward kernels for one signature."""

    def __init__(
        self,
        function: str,
        library: Any,
        views: Mapping[str, View],
        aligned: bool,
        activation: str,
    ) -> None:
        x, weight = views["x"], views["weight"]
        super().__init__(x.device)
        self.library, self.shape = library, x.shape
        self.strides = dense_like(x, layout_of(function, "x", x))
        self.empty = 0 in x.shape
        if self.empty:
            return
        num_groups, channels = views["stats"].shape[1], x.shape[1]
        tensors = {"x": x, "dout": views["dout"], "dx": x._replace(strides=self.strides)}
        groups = Groups(function, tensors, num_groups)
        kind = (x.dtype, weight.dtype, activation, groups.channels_last)
        picked = kernels.backward(*kind, groups.rows, groups.columns, aligned and groups.aligned)
        grids = [groups.batch * num_groups]
        if isinstance(picked, tuple):
            sums, _ = picked
            steps = groups.rows if groups.channels_last else groups.columns // sums.vector
            at_once = sums.threads // 32 if groups.channels_last else sums.threads
            blocks = groups.batch * -(-channels // sums.channels)
            groups.splits = splits_of(-(-steps // (4 * at_once)), blocks, x.device)
            grids = [blocks * groups.splits, grids[0] * groups.splits]
        else:
            picked = (picked,)
        params = GroupNormBwdParams(**groups.strides, shape=groups.shape(0.0))
        self.launches = [
            Launch(config, x.device, require_grid(function, grid, x.shape), params)
            for config, grid in zip(picked, grids)
        ]
        self.partials_shape = (2, groups.batch * groups.splits, channels)
        self.sum = sum_launch(weight, x.device, self.partials_shape)

    def run(
        self, x: Array, weight: Array, bias: Array, pointers: tuple[int, ...]
    ) -> tuple[Array, Array, Array]:
        """``pointers`` of dout, x, weight, bias, stats."""
        library, pointer = self.library, self.library.pointer
        dx = library.empty_strided(self.shape, self.strides, x)
        if self.empty:
            return dx, library.zeros_like(weight), library.zeros_like(bias)
        dweight, dbias = (library.empty(self.shape[1:2], (1,), y) for y in (weight, bias))
        partials = library.empty_float32(self.partials_shape, x)
        stream, shares = library.stream(self.device_id), pointer(partials)
        for launch in self.launches:
            launch(stream, *pointers, pointer(dx), shares)
        self.sum(stream, shares, pointer(dweight), pointer(dbias))
        return dx, dweight, dbias


def splits_of(pieces: int, blocks: int, device: int) -> int:
    """How many blocks share one block's work of so many pieces, to keep the GPU busy."""
    wanted = -(-SPLIT_BLOCKS * multiprocessors(device) // blocks)
    return max(1, min(pieces, wanted, MAX_SPLITS))
