"""torch's scaled_dot_product_attention in `parallel.context`, beside one process."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from cupyflash import parallel

LENGTHS = [37, 14]


def rows(batch, is_causal, move):
    """Largest differences of out, dq, dk and dv of this rank, and whether a checkpoint has them."""
    source = torch.Generator().manual_seed(0)
    shard = parallel.Shard(LENGTHS)
    heads = 4, 2, 2, 4
    whole = [torch.randn(batch, h, shard.total, 16, generator=source) for h in heads]
    parts = zip(*(x.split(LENGTHS, 2) for x in whole), strict=True)
    right = [torch.cat(x, 2) for x in zip(*(results(sdpa, is_causal, *x) for x in parts))]
    mine = [shard.take(x, 2) for x in whole]
    with parallel.context(shard, move=move):
        found = results(sdpa, is_causal, *mine)

        def again(*tensors, **options):
            return checkpoint(
                lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, **options),
                *tensors,
                use_reentrant=False,
            )

        same = all(map(torch.equal, results(again, is_causal, *mine), found))
    return [(x - shard.take(y, 2)).abs().max().item() for x, y in zip(found, right)], same


def results(function, is_causal, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = function(q, k, v, is_causal=is_causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def refused(name):
    """The text of the error of a call in the context."""
    shard = parallel.Shard(LENGTHS)
    q = torch.zeros(1, 2, len(shard), 16)
    arguments, options = {
        "mask": ((q, q, q, torch.zeros(len(shard), len(shard))), {}),
        "tokens": ((q, q[:, :, 1:], q[:, :, 1:]), {}),
        "dropout": ((q[:, :1],) * 3, {"dropout_p": 0.5}),
        "heads": ((q, q[:, :1], q[:, :1]), {}),
    }[name]
    try:
        with parallel.context(shard):
            sdpa(*arguments, **options)
    except (NotImplementedError, ValueError) as error:
        return str(error)
