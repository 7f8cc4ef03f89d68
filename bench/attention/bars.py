"""The pictures of bench attention: TFLOP/s by sequence length, bars of the providers side by side.

One picture for each pass, with a panel for each head dim, full and causal, and one of both passes
of the causal problems alone, for the project's README.
"""

import operator
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.lib import plots
from bench.lib.plots import COLOURS, LABELS, PASS_TITLES
from bench.lib.providers import PROVIDERS, is_ours
from bench.lib.report import Row, best_rows, cell, geometric_mean

Panel = tuple[str, list[Row]]  # title and rows


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the pictures of a results file: ``path`` with -fwd, -bwd and -causal in its name."""
    rows = results["rows"]
    for direction, title in PASS_TITLES.items():
        if found := [row for row in rows if row["pass"] == direction]:
            _draw(results, pass_panels(found), f"Attention {title}", _named(path, direction))
    if {row["pass"] for row in rows if row["causal"]} == set(PASS_TITLES):
        _draw(results, causal_panels(rows), "Causal attention", _named(path, "causal"))


def _named(path: Path, name: str) -> Path:
    return path.with_stem(f"{path.stem}-{name}")


def pass_panels(rows: list[Row]) -> list[list[Panel]]:
    """Panels of one pass: a line for each problem, full and causal."""
    lines = []
    for (dtype, head_dim, heads, heads_kv), of_problem in by_problem(rows):
        group = f"{heads} heads" if heads == heads_kv else f"{heads}/{heads_kv} heads"
        line = []
        for causal in sorted({row["causal"] for row in rows}):
            title = f"head dim {head_dim}, {'causal' if causal else 'full'} ({dtype}, {group})"
            line.append((title, [row for row in of_problem if row["causal"] == causal]))
        lines.append(line)
    return lines


def causal_panels(rows: list[Row]) -> list[list[Panel]]:
    """Panels of the causal problems: a line for each pass, a column for each problem."""
    problems = by_problem([row for row in rows if row["causal"]])
    return [
        [
            (f"{title}, head dim {head_dim}, {dtype}", [x for x in found if x["pass"] == direction])
            for (dtype, head_dim, *_), found in problems
        ]
        for direction, title in PASS_TITLES.items()
    ]


def by_problem(rows: list[Row]) -> list[tuple[tuple, list[Row]]]:
    """Rows by (dtype, head_dim, heads, heads_kv), in order."""
    key = operator.itemgetter("dtype", "head_dim", "heads", "heads_kv")
    return [(problem, list(found)) for problem, found in groupby(sorted(rows, key=key), key)]


def _draw(results: dict[str, Any], lines: list[list[Panel]], what: str, path: Path) -> None:
    rows = [row for line in lines for _, shown in line for row in shown]
    impls = [name for name in PROVIDERS if any(row["impl"] == name for row in rows)]
    size, shape = (11, 1.1 + 2.6 * len(lines)), (len(lines), len(lines[0]))
    with plots.picture(path, size, *shape, sharey=True) as (figure, axes):
        for line, axes_of_line in zip(lines, axes):
            for (title, shown), axis in zip(line, axes_of_line):
                draw_panel(axis, shown, impls)
                axis.set_title(title)
        for axis in axes[:, 0]:
            axis.set_ylabel("TFLOP/s")
        for axis in axes[-1]:
            axis.set_xlabel("sequence length")
        rate = results["matmul_tflops"]
        note = f"{results['gpu']}; its matrix product (8192³, bfloat16) in the same run: "
        note += f"{rate:.0f} TFLOP/s"
        if max(row["tflops"] for row in rows) > rate:
            note += ", which is not the peak"
        figure.suptitle(f"{headline(rows, what)}\n{note}", fontsize=11, x=0.01, ha="left")
        handles = plots.patches({LABELS.get(name, name): COLOURS[name] for name in impls})
        figure.legend(handles=handles, loc="outside lower center", ncols=6, handlelength=1.0)


def headline(rows: list[Row], what: str) -> str:
    """One line that says what the picture shows."""
    best, ratios = best_rows(rows), []
    for row in rows:
        peer = best[cell(row)]
        if row["impl"] == "cupyflash" and not is_ours(peer["impl"]):
            ratios.append(peer["ms"] / row["ms"])
    text = f"{what}, TFLOP/s"
    if not ratios:
        return text
    return f"{text}: cupyflash is {geometric_mean(ratios):.2f} x the best peer, geometric mean"


def draw_panel(axis: Any, rows: list[Row], impls: list[str]) -> None:
    """Bars of the providers side by side, a group for each sequence length."""
    seqlens = sorted({row["seqlen_q"] for row in rows})
    width = 0.84 / len(impls)
    for index, impl in enumerate(impls):
        found = {row["seqlen_q"]: row["tflops"] for row in rows if row["impl"] == impl}
        shift = (index - (len(impls) - 1) / 2) * width
        places = [seqlens.index(seqlen) + shift for seqlen in found]
        bars = axis.bar(places, list(found.values()), 0.94 * width, color=COLOURS[impl])
        if impl == "cupyflash":
            axis.bar_label(bars, fmt=" {:.0f}", rotation=90, fontsize=8)
    axis.set_xticks(range(len(seqlens)), [str(seqlen) for seqlen in seqlens])
    plots.grid(axis, axis="y")
    axis.margins(y=0.15)
