"""Keys by copies: each GPU writes its keys where the others need them, in the order of the calls.

The memory of a rank holds the keys and the values of all its calls, and slots for the gradients of
its own keys (`routes`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import choice
from .peers import Peers, aligned
from .pieces import Pair
from .routes import Copy, Routes
from .transport import Failures, Team

MOST_BYTES = 16 << 30  # of a rank's memory; more travels by collectives, some heads at a time
MOST_COPIES = 16  # of a rank for each other one; each costs the host about 8 us


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
    def sent(self) -> dict[int, list[Copy]]:
        """The copies of the keys of this rank, by the other ranks that get them."""
        return self._with_others(lambda rank: (self.team.rank, rank))

    @functools.cached_property
    def received(self) -> dict[int, list[Copy]]:
        """The copies that this rank gets, by the other ranks that have the keys."""
        return self._with_others(lambda rank: (rank, self.team.rank))

    @functools.cached_property
    def own(self) -> list[Copy]:
        """The copies of the keys of this rank to itself."""
        return self._copies(self.team.rank, self.team.rank)

    def _with_others(self, ends: Callable[[int], tuple[int, int]]) -> dict[int, list[Copy]]:
        size = self.team.size
        others = [(self.team.rank + x) % size for x in range(1, size)]
        found = {rank: self._copies(*ends(rank)) for rank in others}
        return {rank: copies for rank, copies in found.items() if copies}

    def _copies(self, source: int, target: int) -> list[Copy]:
        return [x for x in self.routes.copies if (x.source, x.target) == (source, target)]


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
            for rank, copies in way.sent.items():
                self._send_keys(rank, copies, group)
                peers.tell(rank, number)
        self._send_keys(self.rank, way.own, slice(0, k.shape[1]), own=True)

    def _send_keys(self, rank: int, copies: list[Copy], group: slice, *, own: bool = False) -> None:
        for copy in copies:
            rows = slice(copy.row, copy.row + copy.rows)
            for x, place in zip((self.k, self.v), self.places):
                self._put(x[:, group], rows, rank, place, copy.place, group.start, own=own)

    def _put(
        self, x: Tensor, rows: slice, rank: int, place: int, row: int, head: int, *, own: bool
    ) -> None:
        """Rows of some heads to those from ``row`` and ``head`` on of the array at ``place``."""
        one = x.shape[2] * x.element_size()
        pitch = self.k.shape[1] * one
        self.way.peers.put(rank, place + row * pitch + head * one, pitch, x, rows, own=own)

    def arrived(self, number: int) -> list[Pair]:
        """The keys and values of each call; the next groups travel meanwhile."""
        peers, group, rows = self.way.peers, self.groups[number], self.way.rows
        for rank in self.way.received:
            peers.hear(rank, number)
        parts = []
        for x, place in zip((self.k, self.v), self.places):
            keys = peers.tensor(place, (sum(rows), *x.shape[1:]), x.dtype)
            parts.append(keys[:, group].split(rows))
        return list(zip(*parts, strict=True))

    def give(self, number: int, gradients: list[Pair]) -> None:
        """Sends gradients of what `arrived` has returned to the slots of the keys."""
        if not gradients:  # this rank has no tokens
            return
        peers, group = self.way.peers, self.groups[number]
        dk, dv = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*gradients))
        peers.follow(dk, dv)
        for rank, copies in (*self.way.received.items(), (self.rank, self.way.own)):
            for copy in copies:
                rows = slice(copy.place, copy.place + copy.rows)
                for x, place in zip((dk, dv), self.slots):
                    self._put(x, rows, rank, place, copy.slot, group.start, own=False)
            if rank != self.rank:
                peers.tell(rank, len(self.groups) + number)

    def gradients(self) -> Pair:
        """dk and dv of the tokens of this rank."""
        peers, routes = self.way.peers, self.way.routes
        peers.join()
        for number in range(len(self.groups)):
            for rank in self.way.sent:
                peers.hear(rank, len(self.groups) + number)
        found = []
        for x, place in zip((self.k, self.v), self.slots):
            slots = peers.tensor(place, (routes.slots, *x.shape[1:]), x.dtype)
            found.append(torch.empty_like(x))
            for part in routes.sums[self.rank]:
                some = slots[part.slot : part.slot + part.count * part.rows]
                some = some.view(part.count, part.rows, *x.shape[1:])
                torch.sum(some, 0, out=found[-1][part.row : part.row + part.rows])
        return tuple(found)

    def end(self) -> None:
        """Frees the memory for the next use."""
        self.way.peers.leave()
