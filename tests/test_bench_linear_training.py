"""bench.linear_training without a GPU: the check of all gradients, a run without the clock."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.linear import problems as linear_problems  # noqa: E402
from bench.linear import training as linear_training

SMALL = ((16, 40, False, "gelu_tanh", 33), (32, 48, True, "silu", 20), (32, 64, True, "silu", 20))


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench.linear_training on torch's CPU with the clock taken out; its status and its file."""
    without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(linear_training, "MODELS", SMALL)

    def run(*arguments):
        impls = ("cupyflash", "torch-eager")
        status = linear_training.main([*arguments, "--impls", *impls, "--output", "dry"])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


@pytest.mark.parametrize("mixed", [False, True], ids=["one-dtype", "autocast"])
def test_dry_run(dry_run, capsys, mixed):
    arguments = ("--dtype", "bfloat16", "--autocast") if mixed else ("--dtype", "float32")
    status, results = dry_run(*arguments, "--repeats", "3")
    assert status == 0
    timed = {(x["op"], x["depth"], x["hidden"], x["impl"]) for x in results["rows"]}
    for impl in ("cupyflash", "torch-eager"):
        assert {("mlp", *sizes[:2], impl) for sizes in SMALL} <= timed
        assert {("qkv_projection", 16, 40, impl), ("qkv_projection", 32, 48, impl)} <= timed
    assert len(results["rows"]) == 2 * 5  # the QKV projections of both Llamas are one
    assert "TF/s" in capsys.readouterr().out


def test_a_wrong_gradient_is_told(dry_run, monkeypatch, capsys):
    """Of one argument only, which the result does not show."""
    import torch

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            return 1.01 * dout

    ours = linear_problems.ours
    monkeypatch.setattr(
        linear_training,
        "ours",
        lambda problem, weight1, **x: ours(problem, weight1=Wrong.apply(weight1), **x),
    )
    status, results = dry_run("--ops", "mlp", "--dtype", "float32", "--rows", "5")
    assert status == 1 and "cupyflash" not in {x["impl"] for x in results["rows"]}
    assert "WRONG RESULT: " in capsys.readouterr().out
