"""GroupNorm: what calls of one signature share, and how they run."""

from collections.abc import Mapping
from typing import Any

from ..array import Array, View
from ..checks import require_grid
from ..clusters import clusters_at_once
from ..kernel_launch import Launch, Plan, capability_of, multiprocessors
from ..tile_counter import tile_counters
from . import group_norm_kernels as kernels
from . import three_steps
from .group_norm_ring import GroupNormBwdRing, GroupNormFwdRing, ring_launch
from .groups import MAX_GROUP, Groups, dense_like, layout_of
from .one_step import OneStepConfig
from .params import ChannelTiling, GroupNormBwdParams, GroupNormFwdParams
from .plan import sum_launch

MAX_WAVES = 8  # of blocks that take turns


class Work:
    """The kernels for groups, and how their blocks share them.

    Attributes:
        config: one of the kernels.
        unit_blocks: blocks that share a unit in three steps, 0 in one.
        shares: into how many parts blocks that take turns have the samples.
        rows: what it leaves to be added up for each channel.
        tiling: with channels last, else empty.
        launches: (configuration, blocks) of each.
    """

    def __init__(
        self, function: str, direction: str, views: Mapping[str, View], groups: Groups, kind: tuple,
        aligned: bool,
    ) -> None:  # fmt: skip
        halves, aligned = aligned and groups.halves, aligned and groups.aligned
        self.units, x = groups.batch, views["x"]
        self.unit_blocks, self.tiling = 0, ChannelTiling()
        self.shares = self.rows = groups.batch
        if groups.channels_last:
            sizes = groups.num_groups, groups.channels
            pick = getattr(three_steps, f"{direction}_last")
            self.config = pick(kind, aligned)
            tiling = three_steps.channel_tiling(*sizes, self.config.vector)
            if tiling is None:
                self.config = pick(kind, False)
                tiling = three_steps.channel_tiling(*sizes, 1)
            self.tiling = tiling
            most = self.config.blocks * multiprocessors(x.device)
            self.unit_blocks = self.config.pieces(tiling, groups.positions, most // self.units)
            sums = -(-self.units * groups.num_groups // (self.config.threads // 32))
        else:
            self.units *= groups.num_groups
            pick = getattr(kernels, direction)
            size = groups.size if groups.dense else MAX_GROUP
            self.config = pick(kind, size, aligned, halves, capability_of(x.device))
            if isinstance(self.config, OneStepConfig):
                blocks = -(-self.units // self.config.groups)
                if self.config.takes_turns:
                    at_once = multiprocessors(x.device) * self.config.blocks
                    turns = -(-groups.batch // self.config.groups)
                    self.shares = shares_of(turns, groups.num_groups, at_once)
                    blocks = self.shares * groups.num_groups
                elif self.config.cluster > 1:
                    blocks = min(blocks, clusters_at_once(self.config, x.device))
                    # Of side by side groups, clusters have ``least`` or one more.
                    least = self.units // blocks
                    self.shares = -(-(groups.batch - 1) // least) + 1
                self.rows = self.shares * self.config.cluster
                require_grid(function, self.units + self.config.groups, x.shape)
                blocks = require_grid(function, blocks * self.config.cluster, x.shape)
                self.launches = [(self.config, blocks)]
                return
            self.unit_blocks = self.config.pieces(groups.channels, groups.positions)
            sums = self.units
        blocks = require_grid(function, self.units * self.unit_blocks, x.shape)
        self.launches = list(zip(self.config.steps(), (blocks, sums, blocks)))


def shares_of(turns: int, num_groups: int, at_once: int) -> int:
    """Into how many blocks to part the ``turns`` of each group, of which ``at_once`` can run.

    A block costs as much as its turns and one more, and the blocks take ``waves`` of that.
    """
    waves = range(1, MAX_WAVES + 1)
    possible = {min(turns, max(1, wave * at_once // num_groups)) for wave in waves}
    cost = lambda n: -(-n * num_groups // at_once) * (-(-turns // n) + 1)  # noqa: E731
    return min(sorted(possible), key=cost)


class ForwardPlan(Plan):
    """The forward kernel for one signature; channels last, one that reads once if possible."""

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
        self.strides = dense_like(x, layout_of(function, "x", x))
        self.empty = 0 in x.shape
        if self.empty:
            return
        groups = Groups(function, views | {"out": x._replace(strides=self.strides)}, num_groups)
        kind = (x.dtype, weight.dtype, activation)
        self.ring = ring_launch(GroupNormFwdRing(*kind), x, groups, eps, aligned)
        if self.ring:
            return
        work = Work(function, "forward", views, groups, kind, aligned)
        # Of a piece at most one record for each of its warps, or for each of its groups.
        records = max(work.config.threads // 32, work.tiling.groups)
        self.partials_shape = (work.units * work.unit_blocks * records, 3)
        shape = groups.shape(eps, work.config.vector)
        params = GroupNormFwdParams(
            **groups.strides,
            shape=shape,
            unit_blocks=work.unit_blocks,
            shares=work.shares,
            tiling=work.tiling,
        )
        self.launches = [Launch(config, x.device, n, params) for config, n in work.launches]

    def run(
        self, x: Array, pointers: tuple[int, int, int], need_stats: bool
    ) -> tuple[Array, Array | None]:
        """``pointers`` of x, weight, bias."""
        library, pointer = self.library, self.library.pointer
        out = library.empty_strided(self.shape, self.strides, x)
        if self.empty:
            stats = library.empty_float32(self.stats_shape, x) if need_stats else None
            return out, library.zeros_like(stats) if need_stats else None
        in_steps = not self.ring and len(self.launches) > 1
        need_stats = need_stats or in_steps
        stats = library.empty_float32(self.stats_shape, x) if need_stats else None
        partials = library.empty_float32(self.partials_shape, x) if in_steps else None
        stream = library.stream(self.device_id)
        arguments = (
            *pointers,
            pointer(out),
            pointer(stats) if need_stats else 0,
        )
        if self.ring:
            self.ring.run(library, stream, x, arguments)
            return out, stats
        for launch in self.launches:
            launch(stream, *arguments, pointer(partials) if in_steps else 0)
        return out, stats


class BackwardPlan(Plan):
    """The backward kernel for one signature, as `ForwardPlan`, and the sum over the samples."""

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
        kind = (x.dtype, weight.dtype, activation)
        self.counters = self.sum = None
        self.ring = ring_launch(GroupNormBwdRing(*kind), x, groups, 0.0, aligned)
        if self.ring:
            self.partials_shape = (2, self.ring.rows, channels)
            self.sum = sum_launch(weight, x.device, self.partials_shape)
            return
        work = Work(function, "backward", views, groups, kind, aligned)
        # Of a piece two sums for each of its warps, or for each of its channels.
        records = max(work.config.threads // 32, work.tiling.channels)
        self.pieces_shape = (work.units * work.unit_blocks * records, 2)
        self.means_shape = (x.shape[0], num_groups, 2)
        params = GroupNormBwdParams(
            **groups.strides,
            shape=groups.shape(0.0, work.config.vector),
            unit_blocks=work.unit_blocks,
            shares=work.shares,
            tiling=work.tiling,
        )
        self.launches = [Launch(config, x.device, n, params) for config, n in work.launches]
        self.partials_shape = (2, work.rows, channels)
        # In one step the blocks count themselves, and the last of a group adds up.
        if len(self.launches) == 1:
            self.counters = tile_counters(x.device)
        else:
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
        stream, shares, workspace = library.stream(self.device_id), pointer(partials), (0, 0)
        sums, counters = (pointer(dweight), pointer(dbias)), 0
        if self.ring:
            self.ring.run(library, stream, x, (*pointers, pointer(dx), shares))
            self.sum(stream, shares, *sums)
            return dx, dweight, dbias
        if self.counters:
            counters, _own = self.counters.address(stream, library, x)
        else:
            pieces = library.empty_float32(self.pieces_shape, x)
            means = library.empty_float32(self.means_shape, x)
            workspace = pointer(pieces), pointer(means)
        for launch in self.launches:
            launch(stream, *pointers, pointer(dx), *sums, counters, shares, *workspace)
        if self.sum:
            self.sum(stream, shares, *sums)
        return dx, dweight, dbias
