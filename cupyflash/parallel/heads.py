"""Heads that travel: ranks turn (their tokens, all heads) into (all tokens, some heads) and back.

An all-to-all does so before and after attention of whole sequences, so that each head is computed
as on one GPU. Together with `over_keys`: an all-to-all among the ranks of a team, then keys from
the other teams.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from ..ops.attention.operations import FORWARD
from ..ops.attention.options import Extras, plain_options
from ..ops.attention.score_text import Text
from .pieces import FUNCTION
from .transport import Failures, Team, all_to_all


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """The all-to-all of a team, as tensors on one device.

    Attributes:
        counts: tokens of each rank of the team.
        order: int64, the row of each token of the team, in the order of their numbers, among the
            tokens of its ranks one after another.
        place: int64, the inverse of ``order``.
    """

    team: Team
    failures: Failures
    counts: list[int]
    order: Tensor
    place: Tensor

    @classmethod
    def of(
        cls, team: Team, failures: Failures, indices: list[numpy.ndarray], device: torch.device
    ) -> "Heads":
        """The exchange of a team whose ranks hold the tokens with these numbers."""
        place = torch.from_numpy(numpy.concatenate(indices)).argsort()
        order = torch.empty_like(place)
        order[place] = torch.arange(len(place))
        return cls(team, failures, [len(x) for x in indices], place.to(device), order.to(device))

    def to_heads(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """(tokens of this rank, ranks, columns) -> (tokens of the team, columns), of each."""
        rows = torch.cat(list(xs), dim=2).transpose(0, 1).contiguous().flatten(0, 1)
        send = [len(xs[0])] * self.team.size
        rows = all_to_all(rows, send, self.counts, self.team, self.failures).wait()
        return list(rows.index_select(0, self.order).split([x.shape[2] for x in xs], dim=1))

    def to_tokens(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The way back, (tokens of the team, columns) -> (tokens of this rank, ranks, columns)."""
        mine, size = self.counts[self.team.rank], self.team.size
        rows = torch.cat(list(xs), dim=1).index_select(0, self.place)
        rows = all_to_all(rows, self.counts, [mine] * size, self.team, self.failures).wait()
        rows = rows.unflatten(0, (size, mine)).transpose(0, 1)
        return list(rows.split([x.shape[1] for x in xs], dim=2))


class Turn(torch.autograd.Function):
    """`to_heads` or `to_tokens` of `Heads` or `CopiedHeads`; each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, heads: Any, to_heads: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.rest = heads, to_heads
        with heads.failures.reported(FUNCTION):
            return tuple(heads.to_heads(xs) if to_heads else heads.to_tokens(xs))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        heads, to_heads = ctx.rest
        return None, None, *Turn.apply(heads, not to_heads, *dys)


def split_heads(heads: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the tokens of the team, with the heads of this rank.

    With fewer key heads than ranks, several ranks get the same one; its gradient is the sum of
    theirs.
    """
    size = heads.team.size
    columns = []
    for x in (q, k, v):
        if x.shape[1] % size:
            x = x[:, :, None].expand(-1, -1, size // x.shape[1], -1).flatten(1, 2)
        columns.append(x.reshape(len(x), size, x.shape[1] // size * x.shape[2]))
    parts = Turn.apply(heads, True, *columns)
    return tuple(x.unflatten(1, (-1, y.shape[2])) for x, y in zip(parts, (q, k, v)))


def join_heads(heads: Any, x: Tensor) -> Tensor:
    """(tokens of the team, heads of this rank, ...) -> (tokens of this rank, all heads, ...)."""
    (rows,) = Turn.apply(heads, False, x.flatten(1))
    return rows.unflatten(2, x.shape[1:]).flatten(1, 2)


def numbered(lengths: tuple[int, ...], team: Team) -> tuple[int, ...]:
    """Lengths with which the kernels drop the weights that they would drop on one GPU.

    They number the weights of head h of sequence b by b * heads + h, and this rank has a part of
    the heads. So each sequence is followed and preceded by empty ones, as many as other ranks.
    """
    found = numpy.zeros((len(lengths), team.size), numpy.int64)
    found[:, team.rank] = lengths
    return tuple(found.reshape(-1).tolist())


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """The whole sequences of a call.

    Attributes:
        count: how many.
        longest: the tokens of the longest one.
        ends: int32 (count + 1,), where they begin, and the end of the last.
    """

    count: int
    longest: int
    ends: Tensor

    def plain(self, options: dict[str, Any]) -> tuple:
        """The plain options of `whole_sequences`."""
        if self.count == 1:
            return plain_options(FUNCTION, **options)
        longest = self.longest, self.longest
        return plain_options(FUNCTION, layout="thd", max_seqlens=longest, **options)


def whole_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: Whole,
    plain: tuple,
    extras: Extras,
    text: tuple[Text, tuple] | None,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse (heads, tokens)) of all tokens of sequences, as one process computes them.

    Args:
        text: that of the call, and what it reads.
        need_lse: else the LSE may be None.
    """
    texts, captures = ((), ()) if text is None else (text[:1], text[1])
    plain = (*plain, *texts)
    if whole.count == 1:
        arrays = (q[None], k[None], v[None])
        arrays = (*arrays, *extras) if texts or any(x is not None for x in extras) else arrays
        out, lse = FORWARD(FUNCTION, (*arrays, *captures), (plain, need_lse))
        return out[0], None if lse is None else lse[0]
    extras = extras._replace(cu_seqlens_q=whole.ends, cu_seqlens_k=whole.ends)
    return FORWARD(FUNCTION, (q, k, v, *extras, *captures), (plain, need_lse))
