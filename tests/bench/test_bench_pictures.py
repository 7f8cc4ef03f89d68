"""The pictures of bench/results: each is what the benchmarks draw of the results beside it."""

import re
import shutil

import pytest

pytest.importorskip("matplotlib", reason="the pictures are drawn by matplotlib")
pytest.importorskip("torch", reason="the scripts that draw measure with torch")

from bench import plot  # noqa: E402
from bench.attention import diagrams  # noqa: E402
from bench.lib import report  # noqa: E402
from cupyflash.ops.attention.sm90.forward import FORWARD_TILES  # noqa: E402

PICTURES = {  # of each results file
    "attention": ("attention-fwd", "attention-bwd", "attention-causal"),
    "engine": ("engine",),
    "engine_8b": ("engine_8b",),
    "gpt2": ("gpt2",),
    "ladder": ("ladder",),
    "memory": ("memory",),
    "models": ("models",),
    "parallel": ("parallel",),
    "precision": ("precision",),
    "profile": ("roofline",),
    "scores": ("scores",),
    "scores_texts_h200": ("scores_texts_h200",),
    "time_budget": ("time_budget",),
    "timeline": ("timeline",),
    "train_char_gpt": ("train_char_gpt",),
}


def shown(path):
    """The texts and the colours of a picture; places depend on the version of matplotlib."""
    svg = path.read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return texts, set(re.findall(r"#[0-9a-f]{6}", svg))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_the_results(tmp_path, name):
    source = shutil.copy(report.RESULTS / f"{name}.json", tmp_path)
    assert plot.main([str(source)]) == 0
    assert {x.stem for x in tmp_path.glob("*.svg")} == set(PICTURES[name])
    for path in tmp_path.glob("*.svg"):
        assert shown(path) == shown(report.RESULTS / path.name)


def test_diagrams(tmp_path):
    """They have the sizes of the tile that they show."""
    diagrams.draw_all(tmp_path)
    for path in tmp_path.iterdir():
        assert shown(path) == shown(report.RESULTS / path.name)
    block_m, block_n, q_stages, kv_stages = FORWARD_TILES[128]
    text = (tmp_path / "hopper-block.svg").read_text()
    assert (block_m, q_stages, kv_stages) == (128, 2, 2)  # two warpgroups of 64, six boxes
    kilobytes = (q_stages * block_m + 2 * kv_stages * block_n) * 128 * 2 // 1024
    assert f"shared memory, {kilobytes} of 227 KB" in text
    for registers in (block_n // 2, block_n // 4, 128 // 2):  # S, P, O
        assert f">{registers}<" in text


def test_every_picture_is_drawn_by_a_script():
    drawn = {name for names in PICTURES.values() for name in names} | set(diagrams.DIAGRAMS)
    assert {x.stem for x in report.RESULTS.glob("*.svg")} == drawn
    assert not list(report.RESULTS.glob("*.png"))
