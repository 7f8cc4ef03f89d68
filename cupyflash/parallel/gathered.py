"""Keys by collectives: an all-gather, or an all-to-all where a window needs few of them.

They come some key heads at a time; while those are computed, the next ones travel. The gradients go
back in float32 the same way.
"""

import dataclasses
from typing import Any

import numpy
import torch
from torch import Tensor

from . import choice
from .exchange import Exchange
from .pieces import Pair, tensor
from .transport import Failures, Team, all_gather, all_to_all, reduce_scatter


@dataclasses.dataclass(frozen=True, eq=False)
class GatheredKeys:
    """How the keys of one rank and its team travel, as tensors on one device, and who sees them.

    Attributes:
        keys: int64, for each call the rows of its keys among those that arrive.
    """

    team: Team
    failures: Failures
    everything: bool
    rows: int
    send: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    most: int
    keys: list[Tensor]

    @classmethod
    def of(
        cls,
        team: Team,
        failures: Failures,
        plan: Exchange,
        keys: list[numpy.ndarray],
        device: torch.device,
    ) -> "GatheredKeys":
        """The way by a plan, for calls that see the keys with these numbers."""
        rows = [tensor(plan.rows_of(x), device) for x in keys]
        send = tensor(plan.send, device)
        counts = plan.send_counts, plan.receive_counts, plan.most
        return cls(team, failures, plan.everything, plan.rows, send, *counts, rows)

    def start(self, k: Tensor, v: Tensor, groups: list[slice], gradients: bool) -> "Journey":
        """The way of the keys of one pass, and back if it has ``gradients``."""
        return Journey(self, k, v, groups)

    def heads_at_once(self, k: Tensor, v: Tensor) -> int:
        """Key heads that travel together, as many on all ranks."""
        dims, item = (k.shape[2], v.shape[2]), k.element_size()
        return choice.heads_at_once(self.most, k.shape[1], dims, item, choice.LEAST_BYTES)

    def gather(self, x: Tensor) -> Any:
        """Starts the way of (tokens of this rank, ...) to all that see them."""
        if not self.everything:
            counts = self.send_counts, self.receive_counts
            return all_to_all(x.index_select(0, self.send), *counts, self.team, self.failures)
        padded = x
        if len(x) < self.rows:
            padded = x.new_zeros((self.rows, *x.shape[1:]))
            padded[: len(x)] = x
        return all_gather(padded, self.team, self.failures)

    def scatter(self, sums: Tensor) -> Any:
        """Starts the way back of gradients, float32 in the rows in which keys have arrived."""
        if self.everything:
            return reduce_scatter(sums, self.team, self.failures)
        counts = self.receive_counts, self.send_counts
        return all_to_all(sums, *counts, self.team, self.failures)

    def add_up(self, returned: Tensor, tokens: int) -> Tensor:
        """The gradients of the tokens of this rank from what `scatter` has brought.

        The ranks are added one after the other, in an order that is always the same.
        """
        if self.everything:
            return returned[:tokens]
        sums = returned.new_zeros((tokens, *returned.shape[1:]))
        parts = zip(self.send.split(self.send_counts), returned.split(self.send_counts))
        for rows, part in parts:
            if len(rows):
                sums.index_add_(0, rows, part)
        return sums


class Journey:
    """The groups of key heads of one pass, one after another."""

    def __init__(self, way: GatheredKeys, k: Tensor, v: Tensor, groups: list[slice]) -> None:
        self.way, self.k, self.v, self.groups = way, k, v, groups
        self.dims = k.shape[2], v.shape[2]
        self.going: list[Any] = []
        self.coming = self._start(0)

    def _start(self, number: int) -> Any:
        if number == len(self.groups):
            return None
        group = self.groups[number]
        return self.way.gather(torch.cat([self.k[:, group], self.v[:, group]], dim=2))

    def arrived(self, number: int) -> list[Pair]:
        """The keys and values of each call; the next group travels meanwhile."""
        arrived = self.coming.wait()
        self.coming = self._start(number + 1)
        self.rows = len(arrived)
        return [arrived.index_select(0, x).split(self.dims, dim=2) for x in self.way.keys]

    def give(self, number: int, gradients: list[Pair]) -> None:
        """Sends gradients of what `arrived` has returned to where the keys are from.

        At most two pieces of a sequence add to a key, so that their order does not matter.
        """
        heads = self.groups[number].stop - self.groups[number].start
        dtype = torch.promote_types(self.k.dtype, torch.float32)
        sums = self.k.new_zeros((self.rows, heads, sum(self.dims)), dtype=dtype)
        for rows, pair in zip(self.way.keys, gradients, strict=True):
            sums.index_add_(0, rows, torch.cat(pair, dim=2).to(dtype))
        self.going.append(self.way.scatter(sums))

    def gradients(self) -> Pair:
        """dk and dv of the tokens of this rank."""
        dk, dv = torch.empty_like(self.k), torch.empty_like(self.v)
        for heads, pending in zip(self.groups, self.going, strict=True):
            sums = self.way.add_up(pending.wait(), len(dk))
            dk[:, heads], dv[:, heads] = sums.split(self.dims, dim=2)
        return dk, dv

    def end(self) -> None:
        """Nothing is left to be done."""
