"""bench.unet without a GPU: the check, a run without the clock."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.diffusion import unet  # noqa: E402
from bench.lib import report  # noqa: E402


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench.unet with a small model on torch's CPU; returns its status and its file."""
    without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(unet, "MODEL", {"widths": (16, 32), "embedding": 16, "groups": 4})
    monkeypatch.setattr(unet, "SAMPLERS", {"ddim": 4, "ddpm": 6})

    def run(*arguments):
        common = ["--dtype", "float32", "--repeats", "2", "--output", "dry"]
        status = unet.main([*common, *arguments])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, capsys):
    impls = ("torch-eager", "cupyflash", "cupyflash-graphs")
    status, results = dry_run("--batch", "1", "3", "--impls", *impls)
    assert status == 0 and results["command"].startswith("python -m bench unet --dtype float32")
    timed = {(x["sampler"], x["steps"], x["batch"], x["impl"]) for x in results["rows"]}
    kinds = (("ddim", 4), ("ddpm", 6))
    assert timed == {(*x, b, y) for x in kinds for b in (1, 3) for y in impls[:2]}
    assert all(x["op"] == "unet_denoising" and x["ms"] > 0 for x in results["rows"])
    printed = capsys.readouterr().out
    assert "cupyflash-graphs left out" in printed and "needs a model on a GPU" in printed
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert "vs graphs" in lines[0] and "…" not in printed and max(map(len, lines)) <= 120


def test_table_fits(capsys):
    rows = [
        unet.UnetProblem("bfloat16", "ddpm", 256).row(impl=impl, ms=123.456, gpu_ms=123.456)
        for impl in unet.IMPLS
    ]
    report.console().print(unet.table_of(rows))
    assert "…" not in capsys.readouterr().out


def test_a_wrong_result_is_told(dry_run, monkeypatch, capsys):
    right = unet.UnetProblem.our_loop

    def wrong(problem, kind, graph):
        loop = right(problem, kind, graph)
        return lambda: 1.01 * loop()

    monkeypatch.setattr(unet.UnetProblem, "our_loop", wrong)
    status, results = dry_run("--batch", "2", "--samplers", "ddim", "--impls", *unet.IMPLS[::3])
    assert status == 1 and {x["impl"] for x in results["rows"]} == {"torch-eager"}
    assert "WRONG RESULT: result: max error" in capsys.readouterr().out
