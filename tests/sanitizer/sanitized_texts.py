"""Scores and masks of the caller's own, for compute-sanitizer: ``BACKEND DTYPE``.

Both passes, with gradients of what a score reads, in float32 and in exact sums, and with tiles of a
mask.
"""

import sys

import torch

from cupyflash import environment
from cupyflash.testing import make_inputs
from cupyflash.testing.gallery import GALLERY, HEADS, LENGTH
from cupyflash.testing.scores import results

backend, dtype = sys.argv[1:]


def inputs(length, head_dim):
    shape = {"batch": 2, "seqlen_q": length, "seqlen_k": length, "heads_q": HEADS, "heads_kv": 2}
    return make_inputs("torch", dtype, device="cuda", head_dim=head_dim, **shape)


with environment.override(backend=backend):
    names = ("alibi", "softcap", "distance table", "gate", "temperature", "query temperature")
    for name, head_dim in zip(names, (64, 128, 32, 96, 64, 128)):
        case = GALLERY[name]
        arrays = case.arrays(torch.Generator().manual_seed(0))
        moved = tuple(x.cuda() for x in arrays)
        results(inputs(LENGTH, head_dim), moved, score=case.make, deterministic=head_dim == 64)
    document = (torch.arange(400) // 110).int().cuda()
    for head_dim in (64, 128):
        results(
            inputs(400, head_dim), (document,), mask=lambda of: lambda b, h, q, k: of[q] == of[k]
        )
torch.cuda.synchronize()
# Behind this the thread of autograd has let go of Python: see exit_stress.py.
torch.ones(1, device="cuda", requires_grad=True).sum().backward()
