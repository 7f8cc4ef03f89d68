"""Calls on a GPU that waited for turns that never came: ``python turn_calls.py HEAD_DIM HEADS``.

A process of its own, because a kernel that does not end takes its process with it. test_turns.py
gives it a limited time.
"""

import sys

import torch

import cupyflash
from cupyflash.testing import expected, make_inputs

REPEATS = 10


def option(q, k, v):
    return cupyflash.attention(q, k, v, causal="top-left", deterministic=True)


def switch(q, k, v):
    """As models call it; is_causal of torch's function is a top-left mask."""
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    return cupyflash.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2)


def main(head_dim, heads):
    """The gradients are right, and have the same bits in every run."""
    shape = {"batch": 8, "heads_q": heads, "seqlen_q": 70, "seqlen_k": 300, "head_dim": head_dim}
    inputs = make_inputs("torch", "bfloat16", device="cuda", **shape)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    for call in (option, switch):
        first = gradients(call, leaves, inputs.dout)
        for _ in range(REPEATS):
            again = gradients(call, leaves, inputs.dout)
            assert all(map(torch.equal, first, again)), call.__name__
        print(call.__name__, head_dim)
        expected(inputs, causal="top-left").check(**dict(zip(("dq", "dk", "dv"), first)))


def gradients(call, leaves, dout):
    torch.use_deterministic_algorithms(call is switch)
    return torch.autograd.grad(call(*leaves), leaves, dout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
