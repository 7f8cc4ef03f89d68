"""A plain zigzag ring on public functions of cupyflash: keys travel, parts are merged in float32.

It is here to be compared with, for one causal sequence whose length is a multiple of twice the
ranks. Rank r has the chunks r and 2 P - 1 - r. Keys of a lower rank are seen by all of its queries,
but only the first chunk; keys of a higher rank by its second chunk, both of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cupyflash


def _passed(tensors: list[Tensor], rank: int, ranks: int) -> tuple[list[Tensor], list[Any]]:
    """Tensors that come from the rank before, while these go to the next; and what to wait for."""
    coming = [torch.empty_like(x) for x in tensors]
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % ranks) for x in tensors]
    operations += [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in coming]
    return coming, dist.batch_isend_irecv(operations)


def _seen(source: int, rank: int, tokens: int) -> tuple[slice, slice, bool]:
    """Which queries see which keys of a rank, and whether causally."""
    half = tokens // 2
    if source == rank:
        return slice(None), slice(None), True
    return (slice(None), slice(half), False) if source < rank else (slice(half, None), slice(None),
                                                                    False)  # fmt: skip


class Ring(torch.autograd.Function):
    """out of q (tokens, heads, head_dim) and the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
        keys = [k.contiguous(), v.contiguous()]
        for step in range(ranks):
            coming, works = _passed(keys, rank, ranks) if step + 1 < ranks else (keys, [])
            rows, cols, causal = _seen((rank - step) % ranks, rank, len(q))
            some, part = cupyflash.attention(
                q[None, rows], *(x[None, cols] for x in keys), causal=causal, return_lse=True
            )
            part = part[0].t()
            both = torch.logaddexp(lse[rows], part)
            out[rows] *= (lse[rows] - both).exp()[..., None]
            out[rows] += some[0] * (part - both).exp()[..., None]
            lse[rows] = both
            for work in works:
                work.wait()
            keys = coming
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse.t().contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dq, dout = torch.zeros(q.shape, dtype=torch.float32, device=q.device), dout.contiguous()
        keys = [k.contiguous(), v.contiguous()]
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in keys]
        for step in range(ranks):
            coming, works = _passed(keys, rank, ranks) if step + 1 < ranks else (keys, [])
            rows, cols, causal = _seen((rank - step) % ranks, rank, len(q))
            found = cupyflash.attention_backward(
                dout[None, rows], q[None, rows], *(x[None, cols] for x in keys), out[None, rows],
                lse[None, :, rows].contiguous(), causal=causal,
            )  # fmt: skip
            dq[rows] += found[0][0]
            for x, part in zip(sums, found[1:], strict=True):
                x[cols] += part[0]
            # Gradients follow their keys, and are home after the last step.
            sums, returning = _passed(sums, rank, ranks)
            for work in (*works, *returning):
                work.wait()
            keys = coming
        return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)
