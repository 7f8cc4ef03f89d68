"""Deterministic backward passes: blocks add in turns, and under a causal mask may walk up."""

import dataclasses
import sys

import numpy
import pytest
from emulator import COMPILER
from matrix import each
from passes import forward_backward
from places import SUPPORT, run_script
from problems import HOPPER, problem_of
from targets import compute_capability, has

import cupyflash
from cupyflash.ops.attention.sm90.backward import backward_kernels, walks_up
from cupyflash.testing import expected, make_alibi_slopes, poison_free_memory, to_float64


@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "shares", "causal", "up"),
    [
        (4, 16, 16, 1, True, True),
        (4, 16, 16, 1, False, False),  # all blocks of a head begin at once, whatever the way
        (1, 16, 16, 1, True, False),  # four tiles for each multiprocessor
        (4, 32, 16, 1, True, False),  # two query heads in each block
        (4, 32, 16, 2, True, True),
    ],
)
def test_which_walk_up(batch, heads, heads_kv, shares, causal, up):
    problem = problem_of(batch, (heads, heads_kv), 4096, 4096, 64, causal)
    main = backward_kernels(problem.kind(HOPPER.capability))[1]
    assert walks_up(main, problem, HOPPER, shares) == up


@pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")
def test_every_turn_comes(emulated_kernels):
    """In random problems, by the code of the kernels: see followed_turns.py."""
    run_script(SUPPORT / "followed_turns.py", emulated_kernels)


@pytest.mark.skipif(not (compute_capability()[0] and has("torch")), reason="needs a GPU and torch")
@pytest.mark.parametrize(("head_dim", "heads"), [(192, 16), (256, 16), (256, 40)])  # 40: walks up
def test_fewer_queries_than_keys(head_dim, heads):
    """A kernel that does not end becomes a failure; the time is that of compiling."""
    run_script(SUPPORT / "turn_calls.py", head_dim, heads, timeout=120, gpu=True)


@pytest.fixture
def walking_up(monkeypatch):
    """Few tiles are enough, and several query heads in a block do not matter."""
    monkeypatch.setattr(
        sys.modules["cupyflash.ops.attention.sm90.backward"],
        "walks_up",
        lambda main, problem, *_: problem.is_causal and not main.stores_dbias,
    )


CASES = [
    ({}, {"causal": True}),
    ({"seqlen_q": 401, "seqlen_k": 130}, {"causal": True}),  # queries without keys
    ({"seqlen_q": 401, "seqlen_k": 130}, {"causal": "top-left"}),  # the last see all
    ({"seqlen_q": 70, "seqlen_k": 300}, {"causal": "top-left"}),  # key tiles in the padding
    ({"seqlen_q": 70, "seqlen_k": 700}, {"causal": True}),  # most tiles of keys: all queries
    ({"seqlen_q": 300, "seqlen_k": 333}, {"window": (None, 70)}),
    ({"heads_q": 6, "heads_kv": 2}, {"causal": True}),
    ({"batch": 1, "seqlen_q": 900, "seqlen_k": 900}, {"causal": True, "softcap": 5.0}),
    ({"storage": "padded"}, {"causal": True, "alibi": True}),
    ({"layout": "bhsd"}, {"causal": True, "dropout_p": 0.3, "dropout_seed": 5}),
    ({}, {"causal": True, "bias": True}),
    ({}, {"causal": True, "key_mask": True}),
    ({}, {"causal": True, "lengths": ((301, 17), (320, 290))}),
]


def options_of(target, options, shape):
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = make_alibi_slopes(
            shape["heads_q"], target.library, device=target.device
        )
    if options.pop("bias", False):
        rng = numpy.random.default_rng(3)
        rows, keys = shape["seqlen_q"], -(-shape["seqlen_k"] // 8) * 8
        bias = rng.standard_normal((shape["batch"], shape["heads_q"], rows, keys))
        options["bias"] = target.array(bias.astype("float32"))[..., : shape["seqlen_k"]]
    if options.pop("key_mask", False):
        mask = numpy.arange(shape["seqlen_k"]) % 5 != 3
        options["bias"] = target.array(numpy.tile(mask, (shape["batch"], 1, 1, 1)))
    return options


def assert_same_bits(results, again):
    for name in ("dq", "dk", "dv"):
        assert (to_float64(results[name]) == to_float64(again[name])).all(), name


def check_sequence(inputs, results, i, rows, keys):
    """Sequence i of a causal problem, of whose rows and keys these are used."""
    ends = dict.fromkeys(("q", "out", "dout", "dq"), rows) | dict.fromkeys(
        ("k", "v", "dk", "dv"), keys
    )
    part = lambda name, x: x[i : i + 1, : ends[name]]  # noqa: E731
    one = {name: part(name, getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
    found = {name: part(name, results[name]) for name in ("out", "dq", "dk", "dv")}
    expected(dataclasses.replace(inputs, **one), causal=True).check(**found)


@each(device="cuda")
@pytest.mark.parametrize("head_dims", [32, 64, 96, 128, 192, (192, 128), 256], ids=str)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_walking_up(target, walking_up, number, head_dims):
    """The gradients are right, and have the same bits in every run."""
    shape, options = CASES[number]
    head_dim, head_dim_v = head_dims if isinstance(head_dims, tuple) else (head_dims, head_dims)
    # A plan of its own.
    shape = {"batch": 2, "seqlen_q": 311, "seqlen_k": 341, "heads_q": 3} | shape
    dtype = target.dtypes[number % len(target.dtypes)]
    inputs = target.inputs(dtype, head_dim=head_dim, head_dim_v=head_dim_v, **shape)
    options = options_of(target, options, shape)
    lengths = options.pop("lengths", None)
    if lengths:
        rows = [target.array(numpy.array(x, "int32")) for x in lengths]
        options |= {"seqused_q": rows[0], "seqused_k": rows[1]}
    poison_free_memory(target.library, target.device, [x.nbytes for x in (inputs.q, inputs.k)])
    results, *again = (forward_backward(inputs, deterministic=True, **options) for _ in range(3))
    for other in again:
        assert_same_bits(results, other)
    if not lengths:
        expected(inputs, **options).check(**results)
        return
    for i, (rows, keys) in enumerate(zip(*lengths)):
        check_sequence(inputs, results, i, rows, keys)


@each(device="cuda", library="torch")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences(target, walking_up, head_dim):
    import torch

    lengths = [431, 0, 17, 96, 130]
    inputs = target.varlen_inputs(target.dtypes[0], lengths, head_dim=head_dim, heads_q=3)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    ends = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, 431, 431)

    def gradients():
        out = cupyflash.flash_attn_varlen_func(*leaves, *ends, causal=True, deterministic=True)
        return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout)))

    found, again = gradients(), gradients()
    expected(inputs, causal=True).check(**found)
    assert_same_bits(found, again)


@each(device="cuda")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles(target, head_dim):
    """More than eight for each multiprocessor of a H200: blocks walk up unless they are made to."""
    inputs = target.inputs(target.dtypes[0], batch=9, heads_q=16, seqlen_q=1030, head_dim=head_dim)
    results, again = (forward_backward(inputs, causal=True, deterministic=True) for _ in range(2))
    assert_same_bits(results, again)
    for i in (0, 8):
        check_sequence(inputs, results, i, 1030, 1030)
