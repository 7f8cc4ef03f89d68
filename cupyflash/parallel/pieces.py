"""Attention of the queries of one rank over the keys that have arrived from all ranks.

The kernels take packed sequences whose keys do not overlap, so that the keys of each piece of
queries lie next to each other, once for each piece that sees them.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from ..ops.attention.operations import BACKWARD, FORWARD
from ..ops.attention.options import Extras, plain_options
from ..ops.attention.score_text.capture import SEQUENCE
from .exchange import Call

if TYPE_CHECKING:
    from .texts import CallText

FUNCTION = "parallel.attention"

Pair = tuple[Tensor, Tensor]  # keys and values of the pieces of a call, or their gradients


def tensor(x: numpy.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(x).to(device)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceCall:
    """A `Call` with its arrays as tensors on the device of q.

    Attributes:
        queries: int64, the rows of the queries of this rank, without those that stand in front of a
            piece; None for all of them.
        here: int64, the place of each of these among the rows of the call, and of those in front;
            None where none are in front.
    """

    queries: Tensor | None
    here: tuple[Tensor, Tensor] | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    places: Tensor
    longest: tuple[int, int]
    window: tuple[int | None, int | None] | None

    @classmethod
    def of(cls, call: Call, device: torch.device) -> "DeviceCall":
        queries = here = None
        if call.queries is not None:
            real = call.queries >= 0
            queries = tensor(call.queries[real], device)
            if not real.all():
                here = tuple(tensor(numpy.flatnonzero(x), device) for x in (real, ~real))
        arrays = (tensor(x, device) for x in (call.cu_seqlens_q, call.cu_seqlens_k, call.places))
        return cls(queries, here, *arrays, call.longest, call.window)

    def rows(self, x: Tensor, before: float = 0.0) -> Tensor:
        """The rows of the queries of this call, and this number in those in front of a piece."""
        if self.queries is None:
            return x
        found = x.index_select(0, self.queries)
        if self.here is None:
            return found
        mine, others = self.here
        rows = x.new_full((len(mine) + len(others), *x.shape[1:]), before)
        return rows.index_copy_(0, mine, found)

    def put(self, rows: Tensor, out: Tensor) -> None:
        """Writes rows of this call to where its queries lie in ``out``."""
        out[self.queries] = rows if self.here is None else rows.index_select(0, self.here[0])

    def arguments(
        self, options: dict[str, Any], extras: Extras, text: "CallText | None"
    ) -> tuple[tuple, tuple]:
        """(the optional arrays and what the text reads, the plain options) of the call."""
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
        slopes = extras.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.index_select(0, self.places[SEQUENCE])
        ends = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}
        extras = extras._replace(alibi_slopes=slopes, **ends)
        if text is None:
            return extras, plain
        of_call, captures = text.of(self.places, self)
        return (*extras, *captures), (*plain, of_call)


def forward(
    calls: list[DeviceCall],
    q: Tensor,
    arrived: list[Pair],
    options: dict[str, Any],
    extras: Extras,
    text: "CallText | None" = None,
) -> tuple[Tensor, Tensor]:
    """(out (tokens, heads, head_dim_v), lse float32 (heads, tokens)) of the queries of a rank.

    Args:
        q: (tokens, heads, head_dim).
        arrived: the keys and values (rows, heads_kv, head_dim) of each call.
        options: of `plain_options`, without those that a call has of its own.
        extras: the slopes and sinks of these heads, and the seed.
        text: the score and the mask of these heads.
    """
    parts = []
    for call, (k, v) in zip(calls, arrived, strict=True):
        given, plain = call.arguments(options, extras, text)
        arrays = (call.rows(q), k, v, *given)
        parts.append(FORWARD(FUNCTION, arrays, (plain, True)))
        if call.queries is None:
            return parts[0]
    out = q.new_empty((*q.shape[:2], arrived[0][1].shape[2]))
    lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
    for call, (some, some_lse) in zip(calls, parts):
        call.put(some, out)
        call.put(some_lse.t(), lse.t())
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
    extras: Extras,
    text: "CallText | None" = None,
) -> tuple[Tensor, list[Pair], list[Tensor | None]]:
    """(dq, gradients of each pair of ``arrived``, sums in float32 for the sinks and the captures).

    The arguments are those of `forward`, and the captures of the text that learn are marked so; the
    others have None.
    """
    dq, pairs = None, []
    weights = [extras.sinks]
    if text is not None:
        learn = zip(text.captures, text.text.captures, strict=True)
        weights += [x if of.learns else None for x, of in learn]
    sums = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in weights]
    for call, (k, v) in zip(calls, arrived, strict=True):
        given, plain = call.arguments(options, extras, text)
        tensors = (call.rows(dout), call.rows(q), k, v, call.rows(out))
        # A query in front of a piece has the LSE of one that sees no key, so it does not count.
        stats = [call.rows(lse.t(), -math.inf).t().contiguous()]
        stats.append(None if dlse is None else call.rows(dlse.t()).t().contiguous())
        found = BACKWARD(FUNCTION, (*tensors, *stats, *given), (plain, False))
        pairs.append((found[1], found[2]))
        for sum_, x in zip(sums, found[4:]):  # dsinks, and behind it those of captures
            if sum_ is not None:
                sum_ += x
        if call.queries is None:
            return found[0], pairs, sums
        dq = torch.empty_like(q) if dq is None else dq
        call.put(found[0], dq)
    return torch.zeros_like(q) if dq is None else dq, pairs, sums
