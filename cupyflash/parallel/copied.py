"""Keys by copies: each GPU writes its keys where the others need them, in the order of the calls.

The memory of a rank holds the keys and the values of all its calls, and slots for the gradients of
its own keys (`routes`).
"""

import dataclasses
import functools
import math

import numpy
import torch
from torch import Tensor

from . import choice
from .peers import Copies, Peers, Source, aligned
from .pieces import Pair
from .routes import Routes
from .transport import Failures, Team

MOST_BYTES = 16 << 30  # of a rank's memory; more travels by collectives, some heads at a time


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedKeys:
    """How the keys of one rank and its team travel.

    Attributes:
        rows: of the keys of each call.
    """

    team: Team
    failures: Failures
    peers: Peers
    routes: Routes
    rows: list[int]

    def start(self, k: Tensor, v: Tensor, groups: list[slice], gradients: bool) -> "Journey":
        """The way of the keys of one pass, and back if it has ``gradients``."""
        return Journey(self, k, v, groups, gradients)

    def size(self, k: Tensor, v: Tensor, gradients: bool = True) -> int:
        """Bytes of the memory of a rank."""
        rows = (self.routes.keys, gradients * self.routes.slots)
        return sum(_bytes(n, x) for n in rows for x in (k, v))

    def heads_at_once(self, k: Tensor, v: Tensor) -> int:
        """Key heads that travel together."""
        dims, item = (k.shape[2], v.shape[2]), k.element_size()
        return choice.heads_at_once(
            self.routes.travelling, k.shape[1], dims, item, choice.LEAST_COPIED
        )

    @functools.cached_property
    def sent(self) -> Copies:
        """The copies of the keys of this rank to the others."""
        copies = self.routes.copies
        mine = copies.source == self.team.rank
        some = copies.some(mine & (copies.target != self.team.rank))
        return self._copies(some.target, some.row, some.place, some.rows)

    @functools.cached_property
    def own(self) -> Copies:
        """The copies of the keys of this rank to itself."""
        copies = self.routes.copies
        some = copies.some((copies.source == self.team.rank) & (copies.target == self.team.rank))
        return self._copies(some.target, some.row, some.place, some.rows)

    @functools.cached_property
    def returned(self) -> Copies:
        """The copies of gradients to the slots of all keys that this rank has got."""
        some = self.routes.copies.some(self.routes.copies.target == self.team.rank)
        return self._copies(some.source, some.place, some.slot, some.rows)

    @functools.cached_property
    def sums(self) -> Tensor:
        """int32 (rows of this rank, 3): the first slot, how many, and the step between them."""
        rows, slot, count = self.routes.sums[self.team.rank]
        inside = numpy.arange(rows.sum()) - numpy.repeat(numpy.cumsum(rows) - rows, rows)
        columns = numpy.repeat(slot, rows) + inside, numpy.repeat(count, rows)
        columns = *columns, numpy.repeat(rows, rows)
        parts = torch.from_numpy(numpy.stack(columns, axis=1).astype(numpy.int32))
        return parts.to(self.peers.device)

    def _copies(self, *columns: numpy.ndarray) -> Copies:
        return Copies(self.team, self.peers.device, *columns)


def _bytes(rows: int, x: Tensor) -> int:
    """The size of an array of rows like those of x."""
    return aligned(rows * math.prod(x.shape[1:]) * x.element_size())


class Journey:
    """The groups of key heads of one pass."""

    def __init__(
        self, way: CopiedKeys, k: Tensor, v: Tensor, groups: list[slice], gradients: bool
    ) -> None:
        self.way, self.groups = way, groups
        self.k, self.v = k, v = k.contiguous(), v.contiguous()
        peers, self.rank = way.peers, way.team.rank
        peers.enter(way.size(k, v, gradients))
        keys = _bytes(way.routes.keys, k), _bytes(way.routes.keys, v)
        self.places = 0, keys[0]  # of the keys and of the values, in bytes
        self.slots = sum(keys), sum(keys) + _bytes(way.routes.slots, k)
        for number, group in enumerate(groups):
            some = self._sources((k[:, group], v[:, group]), self.places, group)
            peers.send(way.sent, some, number)
        peers.keep(way.own, self._sources((k, v), self.places, slice(0, k.shape[1])))

    def _sources(self, xs: Pair, places: tuple[int, int], group: slice) -> list[Source]:
        """Some heads of the keys and values, or of gradients, which have places for all heads."""
        found = []
        for x, place in zip(xs, places):
            one = x.shape[2] * x.element_size()
            found.append(Source(x, place + group.start * one, self.k.shape[1] * one))
        return found

    def arrived(self, number: int) -> list[Pair]:
        """The keys and values of each call; the next groups travel meanwhile."""
        peers, group, rows = self.way.peers, self.groups[number], self.way.rows
        self._hear(self.way.returned, number)
        parts = []
        for x, place in zip((self.k, self.v), self.places):
            keys = peers.tensor(place, (sum(rows), *x.shape[1:]), x.dtype)
            parts.append(keys[:, group].split(rows))
        return list(zip(*parts, strict=True))

    def give(self, number: int, gradients: list[Pair]) -> None:
        """Sends gradients of what `arrived` has returned to the slots of the keys."""
        if not gradients:  # this rank has no tokens
            return
        dk, dv = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*gradients))
        self.way.peers.follow(dk, dv)
        some = self._sources((dk, dv), self.slots, self.groups[number])
        self.way.peers.send(self.way.returned, some, len(self.groups) + number)

    def gradients(self) -> Pair:
        """dk and dv of the tokens of this rank."""
        peers = self.way.peers
        peers.join()
        for number in range(len(self.groups)):
            self._hear(self.way.sent, len(self.groups) + number)
        found = torch.empty_like(self.k), torch.empty_like(self.v)
        peers.sum(self.way.sums, found, self.slots)
        return found

    def _hear(self, copies: Copies, channel: int) -> None:
        """Waits for the other ranks of these copies."""
        for rank in copies.by_rank:
            if rank != self.rank:
                self.way.peers.hear(rank, channel)

    def end(self) -> None:
        """Frees the memory for the next use."""
        self.way.peers.leave()
