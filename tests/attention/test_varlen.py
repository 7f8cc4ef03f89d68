"""Packed sequences, without padding."""

import pytest
from arrays import stack
from matrix import each, select

import cupyflash
from cupyflash.testing import expected, make_alibi_slopes, to_float64

# (lengths of queries, lengths of keys)
LENGTHS = {
    "one": ([113], [113]),
    "odd": ([1, 113, 64, 7], [1, 113, 64, 7]),
    "differ": ([1, 130, 64, 30], [113, 20, 64, 1]),
    "empty": ([0, 50, 0, 33, 0], [20, 50, 0, 0, 0]),
    "many": ([5] * 20, [9] * 20),
}
GPU_LENGTHS = {"long": ([1023, 1, 2049, 300], [4097, 300, 1023, 0])}
OPTIONS = [
    {},
    {"causal": True},
    {"window": (20, 3)},
    {"causal": True, "softcap": 5.0},
    {"window": (40, None), "alibi": 2},
    {"causal": True, "alibi": 1},
]
SHAPES = [  # heads_q, heads_kv, head_dim, storage
    (2, 2, 64, "contiguous"),
    (4, 2, 128, "padded"),
    (3, 1, 40, "contiguous"),
]


def lengths_of(name):
    return (LENGTHS | GPU_LENGTHS)[name]


def problem(target, name, shape, options, dtype):
    """Inputs, and the options in the words of the reference and of flash-attn."""
    heads_q, heads_kv, head_dim, storage = shape
    lengths = lengths_of(name)
    inputs = target.varlen_inputs(
        dtype, *lengths, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, storage=storage
    )
    options = dict(options)
    if alibi := options.pop("alibi", 0):
        batch = len(lengths[0]) if alibi == 2 else None
        options["alibi_slopes"] = make_alibi_slopes(
            heads_q, target.library, batch=batch, device=target.device
        )
    left, right = options.get("window", (None, None))
    window_size = tuple(-1 if bound is None else bound for bound in (left, right))
    theirs = {name: x for name, x in options.items() if name != "window"}
    return inputs, options, theirs | {"window_size": window_size}


def arguments(inputs, name):
    lengths_q, lengths_k = lengths_of(name)
    return inputs.cu_seqlens_q, inputs.cu_seqlens_k, max(lengths_q), max(lengths_k)


def combinations(library=None):
    """Parametrises a test over (target, name, shape), the long sequences on a GPU only."""
    return pytest.mark.parametrize(
        ("target", "name", "shape"),
        [
            pytest.param(target, name, SHAPES[i % 3], id=f"{target.name}-{name}")
            for target in select(library)
            for i, name in enumerate(LENGTHS | (GPU_LENGTHS if target.gpu else {}))
        ],
        indirect=["target"],
    )


@combinations()
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward(target, name, shape, options):
    dtype = target.dtypes[len(name) % len(target.dtypes)]
    inputs, options, theirs = problem(target, name, shape, options, dtype)
    out, lse, _ = cupyflash.flash_attn_varlen_func(
        inputs.q, inputs.k, inputs.v, *arguments(inputs, name), return_attn_probs=True, **theirs
    )
    assert tuple(lse.shape) == (shape[0], sum(lengths_of(name)[0]))
    expected(inputs, **options).check(out=out, lse=lse)


@combinations("torch")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward(target, name, shape, options):
    import torch

    dtype = target.dtypes[len(name) % len(target.dtypes)]
    inputs, options, theirs = problem(target, name, shape, options, dtype)
    qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = cupyflash.flash_attn_varlen_func(*qkv, *arguments(inputs, name), **theirs)
    dq, dk, dv = torch.autograd.grad(out, qkv, inputs.dout)
    expected(inputs, **options).check(dq=dq, dk=dk, dv=dv)


@each(library="torch", device="cuda")
def test_deterministic_is_bitwise_repeatable(target):
    import torch

    inputs = target.varlen_inputs("float16", [700, 1, 1300], heads_q=8, heads_kv=2, head_dim=128)
    qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    runs = []
    for _ in range(3):
        out = cupyflash.flash_attn_varlen_func(
            *qkv, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 1300, 1300, deterministic=True
        )
        runs.append(torch.autograd.grad(out, qkv, inputs.dout))
    assert all((a == b).all() for run in runs[1:] for a, b in zip(runs[0], run))


@each()
def test_packed_forms(target):
    inputs = target.varlen_inputs("float16", [1, 70, 33])
    cu_seqlens, qkv = inputs.cu_seqlens_q, (inputs.q, inputs.k, inputs.v)
    separate = cupyflash.flash_attn_varlen_func(
        *qkv, cu_seqlens, cu_seqlens, 70, 70, 0.0, None, True
    )
    packed = cupyflash.flash_attn_varlen_qkvpacked_func(
        stack(target, *qkv), cu_seqlens, 70, causal=True
    )
    assert (packed == separate).all()
    packed = cupyflash.flash_attn_varlen_kvpacked_func(
        inputs.q, stack(target, *qkv[1:]), cu_seqlens, cu_seqlens, 70, 70, causal=True
    )
    assert (packed == separate).all()


@each()
def test_equals_padded_batch(target):
    """Sequences of one length: packed and batched agree to the last bit."""
    inputs = target.inputs("float16", batch=3, seqlen_q=50)
    packed = target.varlen_inputs("float16", [50] * 3)
    q, k, v = (x.reshape(150, 4, 64) for x in (inputs.q, inputs.k, inputs.v))
    cu_seqlens = packed.cu_seqlens_q
    out = cupyflash.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 50, 50, causal=True)
    batched = cupyflash.attention(inputs.q, inputs.k, inputs.v, causal=True)
    assert (to_float64(out).reshape(3, 50, 4, 64) == to_float64(batched)).all()


@each()
def test_no_sequences(target):
    inputs = target.varlen_inputs("float16", [])
    cu_seqlens = inputs.cu_seqlens_q
    out, lse, _ = cupyflash.flash_attn_varlen_func(
        inputs.q, inputs.k, inputs.v, cu_seqlens, cu_seqlens, 0, 0, return_attn_probs=True
    )
    assert tuple(out.shape) == (0, 4, 64) and tuple(lse.shape) == (4, 0)
