"""A small case of each kernel of attention, for compute-sanitizer: ``BACKEND DTYPE``."""

import sys

import cupy

import cupyflash
from cupyflash import environment
from cupyflash.ops.attention import dispatch, sharing
from cupyflash.testing import make_inputs, make_varlen_inputs

cupy.cuda.set_allocator(None)
backend, dtype = sys.argv[1:]
hopper = cupy.cuda.Device().compute_capability == "90"
widest = 256 if backend != "fp16x3" else 192 if hopper else 128  # of the backward
with environment.override(backend=backend):
    for many in (sharing.MANY, 0):  # with 0, forwards have the tiles for many tiles
        sharing.MANY = many
        dispatch._forward_plans.clear()
        for head_dim, window in ((64, None), (40, (30, 10)), (128, None), (widest, None)):
            x = make_inputs(
                "cupy",
                dtype,
                batch=1,
                seqlen_q=70,
                seqlen_k=150,
                heads_q=2,
                heads_kv=1,
                head_dim=head_dim,
            )
            options = {"causal": "top-left", "window": window}
            out, lse = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **options)
            for deterministic in (False, True):
                cupyflash.attention_backward(
                    x.dout, x.q, x.k, x.v, out, lse, deterministic=deterministic, **options
                )
    # Heads of 32 columns; sequences of one tile, and a bias that they share.
    for seqlen_q, seqlen_k, head_dim in (
        (70, 150, 32),
        (49, 49, 32),
        (33, 64, 64),
        (33, 64, 80),
        (33, 64, 128),
    ):
        x = make_inputs(
            "cupy",
            dtype,
            batch=3,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=2,
            head_dim=head_dim,
        )
        for bias in (None, cupy.ones((2, seqlen_q, seqlen_k), "float32")):
            out, lse = cupyflash.attention(x.q, x.k, x.v, bias=bias, return_lse=True)
            cupyflash.attention_backward(
                x.dout, x.q, x.k, x.v, out, lse, bias=bias, bias_grad=bias is not None
            )
    # Few queries, whose keys blocks share; packed sequences; a bias, sinks and dropout.
    x = make_inputs("cupy", dtype, batch=1, seqlen_q=20, seqlen_k=1200, heads_q=2, head_dim=128)
    cupyflash.attention(x.q, x.k, x.v)
    x = make_varlen_inputs("cupy", dtype, (70, 0, 150), heads_q=2, heads_kv=1)
    lengths = x.cu_seqlens_q, x.cu_seqlens_k, 150, 150
    cupyflash.flash_attn_varlen_func(x.q, x.k, x.v, *lengths, causal=True)
    x = make_inputs("cupy", dtype, batch=2, seqlen_q=70, seqlen_k=150, heads_q=2)
    used = cupy.asarray([50, 70], "int32")
    options = {
        "bias": cupy.ones((1, 2, 70, 150), dtype),
        "sinks": cupy.ones(2, "float32"),
        "dropout_p": 0.1,
        "dropout_seed": 1,
        "seqused_q": used,
        "seqused_k": used,
    }
    out, lse = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **options)
    cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, bias_grad=True, **options)
    # A bias whose rows are multiples of 16 bytes: sm_90 reads it through a tensor map, and stores
    # its gradient if it is not broadcast.
    for head_dim in (64, 96, widest):
        for keys, shape in ((150, (270, 152)), (152, (2, 2, 270, 152))):
            x = make_inputs(
                "cupy", dtype, batch=2, seqlen_q=270, seqlen_k=keys, heads_q=2, head_dim=head_dim
            )
            options = {"bias": cupy.ones(shape, dtype)[..., :keys]}
            out, lse = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **options)
            cupyflash.attention_backward(
                x.dout, x.q, x.k, x.v, out, lse, bias_grad=keys == 152, **options
            )
    # Blocks that take whole heads, of one key tile and of three.
    rules = sys.modules["cupyflash.ops.attention.sm90.backward"]
    rules.SAVED_KEYS = rules.HEADS_L2_FRACTION = 1e9
    for head_dim in (32, 64, 96, 128):
        for seqlen_k, causal in ((120, False), (270, False), (270, True)):
            x = make_inputs(
                "cupy",
                dtype,
                batch=2,
                seqlen_q=140,
                seqlen_k=seqlen_k,
                heads_q=2,
                head_dim=head_dim,
            )
            out, lse = cupyflash.attention(x.q, x.k, x.v, causal=causal, return_lse=True)
            cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, causal=causal)
cupy.cuda.Device().synchronize()
