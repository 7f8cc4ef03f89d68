"""GroupNorm: what calls of one signature share, and how they run."""

from collections.abc import Mapping
from typing import Any

from ..runtime.array import Array, View
from ..runtime.launch import Launch
from ..runtime.operation import Plan
from ..runtime.scratch import tile_counters
from ..runtime.structs import header
from .group_norm_ring import GroupNormBwdRing, GroupNormFwdRing, ring_launch
from .group_norm_work import Work
from .groups import Groups, dense_like
from .plan import sum_launch

structs = header("norm/params.cuh")


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
        self.strides = dense_like(x)
        self.empty = 0 in x.shape
        if self.empty:
            return
        groups = Groups(function, views | {"out": x._replace(strides=self.strides)}, num_groups)
        kind = (x.dtype, weight.dtype, activation)
        self.ring = ring_launch(GroupNormFwdRing(*kind), groups, eps, x.device, aligned)
        if self.ring:
            return
        work = Work(function, "forward", views, groups, kind, aligned)
        # Of a piece at most one record for each of its warps, or for each of its groups.
        records = max(work.config.threads // 32, work.tiling.groups)
        self.partials_shape = (work.units * work.unit_blocks * records, 3)
        shape = groups.shape(eps, work.config.vector)
        params = structs.GroupNormFwdParams(
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
        self.strides = dense_like(x)
        self.empty = 0 in x.shape
        if self.empty:
            return
        num_groups, channels = views["stats"].shape[1], x.shape[1]
        tensors = {"x": x, "dout": views["dout"], "dx": x._replace(strides=self.strides)}
        groups = Groups(function, tensors, num_groups)
        kind = (x.dtype, weight.dtype, activation)
        self.counters = self.sum = None
        self.ring = ring_launch(GroupNormBwdRing(*kind), groups, 0.0, x.device, aligned)
        if self.ring:
            self.partials_shape = (2, self.ring.rows, channels)
            self.sum = sum_launch(weight, x.device, self.partials_shape)
            return
        work = Work(function, "backward", views, groups, kind, aligned)
        # Of a piece two sums for each of its warps, or for each of its channels.
        records = max(work.config.threads // 32, work.tiling.channels)
        self.pieces_shape = (work.units * work.unit_blocks * records, 2)
        self.means_shape = (x.shape[0], num_groups, 2)
        params = structs.GroupNormBwdParams(
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
