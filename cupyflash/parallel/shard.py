"""`Shard`: which tokens of packed sequences this rank holds, and how they come together again."""

import copy
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.checks import plain_integer, plain_real, short
from .agreement import agree
from .tokens import Tokens
from .transport import Failures, Team, all_gather, number, reduce_scatter


class Shard:
    """The division of packed sequences among the ranks of a group of torch.distributed.

    Every rank makes the same shards in the same order, as it takes part in the same collectives.

    Args:
        lengths: tokens of each packed sequence, the same on all ranks; any numbers, 0 among them.
        group: a process group, the default one if None; or a DeviceMesh of one axis, or of the
            axes "keys" and "heads", where ranks of one host follow each other along "heads".
        zigzag: each rank holds two parts of a sequence, from both ends, so that ranks have the same
            work under a causal mask; else one.
        slack: how much more than the mean a rank may have, of tokens and of pairs of a query and a
            key: 0.1 is a tenth. Then only the longest sequences are divided, as few as possible,
            and the others stay whole on one rank each (over a mesh of two axes, on the ranks of one
            host), so that their keys do not travel. It pays for many short sequences, of which 0.1
            often leaves few or none to be divided; ranks then have different numbers of tokens.
            With 0 all sequences are divided, and ranks differ by one token.

    Attributes:
        lengths: a tuple of integers.
        rank, ranks: the number of this rank, and how many there are.
        tokens: the `Tokens` of the division, which know what each rank has.

    Raises:
        TypeError, ValueError: lengths, slack, a mesh of other axes; ValueError on all ranks if they
            do not have the same lengths.
        RankError: a rank has failed or left.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        group: Any = None,
        *,
        zigzag: bool = True,
        slack: float = 0.0,
    ) -> None:
        function = "parallel.Shard"
        self.teams, self.members = _teams(function, group)
        self.failures = Failures(self.teams, self.members)
        self.rank, self.ranks = number(self.teams), self.failures.ranks
        error = None
        try:
            self.lengths, self.slack = _lengths(function, lengths), _slack(function, slack)
        except (TypeError, ValueError) as raised:
            self.lengths, self.slack, error = (), 0.0, raised
        facts = f"lengths {short(self.lengths)} ({hash(self.lengths)}), zigzag {bool(zigzag)}, "
        facts += f"slack {self.slack}"
        agree(function, self.teams, self.failures, facts, error)
        team = self.teams[0].size if len(self.teams) > 1 else 1
        self.tokens = Tokens.of(self.lengths, self.ranks, bool(zigzag), slack=self.slack, team=team)
        self.kept: dict[Hashable, Any] = {}  # plans of attention
        self.agreed = False

    def __repr__(self) -> str:
        return f"Shard({self.total} tokens, rank {self.rank} of {self.ranks}: {len(self)})"

    def __len__(self) -> int:
        """Tokens of this rank."""
        return int(self.tokens.counts[self.rank])

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return self.tokens.total

    def index(self, device: Any = "cpu") -> Tensor:
        """int64 (tokens of this rank,), their places among all tokens, which ascend."""
        return self.on(device, "index", lambda: self.tokens.index(self.rank))

    def positions(self, device: Any = "cpu") -> Tensor:
        """int64 (tokens of this rank,), their positions in their sequences, from 0."""
        return self.on(device, "positions", lambda: self.tokens.positions(self.rank))

    def order(self, device: Any = "cpu") -> Tensor:
        """int64 (all tokens,), the `index` of rank 0, of rank 1, and so on."""
        indices = (self.tokens.index(rank) for rank in range(self.ranks))
        return self.on(device, "order", lambda: numpy.concatenate(list(indices)))

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """The tokens of this rank, of a tensor that has all tokens along ``dim``.

        Its gradient is 0 at the tokens of other ranks.
        """
        if x.shape[dim] != self.total:
            fact = f"x must have the {self.total} tokens of all ranks along axis {dim}"
            raise ValueError(f"parallel.Shard.take: {fact}, got {tuple(x.shape)}")
        return x.index_select(dim, self.index(x.device))

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """All tokens in their order, of a tensor that has the tokens of this rank along ``dim``.

        The gradient of x is the sum of what all ranks have for its tokens. So if every rank
        computes the same loss from the result, the sum counts it once for each rank: divide it by
        ``ranks``.
        """
        if x.shape[dim] != len(self):
            fact = f"x must have the {len(self)} tokens of rank {self.rank} along axis {dim}"
            raise ValueError(f"parallel.Shard.gather: {fact}, got {tuple(x.shape)}")
        return _Gather.apply(x.movedim(dim, 0), self).movedim(0, dim)

    def of_rows(self, rows: int) -> "Shard":
        """The shard of a batch of so many rows, one after another, each divided like this one."""
        if rows == 1:
            return self
        key = ("rows", rows)
        if key not in self.kept:
            shard = self.kept[key] = copy.copy(self)
            shard.lengths, shard.tokens = rows * self.lengths, self.tokens.of_rows(rows)
            shard.kept, shard.agreed = {}, False
        return self.kept[key]

    def on(self, device: Any, name: Hashable, make: Any) -> Tensor:
        """A tensor from the array that ``make`` returns, kept for each device."""
        key = (name, torch.device(device))
        if key not in self.kept:
            with torch.inference_mode(False):  # later calls may record a gradient
                self.kept[key] = torch.from_numpy(make()).to(device)
        return self.kept[key]


class _Gather(torch.autograd.Function):
    """(tokens of this rank, ...) -> (all tokens, ...); ranks pad to the longest of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        rows = int(shard.tokens.counts.max())
        padded = x.new_zeros((rows, *x.shape[1:]))
        padded[: len(x)] = x
        with shard.failures.reported("parallel.Shard.gather"):
            for team in shard.teams:
                padded = all_gather(padded, team, shard.failures).wait()
        return padded.index_select(0, _places(shard, x.device))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        rows = int(shard.tokens.counts.max())
        dtype = torch.promote_types(dy.dtype, torch.float32)  # sums over ranks
        sums = dy.new_zeros((shard.ranks * rows, *dy.shape[1:]), dtype=dtype)
        sums[_places(shard, dy.device)] = dy.to(dtype)
        with shard.failures.reported("parallel.Shard.gather, backward"):
            for team in reversed(shard.teams):
                sums = reduce_scatter(sums, team, shard.failures).wait()
        return sums[: len(shard)].to(dy.dtype), None


