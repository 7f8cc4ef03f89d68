"""The backward pass of few tiles of keys, whose queries several blocks divide."""

import dataclasses
import functools

import numpy
import pytest
from matrix import each
from passes import forward_backward
from problems import HOPPER, problem_of

from cupyflash.ops.attention import sharing
from cupyflash.ops.attention.sm80.backward import backward_kernels as sm80_kernels
from cupyflash.ops.attention.sm90.backward import backward_kernels as sm90_kernels
from cupyflash.ops.attention.sm90.backward import group_shares
from cupyflash.ops.attention.sm90.forward import forward_kernel
from cupyflash.testing import expected, poison_free_memory, to_float64


def main_of(problem, kernels=sm90_kernels):
    return kernels(problem.kind(HOPPER.capability))[1]


@pytest.mark.parametrize("kernels", [sm80_kernels, sm90_kernels], ids=["sm80", "sm90"])
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "queries", "keys", "shares"),
    [
        (1, 8, 1, 8192, 8192, 8),  # 64 tiles on 132 multiprocessors: every query head alone
        (4, 71, 1, 2048, 2048, 12),  # six query heads each
        (4, 32, 8, 4096, 4096, 1),  # enough tiles as it is
        (1, 8, 8, 128, 128, 1),  # no group
        (1, 8, 2, 0, 0, 4),
        (4, 8, 8, 4096, 77, 4),  # a quarter of the rows each
        (4, 8, 8, 1500, 77, 1),  # too few rows
        (1, 8, 2, 4096, 77, 16),  # 8 tiles: a head each, and a quarter of its rows
    ],
)
def test_shares(kernels, batch, heads_q, heads_kv, queries, keys, shares):
    divides_rows = kernels is sm90_kernels
    if keys == 77 and not divides_rows:
        shares = heads_q // heads_kv
    problem = problem_of(batch, (heads_q, heads_kv), queries, keys, 128)
    config = main_of(problem, kernels)
    found = sharing.group_shares(config, problem, HOPPER, divides_rows=divides_rows)
    assert found == shares
    problem.shape.group_shares = shares
    assert (
        sharing.num_tiles(config, problem, shares)
        == config.grid(problem.shape)
        == -(-keys // 128) * (batch * heads_kv * shares)
    )


@pytest.mark.parametrize(("heads", "length", "shares"), [(8, 8192, 4), (8, 4096, 8), (3, 8192, 3)])
def test_shares_under_a_mask(heads, length, shares):
    """Two query heads each where that is enough tiles."""
    problem = problem_of(1, (heads, 1), length, length, 128, causal=True)
    found = sharing.group_shares(main_of(problem), problem, HOPPER, divides_rows=True)
    assert found == shares


@pytest.mark.parametrize(
    ("batch", "heads", "length", "least"),
    [
        (1, 16, 4096, 13),  # 512 tiles: not the four whose queries fit L2
        (1, 2, 300, 2),
        (4, 16, 4096, 1),  # many
    ],
)
def test_least_side_by_side(batch, heads, length, least):
    problem = problem_of(batch, (heads, heads), length, length, 128)
    assert sharing.least_side_by_side(main_of(problem), problem, HOPPER, 1) == least


@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "length", "forward", "backward"),
    [
        (16, 16, 16, 1024, 32, 16),  # about two tiles of queries, and one of keys, each processor
        (4, 16, 16, 4096, 8, 4),
        (1, 8, 8, 32768, 1, 1),
        (1, 32, 8, 8192, 8, 2),  # query heads that share keys: what fits L2
        (3, 4, 4, 2048, 4, 4),  # three even sections, not 8 heads and 4
    ],
)
def test_heads_per_section(batch, heads, heads_kv, length, forward, backward):
    problem = problem_of(batch, (heads, heads_kv), length, length, 128, causal=True)
    config = forward_kernel(problem.kind(HOPPER.capability))
    sections = functools.partial(sharing.heads_per_section, even_end=True)
    assert sections(config, problem, HOPPER, tensors=2) == forward
    assert sections(main_of(problem), problem, HOPPER, tensors=4) == backward


@pytest.mark.parametrize(
    ("heads", "length", "forward", "backward"),
    [(16, 16384, 2, 2), (16, 4096, 8, 4), (1, 300, 1, 1)],
)
def test_heads_per_section_of_masks(heads, length, forward, backward):
    """Their tiles differ in length, so the last ones of a launch must not be those of one head."""
    problem = problem_of(1, (heads, heads), length, length, 128)
    kernels = forward_kernel(problem.kind(HOPPER.capability)), main_of(problem)
    for config, tensors, sections in zip(kernels, (2, 4), (forward, backward)):
        config = dataclasses.replace(config, tiles=True)
        found = sharing.heads_per_section(config, problem, HOPPER, tensors=tensors, even_end=True)
        assert found == sections


