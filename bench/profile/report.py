"""The tables of bench profile, and their page."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.lib import harness, report
from bench.lib.report import Row
from bench.profile import sass

BOUND_FROM, SHORT_US = 60, 5  # percent of a peak; microseconds
WIDTH = 320  # columns of a page
RULE = (
    f"The bound of a kernel is the unit that is busiest, from {BOUND_FROM} % of its peak on (of L2 "
    "and DRAM the latter, as L2 is busy with what it fetches). Below that it is latency, with the "
    f"most frequent reason why warps stall; below {SHORT_US} µs it is the launch, as the GPU is "
    "neither full nor warm by then."
)
LOOP = (
    "Registers and spilled bytes of a thread, static and dynamic shared memory of a block in "
    "bytes, and the instructions of the inner loop by kind. Where a kernel has no loop, all of its "
    "instructions are counted."
)
TRAFFIC = (
    "Least is what the call reads and writes if everything is moved once; a ratio below 1 means "
    "that some of what was written was still in L2 at the end. The workspace of the "
    "backward is the sum of dq in float32, which is set to 0, read and written by additions, and "
    "read again, with the LSE and delta of each row."
)
COUNTERS = (
    'Percentages are of the peak of each unit; "occup." is the share of the warps that a '
    "multiprocessor can hold, and stalls are in percent of all the cycles in which warps wait."
)


def tables(fields: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Table]:
    """The tables by the text above each."""
    found = {}
    if rows:
        found[f"## Traffic\n\n{TRAFFIC}"] = traffic_table(fields["cases"])
        found[f"## Counters\n\n{RULE} {COUNTERS}"] = counter_table(rows)
    found[f"## What the kernels are made of\n\n{LOOP}"] = static_table(fields["kernels"])
    return found


def traffic_table(cases: Sequence[Row]) -> Table:
    """DRAM and L2 bytes beside the least possible."""
    titles = ("µs", "least MB", "workspace MB", "DRAM MB", "DRAM / least", "/ both", "L2 MB")
    table = report.new_table("call", right=titles)
    for row in cases:
        names = ("least_bytes", "workspace_bytes", "dram_bytes", "l2_bytes")
        least, workspace, dram, l2 = (_mega(row[name] / 1e6) for name in names)
        of_all = f"{row['of_all']:.2f}" if row["workspace_bytes"] else "-"
        ratios = f"{row['ratio']:.2f}", of_all
        table.add_row(row["case"], f"{row['us']:.1f}", least, workspace, dram, *ratios, l2)
    return table


def _mega(megabytes: float) -> str:
    return "-" if not megabytes else f"{megabytes:.1f}" if megabytes < 100 else f"{megabytes:.0f}"


def counter_table(rows: Sequence[Row]) -> Table:
    """What each kernel keeps busy, in percent of the peak; of several launches the longest."""
    titles = ("µs", "occup.", *rows[0]["busy"])
    table = report.new_table("kernel", "bound", "stalls", right=titles)
    for row in longest(rows):
        stalls = ", ".join(f"{x.replace('_', ' ')} {n:.0f}" for x, n in row["stalls"].items())
        percents = [row["occupancy"], *row["busy"].values()]
        figures = ["-" if x is None else f"{x:.0f}" for x in percents]
        table.add_row(short(row["expression"]), row["bound"], stalls, f"{row['us']:.1f}", *figures)
    return table


def static_table(kernels: Sequence[Row]) -> Table:
    """Registers, shared memory and the inner loop of each kernel."""
    titles = ("threads", "registers", "spills", "static", "dynamic", *sass.KINDS)
    table = report.new_table("kernel", right=titles)
    for x in kernels:
        loop = x["loop"] or dict.fromkeys(sass.KINDS, "-")
        numbers = [x[name] for name in ("threads", "registers", "spill_bytes")]
        numbers += [x["static_shared"], x["dynamic_shared"], *loop.values()]
        name = short(x["expression"]) + (" (no loop)" if x["no_loop"] else "")
        table.add_row(name, *map(str, numbers))
    return table


def longest(rows: Sequence[Row]) -> list[Row]:
    """The longest launch of each kernel."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["us"] >= found.get(row["expression"], row)["us"]:
            found[row["expression"]] = row
    return list(found.values())


def short(expression: str) -> str:
    """A kernel without the options that are off, and without its shared memory."""
    name, _, values = expression.rstrip(">").partition("<")
    values = [x for x in values.split(", ") if x != "false"]
    if len(values) > 2 and values[-1].isdigit() and int(values[-1]) >= 1024:
        values.pop()
    return f"{name}<{', '.join(values)}>"


def write_page(run: harness.Run, tables: Mapping[str, Table]) -> Any:
    """The path of the tables in Markdown."""
    path = report.RESULTS / f"{run.file}.md"
    with path.open("w", encoding="utf-8") as file:
        page = Console(file=file, width=WIDTH, highlight=False)
        page.print(f"# Kernels on {run.fields['gpu']}", soft_wrap=True)
        page.print(f"\n`{run.command}`: {run.protocol}.", soft_wrap=True)
        for text, table in tables.items():
            page.print(f"\n{text}", soft_wrap=True, markup=False)
            page.print(table)
    return path
