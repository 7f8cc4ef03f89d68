"""Calls whose kernels run on the CPU (test_emulator.py): of attention, checked against float64, of
the sampling of tokens, and of the norm of heads.

``python tests/support/emulated_calls.py FOLDER [few]``; kernels are compiled into the folder, with
``few`` those of some of the cases. To run other tests in this way:
``EMULATED_KERNELS=FOLDER pytest tests/attention/test_triangle.py``.
"""

import sys
from pathlib import Path

import emulator
import numpy
import pytest
import torch
from passes import forward_backward
from targets import large_tiles

import cupyflash
from cupyflash import environment
from cupyflash.ops.decode.sampling import Sampling, sample
from cupyflash.ops.linear.head_norm import head_norm
from cupyflash.testing import expected, make_inputs

LENGTHS = {"batch": 1, "seqlen_q": 150, "seqlen_k": 330}


def cases():
    """Name, inputs and options: the kernels of all kinds that a Hopper GPU takes.

    Their tiles are few, so that the forward of every second one has large tiles all the same.
    """
    inputs = make_inputs("torch", "bfloat16", **LENGTHS, heads_q=2, heads_kv=1)
    # Maxima that grow from key tile to key tile by more than a weight can hold.
    inputs.k.mul_(torch.linspace(9, 1, 330)[:, None, None])
    yield "maxima that move, one key head", inputs, {}

    inputs = make_inputs("torch", "float16", **LENGTHS, heads_q=1, head_dim=128)
    options = {"causal": True, "window": (200, None), "sinks": torch.tensor([0.7])}
    yield "causal window and sinks", inputs, options

    inputs = make_inputs("torch", "bfloat16", **LENGTHS | {"batch": 2}, heads_q=3)
    yield "blocks of the backward that take whole heads", inputs, {}

    inputs = make_inputs("torch", "bfloat16", **LENGTHS, heads_q=1, head_dim=192, head_dim_v=128)
    yield "wide heads, v of fewer columns", inputs, {"causal": True}

    lengths = {"batch": 1, "seqlen_q": 70, "seqlen_k": 300}
    inputs = make_inputs("torch", "bfloat16", **lengths, heads_q=2, head_dim=192, head_dim_v=128)
    yield "key tiles that begin in the padding of queries, in turns", inputs, {"causal": "top-left"}

    inputs = make_inputs("torch", "bfloat16", **LENGTHS, heads_q=2)
    rng = numpy.random.default_rng(1)
    # Rows of a multiple of 16 bytes, which TMA can load.
    bias = torch.tensor(rng.standard_normal((1, 2, 150, 336)), dtype=torch.bfloat16)[..., :330]
    yield "bias and its gradient", inputs, {"bias": bias}

    inputs = make_inputs("torch", "bfloat16", **LENGTHS, heads_q=2, head_dim=128)
    options = {"alibi_slopes": torch.tensor([0.7, 0.02])}
    yield "ALiBi, from the diagonal on", inputs, options

    inputs = make_inputs("torch", "bfloat16", **LENGTHS, heads_q=2, head_dim=128)
    yield "softcap", inputs, {"softcap": 3.0}

    inputs = make_inputs("torch", "float16", **LENGTHS, heads_q=2)
    yield "ALiBi behind a softcap", inputs, options | {"softcap": 3.0}

    inputs = make_inputs("torch", "float16", **LENGTHS | {"seqlen_k": 2800}, heads_q=1)
    inputs.k[:, 20] *= 6  # in one of the last tiles, of which nobody expects it
    yield "scores near the softcap behind many that are far below it", inputs, {"softcap": 50.0}


def check_cases(folder):
    for number, (name, inputs, options) in enumerate(cases()):
        if "few" in sys.argv[2:] and number in (2, 4, 6):
            continue
        with emulator.hopper(folder) as launched, large_tiles(number % 2):
            results = forward_backward(inputs, **options)
        print(f"{name}: {', '.join(launched)}")
        expected(inputs, **options).check(**results)


