"""An independent implementation as a second opinion: a forward kernel in Triton (GPU only)."""

import math

import pytest
from matrix import each

import cupyflash

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language")


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, seqlen, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; tensors (heads, seqlen, HEAD_DIM), contiguous."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1) * seqlen * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    q_mask = rows[:, None] < seqlen
    q = tl.load(q_ptr + head + rows[:, None] * HEAD_DIM + dims, mask=q_mask, other=0.0)
    row_max = tl.full([BLOCK], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    end = (tl.program_id(0) + 1) * BLOCK if CAUSAL else seqlen
    for start in range(0, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        offsets = head + cols[:, None] * HEAD_DIM + dims
        k = tl.load(k_ptr + offsets, mask=cols[:, None] < seqlen, other=0.0)
        v = tl.load(v_ptr + offsets, mask=cols[:, None] < seqlen, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = cols[None, :] < seqlen
        if CAUSAL:
            seen = seen & (cols[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        row_max = new_max
    out = (acc / row_sum[:, None]).to(q.dtype)
    tl.store(out_ptr + head + rows[:, None] * HEAD_DIM + dims, out, mask=q_mask)
    lse = row_max + tl.log(row_sum)
    tl.store(lse_ptr + tl.program_id(1) * seqlen + rows, lse, mask=rows < seqlen)


@each(library="torch", device="cuda")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_equals_triton(target, head_dim, causal):
    import torch

    inputs = target.inputs("float16", seqlen_q=777, head_dim=head_dim, layout="bhsd")
    q, k, v = (x.contiguous() for x in (inputs.q, inputs.k, inputs.v))
    theirs, their_lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    grid = (triton.cdiv(777, 64), q.shape[0] * q.shape[1])
    scale = 1 / math.sqrt(head_dim)
    attention_kernel[grid](q, k, v, theirs, their_lse, scale, 777, causal, head_dim, 64)
    ours, our_lse = cupyflash.attention(q, k, v, causal=causal, layout="bhsd", return_lse=True)
    # Two results that are each within one rounding of float16 of the truth, give or take P's own.
    torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=2**-9 * float(theirs.abs().max()))
    torch.testing.assert_close(our_lse, their_lse, rtol=2**-19, atol=2**-18)
