"""bench.norms without a GPU: bytes, the check, a run without the clock."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.norm import norms
from bench.norm import problems as norm_problems  # noqa: E402
from bench.norm.problems import NormProblem  # noqa: E402

SMALL = {
    "layer_norm": [(6, 40)],
    "rms_norm": [(6, 40)],
    "group_norm_activation": [(2, 64, 16), (2, 64, 4, 4)],
    "diffusion_step": [(4, 16)],
}


def test_bytes():
    norm = NormProblem("rms_norm", "bfloat16", (10, 100))
    assert norm.bytes("fwd") == norm.bytes("bwd") == 4 * 2000
    group = NormProblem("group_norm_activation", "float32", (2, 32, 5))
    assert (group.bytes("fwd"), group.bytes("bwd")) == (2 * 1280, 3 * 1280)
    assert NormProblem("diffusion_step", "float16", (2, 8)).bytes("fwd") == 3 * 32


def test_every_operation_has_shapes_beyond_the_l2_cache():
    assert set(norm_problems.SHAPES) == set(norm_problems.OPS)
    for op in norm_problems.OPS:
        assert max(x.bytes("fwd") for x in norm_problems.problems([op], ["bfloat16"])) > 200e6


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench.norms on torch's CPU with the clock taken out; returns its status and its file."""
    without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(norm_problems, "SHAPES", SMALL)

    def run(*arguments):
        status = norms.main([*arguments, "--impls", "cupyflash", "torch-eager", "--output", "dry"])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, capsys):
    status, results = dry_run("--dtype", "float32", "--repeats", "3")
    assert status == 0
    timed = {(x["op"], x["pass"], x["impl"]) for x in results["rows"]}
    expected = {
        (op, direction, impl)
        for op in norm_problems.OPS
        for direction in ("fwd", "bwd")
        for impl in ("cupyflash", "torch-eager")
        if (op, direction) != ("diffusion_step", "bwd")
    }
    assert timed == expected and results["copy_gbps"] == 4290.0
    row = results["rows"][0]
    assert row["gbps"] == round(4 * 4 * 240 / 1.0 / 1e6, 1)
    assert results["command"].startswith("python -m bench norms --dtype float32")
    assert "channels-last" in capsys.readouterr().out


def test_a_wrong_result_is_told(dry_run, monkeypatch, capsys):
    ours = norm_problems._ours
    wrong = lambda op: lambda *x, **options: tuple(1.01 * y for y in ours(op)(*x, **options))
    monkeypatch.setattr(norm_problems, "_ours", wrong)
    status, results = dry_run("--ops", "rms_norm", "--dtype", "float32")
    assert status == 1
    assert {x["impl"] for x in results["rows"]} == {"torch-eager"}
    printed = capsys.readouterr().out
    assert "cupyflash left out from fwd" in printed and "WRONG RESULT: result 0" in printed