def check_float32(folder):
    """Products of parts of float16, which so few rows do not have unless they are forced."""
    inputs = make_inputs("torch", "float32", **LENGTHS, heads_q=1)
    with emulator.hopper(folder) as launched, environment.override(backend="fp16x3"):
        results = forward_backward(inputs, softcap=90.0)
    assert {"flash_fwd_fp16x3", "flash_bwd_fp16x3"} <= set(launched)
    expected(inputs, softcap=90.0).check(**results)


def check_broken_kernels(folder):
    """The emulator finds a wait that is missing, and one that never ends."""
    breaks = {
        "shared.k.wait_full(kv_ring);": "too many arrivals",
        "consumer.shared.v.release(v_ring.stage);": "nobody can go on",
    }
    for number, (statement, consequence) in enumerate(breaks.items()):
        inputs = make_inputs("torch", "bfloat16", batch=1, seqlen_q=100 + number, seqlen_k=900)
        broken = emulator.hopper(folder, without=statement)
        with broken, large_tiles(), pytest.raises(RuntimeError, match=consequence):
            cupyflash.attention(inputs.q, inputs.k, inputs.v)


def check_missing_fence(folder):
    """It finds sums of dQ that are fetched, or added to, before what came first is in memory."""
    inputs = make_inputs("torch", "bfloat16", **LENGTHS | {"batch": 2, "seqlen_q": 151}, heads_q=3)
    statement = "if (!tile.begins_dq()) bulk_wait_done();"
    with emulator.hopper(folder, without=statement):
        results = forward_backward(inputs)
    with pytest.raises(AssertionError, match="dq"):
        expected(inputs).check(**results)


def check_signed_zeros(folder):
    """Tokens are those of NumPy where the largest logits are zeros of both signs."""
    rows = torch.full((2, 8), -1.0)
    rows[0, :2], rows[1, :2] = torch.tensor([-0.0, 0.0]), torch.tensor([0.0, -0.0])
    logits = rows.repeat(16, 1)
    for sampling in (Sampling(1.0, top_k=2, seed=1), Sampling(1.0, top_p=0.4, seed=1)):
        right, found = torch.zeros((2, 32), dtype=torch.int32)
        sample(logits, sampling, out=right)
        with emulator.hopper(folder) as launched:
            sample(logits, sampling, out=found)
        print(f"{sampling}: {', '.join(launched)}")
        assert launched == ["sample"] and right.max() == 1 and torch.equal(found, right)


def check_head_norm(folder):
    """Heads of an odd number of rows, whose last block has warps without a head."""
    make = torch.Generator().manual_seed(0)
    qkv, angles = torch.randn(5, 5, 72, generator=make).half(), torch.rand(9, 36, generator=make)
    weights = torch.randn(2, 72, generator=make).half()
    places = torch.tensor([8, 0, 3, 5, 1], dtype=torch.int32)
    rotary = cupyflash.Rotary(angles.cos(), angles.sin(), places)
    right, found = qkv.clone(), qkv.clone()
    run = lambda x: head_norm(x[:, :3], x[:, 3:4], *weights, rotary=rotary, eps=1e-6)
    run(right)
    with emulator.hopper(folder) as launched:
        run(found)
    print(f"norm and rotary embedding of heads: {', '.join(launched)}")
    assert launched == ["head_norm"] and not torch.equal(right, qkv)
    # Sums in another order: of few numbers the rounding differs, by one last place.
    assert torch.equal(found[:, 4], qkv[:, 4]) and (found - right).abs().max() <= 2.0**-8
    assert (found != right).float().mean() < 0.01


if __name__ == "__main__":
    torch.set_deterministic_debug_mode("error")  # then torch.empty() is filled with NaN
    check_cases(Path(sys.argv[1]))
    check_float32(Path(sys.argv[1]))
    check_signed_zeros(Path(sys.argv[1]))
    check_head_norm(Path(sys.argv[1]))
    check_missing_fence(Path(sys.argv[1]))
    check_broken_kernels(Path(sys.argv[1]))  # last, as the counter of tiles is left as it was
