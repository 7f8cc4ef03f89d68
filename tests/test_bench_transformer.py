"""bench.transformer without a GPU: bytes, the check, a run without the clock."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.decode import transformer  # noqa: E402
from bench.decode.transformer import BlockProblem  # noqa: E402


def test_bytes():
    """12 layers of GPT-2 small in bfloat16 are 170 MB, their caches 19 MB a sequence."""
    one, two = (BlockProblem("bfloat16", "small", 12, batch).bytes for batch in (1, 2))
    assert two - one == 12 * 2 * 512 * 768 * 2
    assert one - (two - one) == 12 * (12 * 768 * 768 + 13 * 768) * 2


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench.transformer on torch's CPU with the clock taken out; returns its status and file."""
    without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(transformer, "MODELS", {"small": (64, 4, 3), "xl": (80, 5, 2)})
    monkeypatch.setattr(transformer, "CACHE", 16)

    def run(*arguments):
        impls = ("--impls", "cupyflash", "torch-eager")
        status = transformer.main([*arguments, *impls, "--output", "dry"])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, capsys):
    status, results = dry_run("--dtype", "float32", "--batch", "1", "4")
    assert status == 0
    timed = {(x["model"], x["layers"], x["batch"], x["impl"]) for x in results["rows"]}
    assert len(timed) == 3 * 2 * 2 and ("small", 3, 4, "cupyflash") in timed
    assert {x["op"] for x in results["rows"]} == {"transformer_block"}
    assert results["command"].startswith("python -m bench transformer --dtype float32")
    assert "gpt2-small float32 layers=3" in capsys.readouterr().out


def test_a_wrong_result_is_told(dry_run, monkeypatch, capsys):
    right = BlockProblem.call

    def wrong(problem, impl, tensors):
        call = right(problem, impl, tensors)
        return (lambda: 1.01 * call()) if impl == "cupyflash" else call

    monkeypatch.setattr(BlockProblem, "call", wrong)
    status, results = dry_run("--dtype", "float32", "--batch", "2")
    assert status == 1 and {x["impl"] for x in results["rows"]} == {"torch-eager"}
    assert "WRONG RESULT: result: max error" in capsys.readouterr().out
