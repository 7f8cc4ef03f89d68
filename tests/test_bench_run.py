"""Whole runs of bench attention on the CPU with the clock taken out, and the clock itself."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.attention import attention  # noqa: E402
from bench.lib import providers  # noqa: E402

ROW_FIELDS = "op pass dtype head_dim batch seqlen_q seqlen_k heads heads_kv causal impl ms tflops"


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench attention on torch's CPU with the clock taken out; returns its status and its file."""
    torch = without_gpu(monkeypatch, tmp_path)
    attention_math = providers.PROVIDERS["sdpa-math"].load()

    def wrong_forward(q, k, v, causal):
        return attention_math(q, k, v, causal) * 1.2

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.roll(1, dims=-1)

    def wrong_backward(q, k, v, causal):
        return attention_math(q, WrongGradient.apply(k), v, causal)

    for name, function in {
        "sdpa-efficient": wrong_forward,
        "cupyflash-simt": wrong_backward,
    }.items():
        fake = providers.Provider(name, lambda function=function: function, layout="bhsd")
        monkeypatch.setitem(providers.PROVIDERS, name, fake)

    def run(*arguments):
        status = attention.main([*arguments, "--output", "dry"])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, capsys):
    text = "--head-dim 16 --heads 4 --heads-kv 2 --seqlen 200 --batch-tokens 400 --repeats 3"
    names = ["sdpa-math", "sdpa-efficient", "cupyflash-simt", "flash-attn-4"]
    status, results = dry_run(*text.split(), "--providers", *names)
    assert status == 1  # one of ours was wrong
    assert [list(x)[:13] for x in results["rows"]] == [ROW_FIELDS.split()] * len(results["rows"])
    timed = {(x["pass"], x["impl"]) for x in results["rows"]}
    # A wrong forward is in no table; a wrong backward, in none of the backward.
    assert timed == {("fwd", "sdpa-math"), ("fwd", "cupyflash-simt"), ("bwd", "sdpa-math")}
    assert results["command"].startswith("python -m bench attention --head-dim 16")
    printed = capsys.readouterr().out
    assert "sdpa-efficient left out from fwd" in printed and "WRONG RESULT: out" in printed
    assert "cupyflash-simt left out from bwd" in printed and "WRONG RESULT: dk" in printed
    assert "flash-attn-4 left out" in printed and "No module named" in printed


def test_dry_run_of_peers_only_succeeds(dry_run):
    text = "--head-dim 16 --heads 2 --seqlen 130 --batch-tokens 130 --dtype float32 --causal yes"
    status, results = dry_run(*text.split(), "--providers", "sdpa-math")
    assert status == 0 and len(results["rows"]) == 2
