"""GroupNorm: which kernels, and how their blocks share the groups."""

from collections.abc import Mapping

from ..runtime.array import View
from ..runtime.checks import require_grid
from ..runtime.gpu import capability_of, multiprocessors
from ..runtime.launch import clusters_at_once
from ..runtime.structs import header
from . import group_norm_kernels as kernels
from . import three_steps
from .groups import MAX_GROUP, Groups
from .one_step import OneStepConfig

structs = header("norm/params.cuh")

MAX_WAVES = 8  # of blocks that take turns


class Work:
    """The kernels for groups, and how their blocks share them.

    Attributes:
        config: one of the kernels.
        unit_blocks: blocks that share a unit in three steps, 0 in one.
        shares: into how many parts blocks that take turns have the samples; of clusters, how many
            have samples of one group at most.
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
        self.unit_blocks, self.tiling = 0, structs.ChannelTiling()
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
