"""Results: the machine they were measured on, the JSON file, the table."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.lib.providers import is_ours
from cupyflash.commands.tables import new_table as new_table
from cupyflash.testing.problem import Problem

FOLDER = "BENCH_RESULTS"  # the environment variable for another folder of results
RESULTS = Path(os.environ.get(FOLDER) or Path(__file__).resolve().parent.parent / "results")
WIDTH = 300  # of a page: no table is as wide, and one that is wider would be cut
PEERS = ("flash-attn", "flash-attn-3", "flash-attn-4")
Row = dict[str, Any]


def console() -> Console:
    """Standard output, 120 columns wide where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120, soft_wrap=False, highlight=False)


def machine_fields() -> dict[str, Any]:
    """The fields "gpu" and "versions" of a results file."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "no GPU", "versions": {}}
    import cupyflash
    from cupyflash import machine

    versions = {"python": platform.python_version(), "cupyflash": cupyflash.__version__}
    versions |= machine.versions()
    for package in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions["CUDA of torch"] = str(torch.version.cuda)
    versions["cuDNN"] = str(torch.backends.cudnn.version())
    versions["driver"] = _driver()
    return {"gpu": torch.cuda.get_device_name(), "versions": versions}


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line(script: str, arguments: Sequence[str]) -> str:
    """The command that repeats this run."""
    return shlex.join(["python", "-m", "bench", script, *arguments])


def write_results(name: str, rows: list[Row], protocol: str, command: str, **fields: Any) -> Path:
    """Write bench/results/<name>.json, one row to a line.

    Args:
        fields: further top-level fields, among them "gpu" and "versions".
    """
    head = {**fields, "protocol": protocol, "command": command}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["{", *lines, ' "rows": [', body, " ]", "}"]) + "\n")
    return path


def write_page(
    name: str,
    results: dict[str, Any],
    tables: Sequence[Table],
    lines: Sequence[str],
    what: str = "µs",
) -> None:
    """Write bench/results/<name>.md: the tables of results, and lines below them.

    Args:
        what: the unit, or what else the tables have, before GPU and command.
    """
    with (RESULTS / f"{name}.md").open("w", encoding="utf-8") as file:
        page = Console(file=file, width=WIDTH, highlight=False)
        page.print(f"{what} on {results['gpu']}: `{results['command']}`\n", soft_wrap=True)
        page.print(*tables, sep="\n")
        for line in lines:
            page.print(f"\n{line}", markup=False, soft_wrap=True)


def cell(row: Row) -> tuple[str, Problem]:
    """The pass and the problem, which the providers of a comparison have in common."""
    fields = ("dtype", "head_dim", "batch", "seqlen_q", "heads", "heads_kv", "causal")
    return row["pass"], Problem(*(row[field] for field in fields))


def short_name(row: Row) -> str:
    """A cell among those of its pass."""
    mask = "causal" if row["causal"] else "full"
    return f"D={row['head_dim']} {mask} {row['seqlen_q']}"


def best_rows(rows: list[Row], cell_of: Callable[[Row], Any] = cell) -> dict[Any, Row]:
    """The row of the best peer in each cell.

    Peers are the implementations that are not cupyflash; where a cell holds none, the best of all.
    """
    best: dict[Any, Row] = {}
    for row in rows:
        pair = (best.get(cell_of(row), row), row)
        best[cell_of(row)] = min(pair, key=lambda x: (is_ours(x["impl"]), x["ms"]))
    return best


def ratios_to_best(rows: list[Row], cell_of: Callable[[Row], Any] = cell) -> list[float]:
    """For each row, how many times as fast it is as the best peer in its cell."""
    best = best_rows(rows, cell_of)
    return [best[cell_of(row)]["ms"] / row["ms"] for row in rows]


def table_of(
    rows: list[Row],
    title_of: Callable[[Row], str],
    rate_titles: tuple[str, str],
    rate_of: Callable[[Row], tuple[str, float]],
) -> Table:
    """problem | implementation | ms | rate | its share | times as fast as the best peer.

    Args:
        title_of: what the rows of a problem have in common.
        rate_of: the rate, and the share that it is of what the card can do.
    """
    table = new_table("problem", "impl", right=("ms", *rate_titles, "vs best peer"))
    previous = None
    for row, ratio in zip(rows, ratios_to_best(rows, title_of), strict=True):
        title, (rate, share) = title_of(row), rate_of(row)
        table.add_row(
            title if title != previous else "",
            row["impl"],
            f"{row['ms']:.4f}",
            rate,
            f"{100 * share:.0f} %",
            f"{ratio:.2f}",
            style="bold" if is_ours(row["impl"]) else "",
        )
        previous = title
    return table


def attention_table(rows: list[Row], matmul_tflops: float) -> Table:
    """`table_of` with the share of the matrix-product rate."""
    return table_of(
        rows,
        lambda row: "{} {}".format(*cell(row)),
        ("TFLOP/s", "% of matmul"),
        lambda row: (f"{row['tflops']:.0f}", row["tflops"] / matmul_tflops),
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def geometric_means(
    rows: list[Row],
    cell_of: Callable[[Row], Any] = cell,
    name_of: Callable[[Row], str] = short_name,
) -> list[str]:
    """One line for each pass and provider: the geometric mean of its ratios to the best peer.

    Cells without a peer do not count. A line of ours names the cells in which a peer is faster.
    """
    best = best_rows(rows, cell_of)
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row, ratio in zip(rows, ratios_to_best(rows, cell_of), strict=True):
        if not is_ours(best[cell_of(row)]["impl"]):
            found.setdefault((row["pass"], row["impl"]), []).append((name_of(row), ratio))
    lines = []
    for (direction, impl), ratios in sorted(found.items()):
        mean = geometric_mean([ratio for _, ratio in ratios])
        line = f"{direction} {impl}: {mean:.3f} x the best peer, geometric mean of {len(ratios)}"
        if is_ours(impl):
            below = [f"{name} ({ratio:.3f})" for name, ratio in ratios if ratio < 1]
            line += f"; {len(ratios) - len(below)} at or above 1"
            line += f"; below: {', '.join(below)}" if below else ""
        lines.append(line)
    return lines
