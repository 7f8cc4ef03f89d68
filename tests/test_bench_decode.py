"""bench decode without a GPU: bytes, the check, a run without the clock."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.decode import decode  # noqa: E402
from bench.decode.decode import DecodeProblem  # noqa: E402


def test_bytes():
    problem = DecodeProblem("bfloat16", "llama3-8b", 2, 512)
    assert problem.bytes == 2 * 2 * 2 * 512 * 8 * 128


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench decode on torch's CPU with the clock taken out; returns its status and file."""
    without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(decode, "HEADS", {"small": (4, 2, 16)})

    def run(*arguments):
        impls = ("--impls", "cupyflash", "sdpa-math", "--batch", "1", "3", "--length", "9")
        status = decode.main([*arguments, *impls, "--dtype", "float32", "--output", "dry"])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, capsys):
    status, results = dry_run()
    assert status == 0
    timed = {(x["op"], x["batch"], x["impl"]) for x in results["rows"]}
    assert len(timed) == 4 and ("attention_with_cache", 3, "cupyflash") in timed
    assert "small float32 B=3 S=9" in capsys.readouterr().out


def test_a_wrong_result_is_told(dry_run, monkeypatch, capsys):
    right = DecodeProblem.call

    def wrong(self, impl, tensors):
        call = right(self, impl, tensors)
        return (lambda: 1.01 * call()) if impl == "cupyflash" else call

    monkeypatch.setattr(DecodeProblem, "call", wrong)
    status, results = dry_run()
    assert status == 1 and {x["impl"] for x in results["rows"]} == {"sdpa-math"}
    assert "WRONG RESULT: result: max error" in capsys.readouterr().out
