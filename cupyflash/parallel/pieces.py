"""Attention of the queries of one rank over the keys that have arrived from all ranks.

The kernels take packed sequences whose keys do not overlap, so that the keys of each piece of
queries are copied next to each other here. That copy also brings them from the order of the ranks
into their own.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..ops.attention.operations import BACKWARD, FORWARD
from ..ops.attention.options import Extras, plain_options
from .exchange import Call
from .transport import Failures, Team, all_gather, all_to_all, reduce_scatter

FUNCTION = "parallel.attention"


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceCall:
    """A `Call` with its arrays as tensors on the device of q."""

    queries: Tensor | None
    keys: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    sequences: Tensor
    longest: tuple[int, int]
    window: tuple[int | None, int | None] | None

    @classmethod
    def of(cls, call: Call, device: torch.device) -> "DeviceCall":
        def tensor(x: Any) -> Tensor | None:
            return None if x is None else torch.from_numpy(x).to(device)

        arrays = (call.queries, call.keys, call.cu_seqlens_q, call.cu_seqlens_k, call.sequences)
        return cls(*map(tensor, arrays), call.longest, call.window)

    def rows(self, x: Tensor) -> Tensor:
        """The rows of the queries of this call."""
        return x if self.queries is None else x.index_select(0, self.queries)

    def arguments(self, options: dict[str, Any], slopes: Tensor | None) -> tuple[Extras, tuple]:
        """The optional arrays, but for the sinks, and the plain options of the call."""
        causal = self.window is not None and self.window[1] == 0
        window = (self.window[0], None) if causal else self.window
        window = None if window in (None, (None, None)) else window
        plain = plain_options(
            FUNCTION,
            layout="thd",
            max_seqlens=self.longest,
            causal=causal,
            window=window,
            **options,
        )
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.index_select(0, self.sequences)
        return Extras(self.cu_seqlens_q, self.cu_seqlens_k, slopes), plain


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """How the keys of one rank and its team travel, as tensors on one device, and who sees them."""

    team: Team
    failures: Failures
    calls: list[DeviceCall]
    everything: bool
    rows: int
    send: Tensor
    send_counts: list[int]
    receive_counts: list[int]

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


def forward(
    calls: list[DeviceCall],
    q: Tensor,
    arrived: Tensor,
    options: dict[str, Any],
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out (tokens, heads, head_dim_v), lse float32 (heads, tokens)) of the queries of a rank.

    Args:
        q: (tokens, heads, head_dim).
        arrived: (rows, heads_kv, head_dim + head_dim_v), keys with their values behind.
        options: of `plain_options`, without those that a call has of its own.
        slopes, sinks: of these heads.
    """
    head_dims = q.shape[2], arrived.shape[2] - q.shape[2]
    out = q.new_zeros((*q.shape[:2], head_dims[1]))
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32)
    for call in calls:
        k, v = arrived.index_select(0, call.keys).split(head_dims, dim=2)
        extras, plain = call.arguments(options, slopes)
        arrays = (call.rows(q), k, v, *extras._replace(sinks=sinks))
        some, some_lse = FORWARD(FUNCTION, arrays, (plain, True))
        if call.queries is None:
            return some, some_lse
        out[call.queries], lse[:, call.queries] = some, some_lse
    return out, lse


def backward(
    calls: list[DeviceCall],
    dout: Tensor,
    q: Tensor,
    arrived: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dq, float32 gradients like ``arrived``, dsinks) from the arguments of `forward`.

    At most two pieces of a sequence add to a key, so that their order does not matter.
    """
    head_dims = q.shape[2], arrived.shape[2] - q.shape[2]
    dq, dsinks = torch.zeros_like(q), None if sinks is None else torch.zeros_like(sinks)
    sums = torch.zeros_like(arrived, dtype=torch.promote_types(arrived.dtype, torch.float32))
    for call in calls:
        k, v = arrived.index_select(0, call.keys).split(head_dims, dim=2)
        extras, plain = call.arguments(options, slopes)
        tensors = (call.rows(dout), call.rows(q), k, v, call.rows(out))
        stats = (x if x is None else call.rows(x.t()).t().contiguous() for x in (lse, dlse))
        arrays = (*tensors, *stats, *extras._replace(sinks=sinks))
        found = BACKWARD(FUNCTION, arrays, (plain, False))
        dkv = torch.cat([found.dk, found.dv], dim=2)
        sums.index_add_(0, call.keys, dkv.to(sums.dtype))
        if sinks is not None:
            dsinks += found.dsinks
        if call.queries is None:
            dq = found.dq
        else:
            dq[call.queries] = found.dq
    return dq, sums, dsinks
