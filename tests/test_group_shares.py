"""The backward pass of few tiles of keys, whose queries several blocks divide."""

import dataclasses
import types

import numpy
import pytest
from matrix import each
from passes import forward_backward

from cupyflash.attention import launch, plan
from cupyflash.attention.backends import sm80, sm90
from cupyflash.attention.problem import Features
from cupyflash.testing import expected, poison_free_memory, to_float64

structs = launch.structs


@pytest.mark.parametrize("backend", [sm80, sm90], ids=["sm80", "sm90"])
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
def test_shares(monkeypatch, backend, batch, heads_q, heads_kv, queries, keys, shares):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    if backend is sm80 and keys == 77:
        shares = heads_q // heads_kv  # its blocks divide no rows
    shape = structs.AttentionShape(batch, heads_q, heads_kv, queries, keys, 128)
    problem = types.SimpleNamespace(shape=shape, device=0, total_q=None, total_k=None)
    problem.features = Features()
    config = backend.backward("float16", 128, Features(), (9, 0))[1]
    assert launch.group_shares(config, problem) == shares
    shape.group_shares = shares
    assert (
        launch.num_tiles(config, problem)
        == config.grid(shape)
        == -(-keys // 128) * (batch * heads_kv * shares)
    )


@pytest.mark.parametrize(("heads", "length", "shares"), [(8, 8192, 4), (8, 4096, 8), (3, 8192, 3)])
def test_shares_under_a_mask(monkeypatch, heads, length, shares):
    """Two query heads each where that is enough tiles."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    shape = structs.AttentionShape(1, heads, 1, length, length, 128)
    problem = types.SimpleNamespace(shape=shape, device=0, total_q=None, total_k=None)
    problem.features = Features(masked=True)
    config = sm90.backward("float16", 128, problem.features, (9, 0))[1]
    assert launch.group_shares(config, problem) == shares


@pytest.mark.parametrize(
    ("batch", "heads", "length", "least"),
    [
        (1, 16, 4096, 13),  # 512 tiles: not the four whose queries fit L2
        (1, 2, 300, 2),
        (4, 16, 4096, 1),  # many
    ],
)
def test_least_side_by_side(monkeypatch, batch, heads, length, least):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    shape = structs.AttentionShape(batch, heads, heads, length, length, 128)
    shape.group_shares = 1
    problem = types.SimpleNamespace(shape=shape, device=0, total_q=None, total_k=None)
    config = sm90.backward("float16", 128, Features(), (9, 0))[1]
    assert launch.least_side_by_side(config, problem) == least


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
def test_heads_per_section(monkeypatch, batch, heads, heads_kv, length, forward, backward):
    for module in (launch, plan):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(plan, "l2_bytes", lambda device: 60 << 20)
    shape = structs.AttentionShape(batch, heads, heads_kv, length, length, 128, length * 2)
    shape.group_shares = 1
    problem = types.SimpleNamespace(shape=shape, device=0, total_q=None, total_k=None)
    problem.is_causal, features = True, Features(masked=True)
    config = sm90.forward("float16", 128, features, (9, 0))
    found = plan._heads_per_section(problem, config, heads * batch, length, 2)
    assert found == forward
    config = sm90.backward("float16", 128, features, (9, 0))[1]
    assert plan._heads_per_section(problem, config, heads_kv * batch, length, 4) == backward


@pytest.mark.parametrize("masked", [False, True])
def test_blocks_in_turns_divide_no_masked_rows(monkeypatch, masked):
    """Under a mask a query tile may be in an earlier share of the next key tile: a deadlock."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    shape = structs.AttentionShape(1, 8, 8, 4096, 300, 64)
    problem = types.SimpleNamespace(shape=shape, device=0, total_q=None, total_k=None)
    problem.features = Features(masked=masked)
    config = sm90.backward("float16", 64, problem.features, (9, 0))[1]
    assert launch.group_shares(config, problem) == 4
    assert launch.group_shares(config, problem, deterministic=True) == (1 if masked else 4)


CASES = [
    {"seqlen_q": 200, "seqlen_k": 300, "heads_q": 6, "heads_kv": 1},
    {"seqlen_q": 300, "seqlen_k": 140, "heads_q": 14, "heads_kv": 2, "batch": 2},
]


@each(device="cuda")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3, "dropout_seed": 5}])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("case", CASES, ids=["mqa", "gqa"])
@pytest.mark.parametrize("shares", [2, 3, 5])
def test_gradients(target, monkeypatch, shares, case, head_dim, options):
    """Any number of shares is right, uneven ones too; dk and dv are the same in every run."""
    monkeypatch.setattr(plan, "group_shares", lambda *_: shares)
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
def test_gradients_of_shares_of_rows(target, monkeypatch, turn, head_dim):
    """Also where a share has no query tile; all gradients are repeatable where that is asked."""
    shares, shape, options = ROWS[turn]
    monkeypatch.setattr(plan, "group_shares", lambda *_: shares)
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
def test_gradients_of_packed_shares_of_rows(target, monkeypatch):
    monkeypatch.setattr(plan, "group_shares", lambda *_: 3)
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
