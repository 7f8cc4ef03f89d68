"""Whole runs of bench.ladder on the CPU with the clock taken out, and its pictures."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.attention import ladder, rungs  # noqa: E402
from bench.lib import providers  # noqa: E402
from cupyflash.testing.problem import Problem  # noqa: E402


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench.ladder on the CPU; returns its exit status, its file and its page."""
    torch = without_gpu(monkeypatch, tmp_path)
    right = providers.PROVIDERS["sdpa-math"].load()

    def too_large(q, k, v, causal):
        if q.shape[2] > 256:
            raise torch.OutOfMemoryError("of 1 GiB")
        return right(q, k, v, causal)

    def wrong(q, k, v, causal):
        return right(q, k, v, causal) * 1.2

    def inexact(q, k, v, causal):
        """Off by about twice what is allowed, as one sum over many keys may be."""
        return right(q, k, v, causal) + 1.3e-6

    functions = {"naive": too_large, "fused": right, "cupyflash-simt": right, "triton": wrong}
    functions |= {"sdpa-efficient": inexact, "cupyflash-fp16x3": inexact}
    for name, function in functions.items():
        fake = providers.Provider(name, lambda function=function: function, layout="bhsd")
        monkeypatch.setitem(rungs.RUNGS, name, fake)
    monkeypatch.setattr(ladder, "total_memory", lambda: 2**40)
    monkeypatch.setattr(ladder, "peak_extra", lambda run: run().nbytes + 2**20)

    def run(*arguments):
        status = ladder.main([*arguments, "--heads", "2", "--head-dim", "16", "--output", "dry"])
        page = (tmp_path / "dry.md").read_text()
        return status, json.loads((tmp_path / "dry.json").read_text()), page

    return run


SIZES = ("--seqlen", "128", "256", "512", "--dtype", "float32")


def test_dry_run(dry_run, tmp_path, capsys):
    names = ("naive", "fused", "flash-attention-1", "cupyflash-simt", "sdpa-math")
    status, results, page = dry_run(*SIZES, "--rungs", *names, "--limit-ms", "3")
    assert status == 0
    timed = [(row["seqlen_q"], row["impl"]) for row in results["rows"]]
    both = ["naive", "fused", "cupyflash-simt", "sdpa-math"]
    # A call takes 1 ms, so that four times as much is beyond the limit of the second length.
    assert timed == [(128, name) for name in both]
    why = {(row["seqlen_q"], row["impl"]): row["why"] for row in results["left_out"]}
    assert why[128, "flash-attention-1"] == "no kernel"  # it needs a GPU
    assert why[256, "fused"] == why[512, "sdpa-math"] == "over 0.003 s"
    row = results["rows"][0]
    least = 4 * 128 * 2 * 16 * 4
    assert row["least_mb"] == round(least / 1e6, 3)
    assert row["extra_mib"] == round(1 + least / 4 / 2**20, 3)
    assert "| 128" in page and "over 0.003 s" in page and "DRAM MB (no ncu)" in page
    assert "| flash-attention-1" not in page
    pytest.importorskip("matplotlib")
    pictures = {path.name for path in tmp_path.glob("dry*g")}
    assert pictures == {"dry.svg", "dry-memory.svg"}


def test_out_of_memory_and_wrong_rungs(dry_run):
    status, results, page = dry_run(*SIZES, "--rungs", "naive", "triton", "sdpa-math")
    assert status == 1  # the Triton kernel is this project's, too
    why = {(row["seqlen_q"], row["impl"]): row["why"] for row in results["left_out"]}
    assert why[512, "naive"] == "OOM" and why[128, "triton"] == "wrong"
    assert [x["impl"] for x in results["rows"] if x["seqlen_q"] == 512] == ["sdpa-math"]
    assert "OOM" in page


def test_slack_is_not_for_the_kernels_of_the_library(dry_run):
    names = ("sdpa-efficient", "cupyflash-fp16x3")
    status, results, _ = dry_run(*SIZES[:2], "--dtype", "float32", "--rungs", *names)
    assert status == 1
    assert [row["impl"] for row in results["rows"]] == ["sdpa-efficient"]
    assert [(row["impl"], row["why"]) for row in results["left_out"]] == [(names[1], "wrong")]


def test_what_does_not_fit_is_tried_although_it_would_take_long(dry_run, monkeypatch):
    monkeypatch.setattr(ladder, "total_memory", lambda: 2**20)
    _, results, _ = dry_run(*SIZES, "--rungs", "naive", "fused", "--limit-ms", "3")
    why = {(row["seqlen_q"], row["impl"]): row["why"] for row in results["left_out"]}
    assert why[512, "naive"] == "OOM" and why[512, "fused"] == "over 0.003 s"


def test_traffic(dry_run, monkeypatch):
    """The calls for ncu are those of the file, and their bytes come into its rows."""
    asked = []

    def bytes_of(module, arguments):
        monkeypatch.setattr(ladder.traffic, "profile", asked.append)
        assert module == "ladder" and ladder.main(arguments) == 0
        for call in asked[0].values():
            assert call().shape
        return dict.fromkeys(asked[0], 1000000.0)

    monkeypatch.setattr(ladder.traffic, "bytes_of", bytes_of)
    _, results, page = dry_run(*SIZES[:2], "--dtype", "float32", "--rungs", "fused", "--traffic")
    assert list(asked[0]) == ["float32 128 fused"]
    (row,) = results["rows"]
    flops = Problem("float32", 16, 1, 128, 2, 2, False).flops("fwd")
    assert row["dram_mb"] == 1.0 and row["flop_per_byte"] == round(flops / 1e6, 2)
    assert "no ncu" not in page