def _places(shard: Shard, device: torch.device) -> Tensor:
    """int64 (all tokens,), the row of each among the padded tokens of all ranks."""

    def make() -> numpy.ndarray:
        rows, places = int(shard.tokens.counts.max()), numpy.empty(shard.total, numpy.int64)
        for rank in range(shard.ranks):
            index = shard.tokens.index(rank)
            places[index] = rank * rows + numpy.arange(len(index))
        return places

    return shard.on(device, "places", make)


def _lengths(function: str, lengths: Any) -> tuple[int, ...]:
    if isinstance(lengths, Tensor) and lengths.device.type != "cpu":
        fact = "lengths must lie in the host's memory, as reading them would wait for the GPU"
        raise TypeError(f"{function}: {fact}, got a tensor on {lengths.device}")
    if not isinstance(lengths, Sequence | Tensor | numpy.ndarray) or isinstance(lengths, str):
        fact = "lengths must be the integers of all packed sequences"
        raise TypeError(f"{function}: {fact}, got {short(lengths)}")
    plain = functools.partial(plain_integer, function, "each of lengths")
    lengths = tuple(map(plain, lengths))
    if min(lengths, default=0) < 0:
        raise ValueError(f"{function}: lengths must be at least 0, got {short(lengths)}")
    return lengths


def _slack(function: str, slack: Any) -> float:
    slack = plain_real(function, "slack", slack)
    if not 0 <= slack < math.inf:
        raise ValueError(f"{function}: slack must be at least 0, and finite, got {slack}")
    return slack


def _teams(function: str, group: Any) -> tuple[tuple[Team, ...], list[int]]:
    """The team of a group, or of a mesh of two axes that of "heads", then that of "keys"; and the
    numbers of all ranks in the default group.
    """
    if not hasattr(group, "get_group"):  # no DeviceMesh
        group = dist.group.WORLD if group is None else group
        return (Team.of(group),), dist.get_process_group_ranks(group)
    members = group.mesh.flatten().tolist()
    if group.ndim == 1:
        return (Team.of(group.get_group()),), members
    if group.mesh_dim_names != ("keys", "heads"):
        fact = 'a mesh must have one axis, or the axes "keys" and "heads"'
        raise ValueError(f"{function}: {fact}, got {group.mesh_dim_names or group.ndim}")
    return (Team.of(group.get_group("heads")), Team.of(group.get_group("keys"))), members
