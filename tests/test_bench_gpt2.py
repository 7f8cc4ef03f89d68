"""bench gpt2 without a GPU: what ncu prints, and a run on the CPU without the clock."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.gpt2 import gpt2  # noqa: E402
from bench.lib import counters  # noqa: E402


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench gpt2 of a tiny model on the CPU; returns its status and its file."""
    without_gpu(monkeypatch, tmp_path)
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    from bench.gpt2 import measure as gpt2_measure

    monkeypatch.setattr(gpt2_measure, "_gpu", lambda: False)
    monkeypatch.setattr(counters, "find_ncu", lambda: None)  # no ncu
    monkeypatch.setattr(gpt2_measure, "PREFILL", (2, 48))
    monkeypatch.setattr(gpt2_measure, "DECODE", ((1, 24), (3, 24)))

    def run(*arguments):
        peers = ["--peers", "transformers-eager", "transformers-sdpa"]
        common = ["--random", "tiny", "--new-tokens", "5", "--repeats", "2", "--output", "dry"]
        status = gpt2.main([*common, "--dtype", "fp32", *peers, *arguments])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, tmp_path, capsys):
    status, results = dry_run("--ncu")
    assert status == 0 and (tmp_path / "dry.svg").stat().st_size > 10000
    names = {"cupyflash-naive", "cupyflash-flash", "cupyflash-fused"}
    names |= {"transformers-eager", "transformers-sdpa"}
    for op, batch in (("gpt2_prefill", 2), ("gpt2_decode", 1), ("gpt2_decode", 3)):
        rows = [x for x in results["rows"] if (x["op"], x["batch"]) == (op, batch)]
        assert {x["impl"] for x in rows} == names and all(x["ms"] > 0 for x in rows)
    assert {x["mode"] for x in results["ops"]} == {"naive", "flash", "fused", "persistent"}
    assert results["attention_traffic"] == {}
    assert all(x["bytes"] is None for x in results["ops"])
    printed = capsys.readouterr().out
    assert "| (a) naive |" in printed and "vs compile" in printed
    assert "ncu left out" in printed


def test_a_wrong_result_is_told(dry_run, monkeypatch, capsys):
    from cupyflash.models.gpt2 import Gpt2

    right = Gpt2.logits
    wrong = lambda self, given: [1.01 * x for x in right(self, given)]
    monkeypatch.setattr(Gpt2, "logits", wrong)
    status, results = dry_run()
    assert status == 1
    assert not any(x["impl"].startswith("cupyflash") for x in results["rows"])
    assert "cupyflash-fused left out from the check on: WRONG RESULT" in capsys.readouterr().out
