"""bench ladder: why rungs end, what is wrong, and the traffic that ncu measures.

Runs are those of small_benchmarks.py.
"""

import pytest
import torch

from bench.attention import ladder as script
from bench.attention import rungs
from bench.lib import providers
from cupyflash.testing.problem import Problem


@pytest.fixture
def ladder(benchmarks, monkeypatch):
    """bench ladder with rungs of this file; returns its exit status, its results and its page."""
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

    def run(*arguments, **changes):
        status, results = benchmarks.run("ladder", *arguments, **changes)
        return status, results, (benchmarks.folder / "ladder.md").read_text()

    return run


SIZES = ("--seqlen", "128", "256", "512", "--dtype", "float32")


def test_out_of_memory_and_wrong_rungs(ladder):
    status, results, page = ladder(*SIZES, "--rungs", "naive", "triton", "sdpa-math")
    assert status == 1  # the Triton kernel is this project's, too
    why = {(row["seqlen_q"], row["impl"]): row["why"] for row in results["left_out"]}
    assert why[512, "naive"] == "OOM" and why[128, "triton"] == "wrong"
    assert [x["impl"] for x in results["rows"] if x["seqlen_q"] == 512] == ["sdpa-math"]
    assert "OOM" in page


def test_slack_is_not_for_the_kernels_of_the_library(ladder):
    names = ("sdpa-efficient", "cupyflash-fp16x3")
    status, results, _ = ladder(*SIZES[:2], "--dtype", "float32", "--rungs", *names)
    assert status == 1
    assert [row["impl"] for row in results["rows"]] == ["sdpa-efficient"]
    assert [(row["impl"], row["why"]) for row in results["left_out"]] == [(names[1], "wrong")]


def test_what_does_not_fit_is_tried_although_it_would_take_long(ladder):
    small = {"attention.ladder.total_memory": lambda: 2**15}
    _, results, _ = ladder(*SIZES, "--rungs", "naive", "fused", "--limit-ms", "3", **small)
    why = {(row["seqlen_q"], row["impl"]): row["why"] for row in results["left_out"]}
    assert why[512, "naive"] == "OOM" and why[512, "fused"] == "over 0.003 s"


def test_traffic(ladder, monkeypatch):
    """The calls for ncu are those of the file, and their bytes come into its rows."""
    asked = []

    def bytes_of(module, arguments):
        monkeypatch.setattr(script.traffic, "profile", asked.append)
        assert module == "ladder" and script.main(arguments) == 0
        for call in asked[0].values():
            assert call().shape
        return dict.fromkeys(asked[0], 1000000.0)

    monkeypatch.setattr(script.traffic, "bytes_of", bytes_of)
    _, results, page = ladder(*SIZES[:2], "--dtype", "float32", "--rungs", "fused", "--traffic")
    assert list(asked[0]) == ["float32 128 fused"]
    (row,) = results["rows"]
    flops = Problem("float32", 16, 1, 128, 2, 2, False).flops("fwd")
    assert row["dram_mb"] == 1.0 and row["flop_per_byte"] == round(flops / 1e6, 2)
    assert "no ncu" not in page
