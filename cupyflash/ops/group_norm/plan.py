"""GroupNorm: what calls of one signature share, and how they run."""

from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.gpu import capability_of, multiprocessors
from ...runtime.launch import Launch, clusters_at_once
from ...runtime.operation import Plan
from ...runtime.scratch import tile_counters
from ...runtime.structs import header
from ..norm.plan import sum_launch
from . import kernels
from .groups import MAX_GROUP, Groups, dense_like
from .kernels import GroupConfig, GroupNormBwd, GroupNormFwdCluster, OneStepConfig
from .steps import Kind, three_steps

structs = header("group_norm/params.cuh")

MAX_WAVES = 8  # rounds of blocks that run one after the other


class ForwardPlan(Plan):
    """The forward kernel for one signature: one launch, or three that read twice."""

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
        work = Work(function, False, x, groups, kind, aligned)
        self.partials_shape = (work.group_records * groups.batch * num_groups, 3)
        params = work.params(structs.GroupNormFwdParams, groups, eps)
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
        in_steps = len(self.launches) > 1
        need_stats = need_stats or in_steps
        stats = library.empty_float32(self.stats_shape, x) if need_stats else None
        partials = library.empty_float32(self.partials_shape, x) if in_steps else None
        stream = library.stream(self.device_id)
        arguments = (
            *pointers,
            pointer(out),
            pointer(stats) if need_stats else 0,
            pointer(partials) if in_steps else 0,
        )
        for launch in self.launches:
            launch.start(stream, launch.argument(*arguments))
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
        tensors = {"x": x, "dout": views["dout"], "out": x._replace(strides=self.strides)}
        groups = Groups(function, tensors, num_groups)
        kind = (x.dtype, weight.dtype, activation)
        self.counters = self.sum = None
        work = Work(function, True, x, groups, kind, aligned)
        self.pieces_shape = (work.channel_records * x.shape[0], 2)
        self.means_shape = (x.shape[0], num_groups, 2)
        params = work.params(structs.GroupNormBwdParams, groups, 0.0)
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
        if self.counters:
            counters, _own = self.counters.address(stream, library, x)
        else:
            pieces = library.empty_float32(self.pieces_shape, x)
            means = library.empty_float32(self.means_shape, x)
            workspace = pointer(pieces), pointer(means)
        for launch in self.launches:
            values = (*pointers, pointer(dx), *sums, counters, shares, *workspace)
            launch.start(stream, launch.argument(*values))
        if self.sum:
            self.sum.start(stream, self.sum.argument(shares, *sums))
        return dx, dweight, dbias


class Work:
    """The kernels for groups, and how their blocks share them.

    Attributes:
        config: one of the kernels.
        launches: (configuration, blocks) of each.
        tiling: of three steps, else empty.
        shares: in one step: how many blocks or clusters have samples of one group, at most.
        rows: partial sums of dweight and dbias for each channel.
        group_records, channel_records: partial sums of three steps: of a group in the forward, of
            all channels of a sample in the backward.
    """

    def __init__(
        self, function: str, backward: bool, x: View, groups: Groups, kind: Kind, aligned: bool
    ) -> None:
        self.tiling, self.shares, self.rows = structs.StepTiling(), 0, groups.batch
        self.group_records = self.channel_records = 0
        halves, aligned = aligned and groups.halves, aligned and groups.aligned
        config = None
        if not groups.nhwc:
            size = groups.size if groups.dense else MAX_GROUP
            capability = capability_of(x.device)
            spread = multiprocessors(x.device) // (groups.batch * groups.num_groups)
            config = kernels.one_step(backward, kind, size, aligned, halves, capability, spread)
        if config:
            self.config = config
            self._one_step(function, x, groups)
            return
        for packs in (aligned, False):
            self.config = three_steps(backward, kind, packs, groups.nhwc)
            most = self.config.blocks * multiprocessors(x.device) // groups.batch
            tiling = self.config.tiling(groups.num_groups, groups.channels, groups.positions, most)
            if tiling:
                break
        self._three_steps(function, x, groups, tiling)

    def params(self, struct: type, groups: Groups, eps: float) -> Any:
        """The parameters of the kernels but for the pointers."""
        shape = groups.shape(eps, self.config.vector)
        return struct(**groups.strides, shape=shape, tiling=self.tiling, shares=self.shares)

    def _one_step(self, function: str, x: View, groups: Groups) -> None:
        config: OneStepConfig = self.config
        units = groups.batch * groups.num_groups
        if isinstance(config, GroupConfig):
            at_once = multiprocessors(x.device) * config.blocks
            turns = -(-groups.batch // config.rows)
            self.shares = turns
            if config.ahead or type(config) is GroupNormBwd:
                self.shares = shares_of(turns, groups.num_groups, at_once)
            blocks = self.shares * groups.num_groups
        elif type(config) is GroupNormFwdCluster:
            blocks = units
        else:
            blocks = min(units, clusters_at_once(config, x.device))
            # Each cluster has ``least`` neighbouring groups or one more.
            least = units // blocks
            self.shares = -(-(groups.batch - 1) // least) + 1
        self.rows = self.shares * config.cluster
        require_grid(function, units + config.rows, x.shape)
        self.launches = [(config, require_grid(function, blocks * config.cluster, x.shape))]

    def _three_steps(
        self, function: str, x: View, groups: Groups, tiling: structs.StepTiling
    ) -> None:
        self.tiling, records = tiling, tiling.blocks * self.config.records
        num_groups, channels = groups.num_groups, groups.channels * groups.num_groups
        if groups.nhwc:
            shares, units = tiling.blocks // tiling.tiles, groups.batch
            self.group_records, self.channel_records = shares * tiling.parts, shares * channels
        else:
            units = groups.batch * num_groups
            self.group_records, self.channel_records = records, records * num_groups
        blocks = require_grid(function, units * tiling.blocks, x.shape)
        sums = self.config.gather_blocks(groups.batch * num_groups)
        self.launches = list(zip(self.config.steps(), (blocks, sums, blocks)))


def shares_of(turns: int, num_groups: int, at_once: int) -> int:
    """Into how many blocks to part the ``turns`` of each group, of which ``at_once`` can run.

    A block costs as much as its turns and one more, and the blocks take ``waves`` of that.
    """
    waves = range(1, MAX_WAVES + 1)
    possible = {min(turns, max(1, wave * at_once // num_groups)) for wave in waves}
    cost = lambda n: -(-n * num_groups // at_once) * (-(-turns // n) + 1)  # noqa: E731
    return min(sorted(possible), key=cost)
