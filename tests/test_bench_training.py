"""The benchmarks of training, for a few steps of tiny models on the CPU."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")
pytest.importorskip("matplotlib", reason="bench.train_char_gpt draws its curves")

from bench.lib import data, report  # noqa: E402
from bench.transformers import gpt, train_char_gpt, train_step  # noqa: E402

TINY = gpt.Size(layers=1, width=32, heads=2, seqlen=24, batch=2)


@pytest.fixture
def results(monkeypatch, tmp_path):
    """The folder that the benchmarks write to."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(data, "DEVICE", "cpu")
    monkeypatch.setattr(train_char_gpt, "SIZE", TINY)
    monkeypatch.setattr(train_step, "SIZES", (TINY,))
    monkeypatch.setattr(train_step, "COMPARED", ("sdpa-flash", "sdpa-math", "cupyflash"))
    monkeypatch.setattr(train_step, "DEVICE", "cpu")
    monkeypatch.setattr(train_step, "STEPS", 2)
    return tmp_path


def sees_the_future(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_curves_coincide(results, capsys):
    assert train_char_gpt.main(["--steps", "30"]) == 0
    written = json.loads((results / "train_char_gpt.json").read_text())
    rows = {row["impl"]: row for row in written["rows"]}
    assert list(rows)[:3] == ["eager", "sdpa", "cupyflash"]
    assert all(len(row["losses"]) == 30 and row["tokens_per_s"] > 0 for row in rows.values())
    assert rows["sdpa"]["losses"][-1] < rows["sdpa"]["losses"][0]
    assert rows["cupyflash"]["distance"] <= rows["cupyflash"]["allowed"] < 1e-4
    assert (results / "train_char_gpt.svg").stat().st_size > 10_000
    assert "cupyflash" in capsys.readouterr().out


def test_a_curve_that_parts_fails(results, monkeypatch, capsys):
    monkeypatch.setitem(gpt.IMPLEMENTATIONS, "cupyflash", (sees_the_future, None))
    assert train_char_gpt.main(["--steps", "30"]) == 1
    assert "WRONG: the curve of cupyflash" in capsys.readouterr().out


def test_a_curve_that_is_not_finite_fails():
    row = {"distance": float("nan"), "allowed": 1.0}
    assert not train_char_gpt.coincides(row)


def test_text_is_long_enough(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("abc")
    with pytest.raises(ValueError, match="text must be longer than 24 bytes"):
        train_char_gpt.batches([short], TINY, 1, "cpu")


def test_train_step(results, capsys):
    assert train_step.main(["--modes", "eager", "--repeats", "2"]) == 0
    rows = json.loads((results / "train_step.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["sdpa-flash", "sdpa-math", "cupyflash"]
    assert all(row["ms"] > 0 and row["seqlen"] == 24 for row in rows)
    assert "vs SDPA" in capsys.readouterr().out


def test_train_step_checks_the_loss(results, monkeypatch, capsys):
    zero = lambda q, k, v: float("nan") * v
    monkeypatch.setitem(gpt.IMPLEMENTATIONS, "cupyflash", (zero, None))
    assert train_step.main(["--modes", "eager", "--repeats", "1"]) == 1
    assert "WRONG RESULT" in capsys.readouterr().out
