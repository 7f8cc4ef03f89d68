"""bench.masks without a GPU: every option runs, is checked, and is counted."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.attention import masks  # noqa: E402


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Small problems on the CPU."""
    for name, value in (("BATCH", 2), ("SEQLEN", 160), ("HIDDEN", 32)):
        monkeypatch.setattr(masks, name, value)
    monkeypatch.setattr(masks, "BACKENDS", ("sdpa-math",))
    return without_gpu(monkeypatch, tmp_path)


def test_dry_run(torch, tmp_path, capsys):
    assert masks.main(["--head-dim", "16", "--repeats", "5"]) == 0
    assert "left out" not in capsys.readouterr().out
    rows = json.loads((tmp_path / "masks.json").read_text())["rows"]
    ours = [row for row in rows if row["impl"] == "cupyflash"]
    assert [row["what"] for row in ours[::2]] == list(masks.KINDS)
    beside = {row["what"] for row in rows if row["impl"] == "sdpa-math"}
    assert beside == set(masks.KINDS) - {"bias (1,H,S,S), gradient", masks.LENGTHS}
    rates = {row["what"]: row["tflops"] for row in ours if row["pass"] == "fwd"}
    assert rates[masks.PLAIN] == pytest.approx(4 * rates[masks.LENGTHS], abs=0.02)


def test_a_wrong_result_fails(torch, monkeypatch, capsys):
    monkeypatch.setattr(masks, "KINDS", ("mask (B,1,S,S)",))
    monkeypatch.setattr("cupyflash.attention", lambda q, k, v, **options: torch.zeros_like(q))
    assert masks.main(["--head-dim", "16", "--repeats", "5"]) == 1
    assert "WRONG RESULT" in capsys.readouterr().out
