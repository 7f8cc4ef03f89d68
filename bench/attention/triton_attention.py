"""FlashAttention-2's forward pass in Triton, written for comparison: ours, not a library's.

A program owns BLOCK_M queries of one head and loops over the keys in tiles of BLOCK_N, first those
that all of its queries see, without a mask, then the rest. Its output and the statistics of its
rows stay in registers (arXiv:2307.08691). Needs the package triton.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
# BLOCK_M, BLOCK_N, warps and stages, by (bytes of an element, head_dim). CUDA cores compute the
# products of float32, and with more columns the registers do not suffice.
TILES = {
    (2, 32): (128, 64, 4, 3),
    (2, 64): (128, 64, 4, 3),
    (2, 128): (128, 64, 8, 3),
    (4, 32): (64, 32, 8, 2),
    (4, 64): (64, 32, 8, 2),
}


@triton.jit
def _tiles_of_keys(
    begin, end, q, k_base, v_base, stride_k, stride_v, scale_log2, row_max, row_sum, acc, rows,
    seqlen_k, hidden_keys, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns row_max, row_sum and acc after the keys from ``begin`` to ``end``, in whole tiles.

    ``hidden_keys`` is seqlen_k - seqlen_q: row i of a causal problem sees keys up to i + that. The
    scores are scaled and in units of log2(e).
    """
    cols, dims = tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    for start in range(begin, end, BLOCK_N):
        keys = start + cols
        k_at = k_base + keys[None, :].to(tl.int64) * stride_k + dims[:, None]
        v_at = v_base + keys[:, None].to(tl.int64) * stride_v + dims[None, :]
        if MASKED:
            k = tl.load(k_at, mask=keys[None, :] < seqlen_k, other=0.0)
            v = tl.load(v_at, mask=keys[:, None] < seqlen_k, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = tl.dot(q, k, input_precision="ieee")
        if MASKED:
            seen = keys[None, :] < seqlen_k
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + hidden_keys)
            scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # A row that has seen no key yet keeps its maximum of -inf; 0 in its place avoids NaN.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale_log2, seqlen_q, seqlen_k, heads,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_ob, stride_os, stride_oh,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (i, j): queries BLOCK_M * i ... of head j % heads of batch entry j // heads."""
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # those with the most keys first
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows, dims = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    exists = rows[:, None] < seqlen_q
    row_at = rows[:, None].to(tl.int64)
    q_at = q_ptr + batch * stride_qb + head * stride_qh + row_at * stride_qs + dims[None, :]
    q = tl.load(q_at, mask=exists, other=0.0)
    k_base = k_ptr + batch * stride_kb + head * stride_kh
    v_base = v_ptr + batch * stride_vb + head * stride_vh
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    hidden_keys = seqlen_k - seqlen_q
    seen_by_all, seen_by_any = seqlen_k, seqlen_k
    if CAUSAL:
        seen_by_all = tl.minimum(seqlen_k, tl.maximum(0, block * BLOCK_M + hidden_keys + 1))
        seen_by_any = tl.minimum(seqlen_k, tl.maximum(0, (block + 1) * BLOCK_M + hidden_keys))
    whole = seen_by_all // BLOCK_N * BLOCK_N
    row_max, row_sum, acc = _tiles_of_keys(
        0, whole, q, k_base, v_base, stride_ks, stride_vs, scale_log2, row_max, row_sum, acc,
        rows, seqlen_k, hidden_keys, BLOCK_N, HEAD_DIM, False, CAUSAL,
    )  # fmt: skip
    row_max, row_sum, acc = _tiles_of_keys(
        whole, seen_by_any, q, k_base, v_base, stride_ks, stride_vs, scale_log2, row_max, row_sum,
        acc, rows, seqlen_k, hidden_keys, BLOCK_N, HEAD_DIM, True, CAUSAL,
    )  # fmt: skip
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # 0 where no key is seen
    out_at = out_ptr + batch * stride_ob + head * stride_oh + row_at * stride_os + dims[None, :]
    tl.store(out_at, out.to(q.dtype), mask=exists)
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + tl.program_id(1) * seqlen_q + rows, lse, mask=rows < seqlen_q)


def attention(q: Any, k: Any, v: Any, causal: bool = False) -> tuple[Any, Any]:
    """softmax(q k^T / sqrt(head_dim)) v of torch tensors on a GPU.

    Args:
        q: (batch, seqlen_q, heads, head_dim), last stride 1, float16, bfloat16 or float32; head_dim
            is 32, 64 or, with 16 bits, 128.
        k: (batch, seqlen_k, heads, head_dim), like q.
        v: like k.
        causal: row i sees the keys up to i + seqlen_k - seqlen_q.

    Returns:
        out like q, and LSE (batch, heads, seqlen_q) in float32; 0 and -inf where no key is seen.

    Raises:
        ValueError: shapes, strides, or a head_dim or dtype without a tile.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    if k.shape != (batch, k.shape[1], heads, head_dim) or v.shape != k.shape:
        fact = "k and v must be (batch, seqlen_k, heads, head_dim) with the sizes of q"
        raise ValueError(f"triton_attention: {fact}, got {q.shape}, {k.shape} and {v.shape}")
    if any(x.dtype != q.dtype or x.stride(-1) != 1 for x in (q, k, v)):
        got = [(x.dtype, x.stride()) for x in (q, k, v)]
        fact = "q, k and v must have one dtype and a last stride of 1"
        raise ValueError(f"triton_attention: {fact}, got {got}")
    if (q.itemsize, head_dim) not in TILES:
        allowed = ", ".join(f"{d} of {8 * size} bits" for size, d in TILES)
        got = f"{head_dim} of {q.dtype}"
        raise ValueError(f"triton_attention: head_dim must be one of {allowed}, got {got}")
    block_m, block_n, warps, stages = TILES[q.itemsize, head_dim]
    out = torch.empty_like(q)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    grid = triton.cdiv(seqlen_q, block_m), batch * heads
    strides = (stride for x in (q, k, v, out) for stride in x.stride()[:3])
    with torch.cuda.device(q.device):
        attention_kernel[grid](
            *(q, k, v, out, lse, LOG2_E / math.sqrt(head_dim), seqlen_q, k.shape[1], heads),
            *strides, head_dim, causal, block_m, block_n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse
