"""The backward pass of few key heads, whose query heads several blocks divide."""

import types

import pytest
from matrix import each
from passes import forward_backward

from cupyflash.attention import launch, plan
from cupyflash.attention.backends import sm80, sm90
from cupyflash.attention.problem import Features
from cupyflash.testing import expected, to_float64

structs = launch.structs


@pytest.mark.parametrize("backend", [sm80, sm90], ids=["sm80", "sm90"])
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "keys", "shares"),
    [
        (1, 8, 1, 8192, 8),  # 64 tiles on 132 multiprocessors: every query head alone
        (4, 71, 1, 2048, 9),  # eight query heads each
        (4, 32, 8, 4096, 1),  # enough tiles as it is
        (1, 8, 8, 128, 1),  # no group
        (1, 8, 2, 0, 4),
    ],
)
def test_shares(monkeypatch, backend, batch, heads_q, heads_kv, keys, shares):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    shape = structs.AttentionShape(batch, heads_q, heads_kv, keys, keys, 128)
    problem = types.SimpleNamespace(shape=shape, device=0, total_q=None, total_k=None)
    config = backend.backward("float16", 128, Features(), (9, 0))[1]
    assert launch.group_shares(config, problem) == shares
    shape.group_shares = shares
    assert (
        launch.num_tiles(config, problem)
        == config.grid(shape)
        == -(-keys // 128) * (batch * heads_kv * shares)
    )


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
