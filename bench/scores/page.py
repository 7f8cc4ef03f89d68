"""The tables and the picture of bench scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.lib import plots, report
from bench.lib.report import Row
from bench.scores.problems import BUILT_IN, FLEX, OURS, PLAIN
from bench.scores.times import HAS

LABELS = {
    OURS: "cupyflash, function",
    BUILT_IN: "cupyflash, option",
    PLAIN: "cupyflash without",
    FLEX: "FlexAttention",
}
COLOURS = {OURS: plots.RED, BUILT_IN: plots.AMBER, PLAIN: plots.PALE, FLEX: plots.BLUE}
BESIDE = (PLAIN, BUILT_IN, FLEX)
OVER_FLEX = {"fwd": 1.5, "bwd": 1.4}


def cell(row: Row) -> tuple[str, int, str]:
    return row["what"], row["head_dim"], row["pass"]


def by_cell(rows: Sequence[Row]) -> dict[tuple[str, int, str], dict[str, Row]]:
    """The rows of cases by cell and implementation."""
    found: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in rows:
        if row["op"] == "scores":
            found.setdefault(cell(row), {})[row["impl"]] = row
    return found


def share(of_cell: dict[str, Row], impl: str) -> float | None:
    """The rate of ours as a share of another's, None without either."""
    if OURS not in of_cell or impl not in of_cell:
        return None
    return of_cell[OURS]["tflops"] / of_cell[impl]["tflops"]


def verdict(of_cell: dict[str, Row]) -> str:
    """The bar of a row, with "missed" before it where we are below; "not run" without ours."""
    row = of_cell.get(OURS)
    if row is None:
        return "not run"
    wanted = []
    if row["target"]:
        wanted.append((share(of_cell, row["beside"]), row["target"], ""))
    if row["target_tflops"]:
        wanted.append((row["tflops"], row["target_tflops"], " TFLOP/s"))
    wanted.append((share(of_cell, FLEX), OVER_FLEX[row["pass"]], " x flex"))
    found = [(value >= least, f"{least:g}{unit}") for value, least, unit in wanted if value]
    missed = [text for met, text in found if not met]
    return f"missed {', '.join(missed)}" if missed else f">= {', '.join(x for _, x in found)}"


def scores_table(rows: Sequence[Row]) -> Table:
    """A line for each case and pass: TFLOP/s of each, and the shares."""
    figures = ("ms", "TFLOP/s", "plain", "option", "flex", "of plain", "of option", "x flex")
    table = report.new_table("what", "D", "pass", "to reach", right=figures)
    for (what, head_dim, direction), found in by_cell(rows).items():
        ours = found.get(OURS)
        rates = (f"{found[x]['tflops']:.0f}" if x in found else "" for x in BESIDE)
        shares = (share(found, x) for x in BESIDE)
        result = verdict(found)
        table.add_row(
            what, str(head_dim), direction, result,
            f"{ours['ms']:.3f}" if ours else "", f"{ours['tflops']:.0f}" if ours else "",
            *rates, *("" if x is None else f"{x:.2f}" for x in shares),
            style="bold" if result.startswith(("missed", "not")) else "",
        )  # fmt: skip
    return table


def times_table(rows: Sequence[Row]) -> Table:
    """First calls, tiles and host time, each beside the call without."""
    table = report.new_table("what", "pass", "impl", right=("time", "above the other"))
    base = {
        (row["what"], row["pass"]): row.get("us", row.get("ms"))
        for row in rows
        if row["impl"] in (HAS, "cupyflash-plain") and row["op"] != "scores"
    }
    for row in rows:
        if row["op"] == "scores":
            continue
        unit = "us" if "us" in row else "ms"
        least = base.get((row["what"], row["pass"]))
        above = "" if least is None else f"{row[unit] - least:.3f}"
        table.add_row(row["what"], row["pass"], row["impl"], f"{row[unit]:.3f} {unit}", above)
    return table


def draw(results: dict[str, Any], path: Path) -> None:
    """TFLOP/s of each case: bars of ours, the option, plain attention and FlexAttention."""
    found = by_cell(results["rows"])
    labels = list(dict.fromkeys((what, head_dim) for what, head_dim, _ in found))
    if not labels:
        return
    height = 1.2 + 0.5 * len(labels)
    with plots.picture(path, (11, height), 1, 2, sharey=True) as (figure, axes):
        for axis, (direction, title) in zip(axes[0], plots.PASS_TITLES.items(), strict=True):
            for place, (what, head_dim) in enumerate(labels):
                rows = found.get((what, head_dim, direction), {})
                for i, impl in enumerate(LABELS):
                    if impl in rows:
                        width = rows[impl]["tflops"]
                        axis.barh(place + 0.2 * (i - 1.5), width, 0.18, color=COLOURS[impl])
            axis.set_title(f"{title}, TFLOP/s")
            plots.grid(axis, axis="x")
        axes[0][0].set_yticks(range(len(labels)), [f"{what}, D {d}" for what, d in labels])
        axes[0][0].invert_yaxis()
        handles = plots.patches({label: COLOURS[x] for x, label in LABELS.items()})
        figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
