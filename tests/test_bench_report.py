"""What bench/REPORT.md shows and needs no GPU: the rounding of the online softmax, the diagrams."""

import json
import re
from pathlib import Path

import numpy
import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench.attention import rounding  # noqa: E402
from bench.lib import report  # noqa: E402
from cupyflash.attention.sm90.forward import FORWARD_TILES  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def test_rounding(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert rounding.main(["--seqlen", "4096"]) == 0
    with_fma, rounded = json.loads((tmp_path / "rounding.json").read_text())["rows"]
    assert rounded["lse_error"] < 2e-7 and with_fma["lse_error"] > 5 * rounded["lse_error"]
    assert with_fma["warps"] == 0 and 0.2 < rounded["warps"] < rounded["rows"] < 1


@pytest.mark.parametrize("fma", [False, True])
def test_online_softmax(fma):
    """The last tile is not whole, and only it moves the maximum of row 0."""
    scores = numpy.zeros((2, 2 * rounding.TILE + 40), "float32")
    scores[0, -1] = 16.0
    lse, rescales = rounding.online(scores, fma)
    log2_scale = numpy.float32(numpy.log2(numpy.e) / rounding.HEAD_DIM**0.5)
    exact = numpy.logaddexp2.reduce(scores * numpy.float64(log2_scale), axis=1)
    assert abs(lse - exact).max() < 1e-6
    assert (rescales[:, 1] == 1).all() and rescales[0, 0] == 1
    assert abs(rescales[1, 0] * 2 ** (16 * log2_scale) - 1) < 1e-6


def test_tiles_of_the_page():
    """Its table of registers is that of the tiles."""
    page = (ROOT / "bench" / "REPORT.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) × (\d+) \|(.+)\|$", page, re.MULTILINE)
    assert len(rows) == 5
    for *tile, rest in rows:
        head_dim, block_m, block_n = map(int, tile)
        assert (block_m, block_n) == FORWARD_TILES[head_dim][:2]
        registers = (block_n // 2, block_n // 4, head_dim // 2)  # S, P, O
        groups, *found, of = (int(cell) for cell in rest.split("|"))
        assert groups == block_m // 64 and found == [*registers, sum(registers)]
        assert of == {2: 232, 3: 160}[groups]
