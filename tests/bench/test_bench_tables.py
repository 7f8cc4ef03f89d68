"""The tables and pages of bench: what they count, and that pages have what was measured."""

import json
import re

from places import ROOT
from small_benchmarks import results_into

from bench.__main__ import SCRIPTS
from bench.attention import attention, models
from bench.attention.model_shapes import DOCUMENTS, MODELS, SENTENCES
from bench.lib import report
from cupyflash.ops.attention.sm90.forward import FORWARD_TILES
from cupyflash.testing.problem import Problem

BENCH = ROOT / "bench"
README = BENCH / "README.md"
STARTS = (("fwd ", "bwd "), "where flash-attn-3 runs, ", "flash-attn-3 as the peer, ")

FULL = Problem("bfloat16", 64, 2, 256, 4, 2, False)
CAUSAL = Problem("float16", 128, 1, 512, 16, 16, True)


def row(impl, ms, shape=FULL, direction="fwd"):
    tflops = shape.flops(direction) / ms / 1e9
    fields = shape.row(impl=impl, ms=ms, tflops=tflops)
    return {"op": "attention", "pass": direction, **fields}


def test_default_problems_are_those_of_the_issue():
    shapes = attention.problems(attention.parse([]))
    assert len(shapes) == 3 * 2 * 6
    assert all(x.head_dim * x.heads == 2048 and x.batch * x.seqlen == 16384 for x in shapes)
    assert {x.seqlen for x in shapes} == {512, 1024, 2048, 4096, 8192, 16384}


def test_ratios_are_to_the_best_peer_of_the_cell():
    rows = [
        row("cupyflash", 1.0),
        row("cupyflash-simt", 8.0),
        row("sdpa-flash", 2.0),
        row("sdpa-math", 4.0),
        row("cupyflash", 3.0, CAUSAL),
        row("cupyflash-simt", 6.0, CAUSAL),
    ]
    assert report.ratios_to_best(rows) == [2.0, 0.25, 1.0, 0.5, 1.0, 0.5]
    # The second cell has no peer, so that it does not count.
    assert report.geometric_means(rows) == [
        "fwd cupyflash: 2.000 x the best peer, geometric mean of 1; 1 at or above 1",
        "fwd cupyflash-simt: 0.250 x the best peer, geometric mean of 1; 0 at or above 1; "
        "below: D=64 full 256 (0.250)",
        "fwd sdpa-flash: 1.000 x the best peer, geometric mean of 1",
        "fwd sdpa-math: 0.500 x the best peer, geometric mean of 1",
    ]


def test_shapes(capsys):
    names = [x.name for x in MODELS]
    assert len(names) == len(set(names)) >= 30
    for shape in (x.problem for x in MODELS):
        assert shape.heads % shape.heads_kv == 0 and shape.dtype == "bfloat16"
    for x in MODELS:
        if lengths := x.options.get("lengths"):
            assert sum(lengths) == x.problem.seqlen and x.problem.batch == 1
    assert (sum(DOCUMENTS), sum(SENTENCES)) == (8192, 16384)
    by_name = {x.name: str(x) for x in MODELS}
    assert by_name["Llama 3 70B on 8 GPUs"] == "1 x 8192, 8/1 heads, D=128, causal"
    assert by_name["Swin-B, 64 images"] == "4096 x 49, 4 heads, D=32, pair bias, trained"
    assert by_name["SD 1.5, cross"] == "4 x 4096/77, 8 heads, D=40"
    assert models.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for x in MODELS for text in (x.name, str(x)))


def test_the_page_of_the_results(tmp_path, monkeypatch):
    """That of models.json: nothing in it is cut, and bench/README.md has its means."""
    results = json.loads((report.RESULTS / "models.json").read_text())
    page = (report.RESULTS / "models.md").read_text()
    results_into(monkeypatch, tmp_path)
    lines = models.summary(results["rows"])
    report.write_page("models", results, [models.models_table(results["rows"])], lines)
    assert (tmp_path / "models.md").read_text() == page
    assert "…" not in page and "| FA2 varlen |" in page and "| ratio |" in page
    best, where, beside = ([line for line in lines if line.startswith(x)] for x in STARTS)
    assert [len(x) for x in (best, where, beside)] == [2, 2, 2]
    readme = " ".join(README.read_text().split())
    for text, (backward, forward) in (
        ("is {0} forward (all at or above 1) and {1} backward", best),
        ("the ratio to the best peer is {0} and {1}, and", where),
        ("to FlashAttention-3 itself {0} and {1}.", beside),
    ):
        means = [f"{float(re.search(r': ([.0-9]+) x', x)[1]):.2f}" for x in (forward, backward)]
        assert text.format(*means) in readme


def test_the_readme_has_every_command():
    commands = re.findall(r"^\| `python -m bench (\w+)", README.read_text(), re.MULTILINE)
    assert {*commands} == {*SCRIPTS}


def test_tiles_of_the_page():
    """Its table of registers is that of the tiles."""
    page = (BENCH / "REPORT.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) × (\d+) \|(.+)\|$", page, re.MULTILINE)
    assert len(rows) == 5
    for *tile, rest in rows:
        head_dim, block_m, block_n = map(int, tile)
        assert (block_m, block_n) == FORWARD_TILES[head_dim][:2]
        registers = (block_n // 2, block_n // 4, head_dim // 2)  # S, P, O
        groups, *found, of = (int(cell) for cell in rest.split("|"))
        assert groups == block_m // 64 and found == [*registers, sum(registers)]
        assert of == {2: 232, 3: 160}[groups]
