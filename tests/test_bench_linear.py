"""bench linear without a GPU: what is counted, the check, a run without the clock."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.linear import linear  # noqa: E402
from bench.linear import problems as linear_problems
from bench.linear.problems import LinearProblem  # noqa: E402

SMALL = ((16, 40, False, "gelu_tanh", 33), (32, 48, True, "silu", 20))


def test_what_is_counted():
    mlp = LinearProblem("mlp", "bfloat16", 4, 10, 30, True, "silu")
    assert mlp.bytes == 2 * 900 and mlp.flops == 2 * 4 * 900
    qkv = LinearProblem("qkv_projection", "float32", 4, 4096, 14336, True, "silu")
    assert qkv.heads == (32, 8) and qkv.bytes == 4 * 6144 * 4096


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench linear on torch's CPU with the clock taken out; returns its status and its file."""
    without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(linear_problems, "MODELS", SMALL)

    def run(*arguments):
        impls = ("cupyflash", "torch-eager", "cublaslt")
        status = linear.main([*arguments, "--impls", *impls, "--output", "dry"])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, capsys):
    status, results = dry_run("--dtype", "float32", "--repeats", "3")
    assert status == 0
    timed = {(x["op"], x["rows"], x["impl"]) for x in results["rows"]}
    for op in linear_problems.OPS:
        for impl in ("cupyflash", "torch-eager"):
            assert {(op, rows, impl) for rows in (1, 4, 16, 33, 20)} <= timed
        # cuBLASLt's GELU is the tanh one, that of torch's CPU the exact one.
        assert (op, 20, "cublaslt") in timed
    blocks = {
        (x["rows"], x["problem"][-6:])
        for x in results["rows"]
        if x["block"] and x["impl"] == "cupyflash"
    }
    assert {(33, "erNorm"), (20, "rotary")} <= blocks
    assert results["command"].startswith("python -m bench linear --dtype float32")
    assert "GB/s" in capsys.readouterr().out


def test_a_wrong_result_is_told(dry_run, monkeypatch, capsys):
    ours = linear_problems.ours
    monkeypatch.setattr(linear_problems, "ours", lambda problem, **x: 1.01 * ours(problem, **x))
    status, results = dry_run("--ops", "mlp", "--dtype", "float32", "--rows", "5")
    assert status == 1 and "cupyflash" not in {x["impl"] for x in results["rows"]}
    assert "WRONG RESULT: result: max error" in capsys.readouterr().out
