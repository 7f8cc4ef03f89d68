"""Attention of a case in float64 by torch's own operations, a head at a time."""

import torch
from torch import Tensor

from bench.parallel.problems import Case


def exact(case: Case, ranks: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk and dv in float64 of (tokens, heads, head_dim), scores of a head in memory."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lengths = torch.zeros(dout.shape, dtype=q.dtype, device=q.device), case.lengths(ranks)
    ratio = case.heads // case.heads_kv
    parts = zip(*(x.split(lengths) for x in (q, k, v, dout, out)), strict=True)
    for some_q, some_k, some_v, some_dout, some_out in parts:
        distance = torch.arange(len(some_q), device=q.device)
        distance = distance[:, None] - distance  # how far a key lies left of a query
        hidden = (distance < 0) | (distance > (case.window or len(q)))
        for head in range(case.heads):
            key, value = some_k[:, head // ratio], some_v[:, head // ratio]
            scores = some_q[:, head] @ key.T * case.head_dim**-0.5
            found = scores.masked_fill(hidden, -torch.inf).softmax(1) @ value
            found.backward(some_dout[:, head].double(), retain_graph=True)
            some_out[:, head] = found.detach()
    return [out, *(x.grad for x in (q, k, v))]
