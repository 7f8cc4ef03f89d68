"""A second opinion: the forward kernel in Triton of bench/ (GPU only)."""

import pytest
from matrix import each

import cupyflash
from cupyflash.testing import expected

pytest.importorskip("triton", reason="triton is not installed")
triton_attention = pytest.importorskip(
    "bench.attention.triton_attention", reason="no checkout"
).attention


@each(library="torch", device="cuda")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlens", [(777, 777), (200, 513), (300, 140)], ids=str)
def test_forward_equals_triton(target, seqlens, head_dim, causal):
    """Rows that see no key are among the causal ones of more queries than keys."""
    import torch

    seqlen_q, seqlen_k = seqlens
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim}
    inputs = target.inputs("float16", **sizes)
    qkv = inputs.q, inputs.k, inputs.v
    theirs, their_lse = triton_attention(*qkv, causal)
    expected(inputs, causal=causal).check(out=theirs)
    ours, our_lse = cupyflash.attention(*qkv, causal=causal, return_lse=True)
    # Two results that are each within one rounding of float16 of the truth, give or take P's own.
    torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=2**-9 * float(theirs.abs().max()))
    torch.testing.assert_close(our_lse, their_lse, rtol=2**-19, atol=2**-18)


@each(library="torch", device="cuda")
def test_triton_in_float32(target):
    inputs = target.inputs("float32", seqlen_q=200, seqlen_k=333, head_dim=64)
    for causal in (False, True):
        out, _ = triton_attention(inputs.q, inputs.k, inputs.v, causal)
        expected(inputs, causal=causal).check(out=out)
