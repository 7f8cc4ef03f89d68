"""A picture of a results file: TFLOP/s by sequence length, a panel per head dim, full and causal.

python -m bench plot bench/results/attention.json    writes attention-fwd and attention-bwd, and
attention-causal: both passes of the causal problems alone, for the project's README; PNG and SVG
"""

import argparse
import json
import operator
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.lib.providers import PROVIDERS, is_ours
from bench.lib.report import best_rows, cell, geometric_mean

# Okabe and Ito's palette, which colour-blind readers can tell apart; ours are the warm ones.
COLOURS = {
    "cupyflash": "#D55E00",
    "cupyflash-sm90": "#E69F00",
    "cupyflash-sm80": "#F5C896",
    "cupyflash-simt": "#CC79A7",
    "sdpa-flash": "#0072B2",
    "sdpa-cudnn": "#009E73",
    "sdpa-efficient": "#56B4E9",
    "sdpa-math": "#999999",
    "torch-varlen": "#F0E442",
    "flash-attn-2": "#1B2A49",
    "flash-attn-3": "#000000",
    "flash-attn-4": "#6B4C9A",
}
LABELS = {"sdpa-flash": "FA2 (sdpa-flash)", "sdpa-cudnn": "cuDNN (sdpa-cudnn)"}
PASS_TITLES = {"fwd": "forward", "bwd": "backward"}


Panel = tuple[str, list[dict[str, Any]]]  # title and rows


def pass_panels(rows: list[dict[str, Any]]) -> list[list[Panel]]:
    """Panels of one pass: a line for each problem, full and causal."""
    lines = []
    for problem, of_problem in by_problem(rows):
        dtype, head_dim, heads, heads_kv = problem
        group = f"{heads} heads" if heads == heads_kv else f"{heads}/{heads_kv} heads"
        line = []
        for causal in sorted({row["causal"] for row in rows}):
            title = f"head dim {head_dim}, {'causal' if causal else 'full'} ({dtype}, {group})"
            line.append((title, [row for row in of_problem if row["causal"] == causal]))
        lines.append(line)
    return lines


def causal_panels(rows: list[dict[str, Any]]) -> list[list[Panel]]:
    """Panels of the causal problems: a line for each pass, a column for each problem."""
    problems = by_problem([row for row in rows if row["causal"]])
    return [
        [
            (f"{title}, head dim {head_dim}, {dtype}", [x for x in found if x["pass"] == direction])
            for (dtype, head_dim, *_), found in problems
        ]
        for direction, title in PASS_TITLES.items()
    ]


def by_problem(rows: list[dict[str, Any]]) -> list[tuple[tuple, list[dict[str, Any]]]]:
    """Rows by (dtype, head_dim, heads, heads_kv), in order."""
    key = operator.itemgetter("dtype", "head_dim", "heads", "heads_kv")
    return [(problem, list(found)) for problem, found in groupby(sorted(rows, key=key), key)]


def draw(results: dict[str, Any], lines: list[list[Panel]], what: str, path: Path) -> None:
    """Writes a picture of panels as PNG and as SVG; ``what`` is the text below them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for line in lines for _, shown in line for row in shown]
    impls = [name for name in PROVIDERS if any(row["impl"] == name for row in rows)]
    # 11 inches at 160 dpi are two pixels for each one of a README's width.
    figure, axes = pyplot.subplots(
        len(lines),
        len(lines[0]),
        figsize=(11, 1.1 + 2.6 * len(lines)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, axes_of_line in zip(lines, axes):
        for (title, shown), axis in zip(line, axes_of_line):
            draw_panel(axis, shown, impls)
            axis.set_title(title, fontsize=11, loc="left")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in impls]
    labels = [LABELS.get(name, name) for name in impls]
    rate = results["matmul_tflops"]
    note = (
        f"{results['gpu']}; its matrix product (8192\N{SUPERSCRIPT THREE}, bfloat16) in the same "
        f"run: {rate:.0f} TFLOP/s"
    )
    if max(row["tflops"] for row in rows) > rate:
        note += ", which is not the peak"
    figure.suptitle(f"{headline(rows, what)}\n{note}", fontsize=11, x=0.01, ha="left")
    rows_of_legend = -(-len(labels) // 6)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=-(-len(labels) // rows_of_legend),
        fontsize=9,
        frameon=False,
        handlelength=1.0,
    )
    figure.savefig(path, dpi=160)
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)


def headline(rows: list[dict[str, Any]], what: str) -> str:
    """What the picture shows in one line."""
    best, ratios = best_rows(rows), []
    for row in rows:
        peer = best[cell(row)]
        if row["impl"] == "cupyflash" and not is_ours(peer["impl"]):
            ratios.append(peer["ms"] / row["ms"])
    text = f"{what[0].upper()}{what[1:]}, TFLOP/s"
    if not ratios:
        return text
    return f"{text}: cupyflash is {geometric_mean(ratios):.2f} x the best peer, geometric mean"


def draw_panel(axis: Any, rows: list[dict[str, Any]], impls: list[str]) -> None:
    """Bars of the providers side by side, a group for each sequence length."""
    seqlens = sorted({row["seqlen_q"] for row in rows})
    width = 0.84 / len(impls)
    for row in rows:
        index = impls.index(row["impl"])
        x = seqlens.index(row["seqlen_q"]) + (index - (len(impls) - 1) / 2) * width
        axis.bar(x, row["tflops"], 0.94 * width, color=COLOURS[row["impl"]])
        if row["impl"] == "cupyflash":
            style = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 8}
            axis.annotate(f" {row['tflops']:.0f}", (x, row["tflops"]), color="#444444", **style)
    axis.set_xticks(range(len(seqlens)), [str(seqlen) for seqlen in seqlens])
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.15)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", type=Path, help="a file that bench attention wrote")
    source = parser.parse_args(arguments).results
    results = json.loads(source.read_text())
    rows = results["rows"]
    pictures = {}
    for direction, title in PASS_TITLES.items():
        if found := [row for row in rows if row["pass"] == direction]:
            pictures[direction] = (pass_panels(found), f"attention {title}")
    if {row["pass"] for row in rows if row["causal"]} == set(PASS_TITLES):
        pictures["causal"] = (causal_panels(rows), "causal attention")
    for name, (lines, what) in pictures.items():
        path = source.with_name(f"{source.stem}-{name}.png")
        draw(results, lines, what, path)
        print(f"wrote {path}")