@pytest.mark.parametrize("masked", [False, True])
def test_blocks_in_turns_divide_no_masked_rows(masked):
    """Under a mask a query tile may be in an earlier share of the next key tile: a deadlock."""
    problem = problem_of(1, (8, 8), 4096, 300, 64, causal=masked)
    main = main_of(problem)
    assert group_shares(main, problem, HOPPER, in_turns=False) == 4
    assert group_shares(main, problem, HOPPER, in_turns=True) == (1 if masked else 4)


@pytest.fixture
def share_out(monkeypatch):
    """So many blocks divide the queries of a group."""

    def share(count):
        monkeypatch.setattr(sharing, "group_shares", lambda *_, **__: count)

    return share


CASES = [
    {"seqlen_q": 200, "seqlen_k": 300, "heads_q": 6, "heads_kv": 1},
    {"seqlen_q": 300, "seqlen_k": 140, "heads_q": 14, "heads_kv": 2, "batch": 2},
]


@each(device="cuda")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3, "dropout_seed": 5}])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("case", CASES, ids=["mqa", "gqa"])
@pytest.mark.parametrize("shares", [2, 3, 5])
def test_gradients(target, share_out, shares, case, head_dim, options):
    """Any number of shares is right, uneven ones too; dk and dv are the same in every run."""
    share_out(shares)
    shape = case | {"seqlen_k": case["seqlen_k"] + shares}  # a plan of its own
    inputs = target.inputs(target.dtypes[0], head_dim=head_dim, **shape)
    results = forward_backward(inputs, **options)
    names = sorted(results.keys() - {"out", "lse"})
    expected(inputs, **options).check(**{name: results[name] for name in names})
    again = forward_backward(inputs, **options)
    for name in ("dk", "dv"):
        assert (to_float64(results[name]) == to_float64(again[name])).all()


ROWS = [  # multiples of the query heads of a key head, and what blocks then divide
    (2, {"seqlen_q": 700, "seqlen_k": 77, "heads_q": 3}, {}),
    (5, {"seqlen_q": 300, "seqlen_k": 300, "heads_q": 2}, {"causal": True}),
    (6, {"seqlen_q": 500, "seqlen_k": 140, "heads_q": 4, "heads_kv": 2}, {"window": (90, 30)}),
    (3, {"seqlen_q": 130, "seqlen_k": 500, "heads_q": 2}, {"dropout_p": 0.3, "dropout_seed": 5}),
    (8, {"seqlen_q": 400, "seqlen_k": 77, "heads_q": 2}, {"softcap": 5.0}),
    (4, {"seqlen_q": 600, "seqlen_k": 260, "heads_q": 2}, {"deterministic": True}),
]


@each(device="cuda")
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("turn", range(len(ROWS)))
def test_gradients_of_shares_of_rows(target, share_out, turn, head_dim):
    """Also where a share has no query tile; all gradients are repeatable where that is asked."""
    shares, shape, options = ROWS[turn]
    share_out(shares)
    # A plan of its own.
    shape = shape | {"seqlen_q": shape["seqlen_q"] + 1, "head_dim": head_dim}
    inputs = target.inputs(target.dtypes[turn % len(target.dtypes)], **shape)
    poison_free_memory(target.library, target.device, [x.nbytes for x in (inputs.q, inputs.k)])
    results, again = (forward_backward(inputs, **options) for _ in range(2))
    names = sorted(results.keys() - {"out", "lse"})
    options = dict(options)
    same = names if options.pop("deterministic", False) else ["dk", "dv"]
    expected(inputs, **options).check(**{name: results[name] for name in names})
    for name in same:
        assert (to_float64(results[name]) == to_float64(again[name])).all()


@each(device="cuda")
def test_gradients_of_packed_shares_of_rows(target, share_out):
    share_out(3)
    inputs = target.inputs(target.dtypes[0], batch=3, seqlen_q=401, seqlen_k=90, heads_q=2)
    used = target.array(numpy.array([401, 0, 130], "int32"))
    results = forward_backward(inputs, seqused_q=used)
    for i, rows in enumerate((401, 0, 130)):
        one = {name: getattr(inputs, name)[i : i + 1] for name in ("q", "k", "v", "dout")}
        one = {n: x[:, :rows] if n in ("q", "dout") else x for n, x in one.items()}
        found = {n: results[n][i : i + 1] for n in ("dk", "dv")}
        if rows:
            expected(dataclasses.replace(inputs, **one)).check(
                dq=results["dq"][i : i + 1, :rows], **found
            )
        else:
            assert all((to_float64(x) == 0).all() for x in found.values())
