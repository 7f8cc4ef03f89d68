"""The picture of bench parallel: shares by tokens, a row of axes for each number of GPUs."""

from pathlib import Path
from typing import Any

from bench.lib import plots

COLOURS = {
    "cupyflash-keys": plots.RED,
    "cupyflash-heads": plots.AMBER,
    "ring": plots.PALE,
    "torch-all-gather": plots.GREEN,
    "torch-all-to-all": plots.SKY,
}
PASSES = {"fwd": "forward", "fwd+bwd": "forward and backward"}
HEADS = 32, 8  # of the rows that are shown


def draw(results: dict[str, Any], path: Path) -> None:
    """The share of one GPU's rate, causal, of the heads that were measured for most tokens."""
    rows = [
        row for row in results["rows"]
        if not row["packed"] and not row["window"] and row["impl"] in COLOURS
    ]  # fmt: skip
    heads = [(row["heads"], row["heads_kv"]) for row in rows]
    heads = HEADS if HEADS in heads or not heads else heads[0]
    rows = [row for row in rows if (row["heads"], row["heads_kv"]) == heads]
    gpus = sorted({row["gpus"] for row in rows}) or [results["gpus"]]
    with plots.picture(path, (9, 3 * len(gpus) + 0.6), len(gpus), 2, sharey=True) as (figure, axes):
        for number, line in zip(gpus, axes, strict=True):
            for axis, direction in zip(line, PASSES, strict=True):
                some = [x for x in rows if (x["gpus"], x["pass"]) == (number, direction)]
                _lines(axis, some)
                axis.set_title(f"{number} GPUs, {PASSES[direction]}")
            line[0].set_ylabel(f"% of {number} × one GPU")
        for axis in axes[-1]:
            axis.set_xlabel(f"tokens a GPU, {heads[0]}/{heads[1]} heads")
        handles = axes[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(COLOURS))


def _lines(axis: Any, rows: list[dict[str, Any]]) -> None:
    """One line an implementation."""
    tokens = sorted({row["tokens"] for row in rows})
    for impl, colour in COLOURS.items():
        some = sorted((row["tokens"], 100 * row["share"]) for row in rows if row["impl"] == impl)
        if some:
            axis.plot(*zip(*some), color=colour, marker="o", markersize=4, label=impl)
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [f"{n // 1024}K" if n >= 1024 else str(n) for n in tokens])
    axis.minorticks_off()
    axis.set_ylim(0, 105)
    plots.grid(axis, axis="y")
