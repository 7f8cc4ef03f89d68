"""The two ways in which ranks bring queries and keys together.

heads: an all-to-all turns (tokens of this rank, all heads) into (all tokens, some heads), attention
of whole sequences follows, and an all-to-all brings the result back. Each head is computed as on
one GPU.

keys: each rank computes its own queries. The keys come from all ranks, some key heads at a time;
while those are computed, the next ones travel. In the backward pass the gradients of keys go back
in float32. Nothing is merged, as each softmax is over all keys of a query.

Both together: an all-to-all among the ranks of a team, then keys from the other teams.
"""

import dataclasses
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.attention.operations import FORWARD
from ..ops.attention.options import Extras, plain_options
from . import pieces
from .pieces import FUNCTION, Keys
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
        """Of the numbers of the tokens of each rank of the team."""
        place = torch.from_numpy(numpy.concatenate(indices)).argsort()
        order = torch.empty_like(place)
        order[place] = torch.arange(len(place))
        return cls(team, failures, [len(x) for x in indices], place.to(device), order.to(device))

    def to_heads(self, x: Tensor) -> Tensor:
        """(tokens of this rank, ranks, columns) -> (tokens of the team, columns)."""
        rows = x.transpose(0, 1).contiguous().flatten(0, 1)
        send = [x.shape[0]] * self.team.size
        rows = all_to_all(rows, send, self.counts, self.team, self.failures).wait()
        return rows.index_select(0, self.order)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back, (tokens of the team, columns) -> (tokens of this rank, ranks, columns)."""
        mine, size = self.counts[self.team.rank], self.team.size
        rows = x.index_select(0, self.place)
        rows = all_to_all(rows, self.counts, [mine] * size, self.team, self.failures).wait()
        return rows.unflatten(0, (size, mine)).transpose(0, 1)


class ToHeads(torch.autograd.Function):
    """`Heads.to_heads`, whose gradient is `Heads.to_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads) -> Tensor:
        ctx.heads = heads
        with heads.failures.reported(FUNCTION):
            return heads.to_heads(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ToTokens.apply(dy, ctx.heads), None


class ToTokens(torch.autograd.Function):
    """`Heads.to_tokens`, whose gradient is `Heads.to_heads`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads) -> Tensor:
        ctx.heads = heads
        with heads.failures.reported(FUNCTION):
            return heads.to_tokens(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ToHeads.apply(dy, ctx.heads), None


def split_heads(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    widths = [x.shape[2] for x in columns]
    parts = ToHeads.apply(torch.cat(columns, dim=2), heads).split(widths, dim=1)
    return tuple(x.unflatten(1, (-1, y.shape[2])) for x, y in zip(parts, (q, k, v)))


def join_heads(heads: Heads, x: Tensor) -> Tensor:
    """(tokens of the team, heads of this rank, ...) -> (tokens of this rank, all heads, ...)."""
    rows = ToTokens.apply(x.flatten(1), heads)
    return rows.unflatten(2, x.shape[1:]).flatten(1, 2)


def whole_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    cu_seqlens: Tensor,
    options: dict[str, Any],
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """(out, lse (heads, tokens)) of all tokens of sequences, as one process computes them."""
    if len(lengths) == 1:
        plain = plain_options(FUNCTION, **options)
        arrays = (q[None], k[None], v[None])
        arrays = (*arrays, *extras) if any(x is not None for x in extras) else arrays
        out, lse = FORWARD(FUNCTION, arrays, (plain, True))
        return out[0], lse[0]
    longest = max(lengths, default=0)
    plain = plain_options(FUNCTION, layout="thd", max_seqlens=(longest, longest), **options)
    extras = extras._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    return FORWARD(FUNCTION, (q, k, v, *extras), (plain, True))


class AttentionOverKeys(torch.autograd.Function):
    """(out, lse) of the queries of this rank over the keys of all teams."""

    @staticmethod
    def forward(ctx: Any, q, k, v, slopes, sinks, keys, options, heads_at_once):  # noqa: ANN001, ANN205
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32)
        groups = _groups(q, k, heads_at_once)
        with keys.failures.reported(FUNCTION):
            coming = _start(keys, k, v, groups[0]) if groups else None
            for number, group in enumerate(groups):
                arrived = coming.wait()
                if number + 1 < len(groups):
                    coming = _start(keys, k, v, groups[number + 1])
                some = (None if x is None else x[..., group.queries] for x in (slopes, sinks))
                out[:, group.queries], lse[group.queries] = pieces.forward(
                    keys.calls, q[:, group.queries], arrived, options, *some
                )
        ctx.save_for_backward(q, k, v, out, lse, slopes, sinks)
        ctx.rest = keys, options, groups
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # noqa: ANN001, ANN205
        q, k, v, out, lse, slopes, sinks = ctx.saved_tensors
        keys, options, groups = ctx.rest
        if dout is None:  # only the LSE is used
            dout = torch.zeros_like(out)
        dout = dout.contiguous()  # perhaps an expanded scalar
        gradients = dq, dk, dv, dsinks = (
            *map(torch.zeros_like, (q, k, v)), None if sinks is None else torch.zeros_like(sinks)
        )  # fmt: skip
        with keys.failures.reported(f"{FUNCTION}, backward"):
            coming, going = _start(keys, k, v, groups[0]) if groups else None, []
            for number, group in enumerate(groups):
                arrived = coming.wait()
                if number + 1 < len(groups):
                    coming = _start(keys, k, v, groups[number + 1])
                mine = group.queries
                some = (None if x is None else x[..., mine] for x in (slopes, sinks))
                dq[:, mine], sums, some_sinks = pieces.backward(
                    keys.calls, dout[:, mine], q[:, mine], arrived, out[:, mine], lse[mine],
                    None if dlse is None else dlse[mine], options, *some,
                )  # fmt: skip
                if sinks is not None:
                    dsinks[mine] = some_sinks
                going.append((group.keys, keys.scatter(sums)))
                if len(going) > 1:
                    _finish(keys, going.pop(0), dk, dv)
            for returning in going:
                _finish(keys, returning, dk, dv)
        return *gradients[:3], None, dsinks, None, None, None


@dataclasses.dataclass(frozen=True)
class _Group:
    """Key heads that travel together, and their query heads."""

    keys: slice
    queries: slice


def _groups(q: Tensor, k: Tensor, heads_at_once: int) -> list[_Group]:
    heads, ratio = k.shape[1], q.shape[1] // max(1, k.shape[1])
    ends = [(h, min(h + heads_at_once, heads)) for h in range(0, heads, heads_at_once)]
    return [_Group(slice(a, b), slice(a * ratio, b * ratio)) for a, b in ends]


def _start(keys: Keys, k: Tensor, v: Tensor, group: _Group) -> Any:
    return keys.gather(torch.cat([k[:, group.keys], v[:, group.keys]], dim=2))


def _finish(keys: Keys, returning: tuple[slice, Any], dk: Tensor, dv: Tensor) -> None:
    heads, pending = returning
    sums = keys.add_up(pending.wait(), len(dk))
    dk[:, heads], dv[:, heads] = sums.split((dk.shape[2], dv.shape[2]), dim=2)
