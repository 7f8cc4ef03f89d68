"""Attention of the queries of one rank over the keys that have arrived from all ranks.

The kernels take packed sequences whose keys do not overlap, so that the keys of each piece of
queries lie next to each other, once for each piece that sees them.
"""

import dataclasses
from typing import Any

import numpy
import torch
from torch import Tensor

from ..ops.attention.operations import BACKWARD, FORWARD
from ..ops.attention.options import Extras, plain_options
from .exchange import Call

FUNCTION = "parallel.attention"
Pair = tuple[Tensor, Tensor]  # keys and values of the pieces of a call, or their gradients


def tensor(x: numpy.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(x).to(device)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceCall:
    """A `Call` with its arrays as tensors on the device of q."""

    queries: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    sequences: Tensor
    longest: tuple[int, int]
    window: tuple[int | None, int | None] | None

    @classmethod
    def of(cls, call: Call, device: torch.device) -> "DeviceCall":
        queries = None if call.queries is None else tensor(call.queries, device)
        arrays = (call.cu_seqlens_q, call.cu_seqlens_k, call.sequences)
        return cls(queries, *(tensor(x, device) for x in arrays), call.longest, call.window)

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


def forward(
    calls: list[DeviceCall],
    q: Tensor,
    arrived: list[Pair],
    options: dict[str, Any],
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out (tokens, heads, head_dim_v), lse float32 (heads, tokens)) of the queries of a rank.

    Args:
        q: (tokens, heads, head_dim).
        arrived: the keys and values (rows, heads_kv, head_dim) of each call.
        options: of `plain_options`, without those that a call has of its own.
        slopes, sinks: of these heads.
    """
    parts = []
    for call, (k, v) in zip(calls, arrived, strict=True):
        extras, plain = call.arguments(options, slopes)
        arrays = (call.rows(q), k, v, *extras._replace(sinks=sinks))
        parts.append(FORWARD(FUNCTION, arrays, (plain, True)))
        if call.queries is None:
            return parts[0]
    out = q.new_empty((*q.shape[:2], arrived[0][1].shape[2]))
    lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
    for call, (some, some_lse) in zip(calls, parts):
        out[call.queries], lse[:, call.queries] = some, some_lse
    return out, lse


def backward(
    calls: list[DeviceCall],
    dout: Tensor,
    q: Tensor,
    arrived: list[Pair],
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, list[Pair], Tensor | None]:
    """(dq, gradients of each pair of ``arrived``, dsinks) from the arguments of `forward`."""
    dq, pairs = None, []
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    for call, (k, v) in zip(calls, arrived, strict=True):
        extras, plain = call.arguments(options, slopes)
        tensors = (call.rows(dout), call.rows(q), k, v, call.rows(out))
        stats = (x if x is None else call.rows(x.t()).t().contiguous() for x in (lse, dlse))
        arrays = (*tensors, *stats, *extras._replace(sinks=sinks))
        found = BACKWARD(FUNCTION, arrays, (plain, False))
        pairs.append((found.dk, found.dv))
        if sinks is not None:
            dsinks += found.dsinks
        if call.queries is None:
            return found.dq, pairs, dsinks
        dq = torch.empty_like(q) if dq is None else dq
        dq[call.queries] = found.dq
    return torch.zeros_like(q) if dq is None else dq, pairs, dsinks
