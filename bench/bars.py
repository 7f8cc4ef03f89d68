"""The bar of a cell: the rate of the best peer, also where only cuDNN is installed.

FlashAttention 3 and 4 are seldom installed. bench/bars.json holds the best rate of one run with all
peers, divided by cuDNN's. The bar is that ratio times cuDNN's rate in the present run. It exists
only for the GPU and the cells of that run.
"""

import json
import math
from pathlib import Path

from bench.providers import is_ours
from bench.report import Row, cell

BARS = json.loads(Path(__file__).with_name("bars.json").read_text())


def ratio(row: Row) -> float | None:
    """The best peer's rate divided by cuDNN's in the cell of the row."""
    direction, problem = cell(row)
    tokens, hidden = problem.batch * problem.seqlen, problem.heads * problem.head_dim
    protocol = (BARS["dtype"], BARS["tokens"], BARS["hidden"], problem.heads)
    if (problem.dtype, tokens, hidden, problem.heads_kv) != protocol:
        return None
    masks = BARS["ratios"][direction].get(str(problem.head_dim))
    if masks is None or problem.seqlen not in BARS["seqlens"]:
        return None
    return masks["causal" if problem.causal else "full"][BARS["seqlens"].index(problem.seqlen)]


def add_bars(rows: list[Row], gpu: str) -> None:
    """Give cupyflash's rows a ``bar_tflops`` where their cell has a bar and a row of cuDNN."""
    cudnn = {cell(row): row["tflops"] for row in rows if row["impl"] == "sdpa-cudnn"}
    for row in rows:
        best = ratio(row) if gpu == BARS["gpu"] and is_ours(row["impl"]) else None
        if best is not None and cell(row) in cudnn:
            row["bar_tflops"] = round(best * cudnn[cell(row)], 2)


def bar_lines(rows: list[Row]) -> list[str]:
    """One line for each pass and implementation of ours that has bars: the mean, what is below."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "bar_tflops" in row:
            found.setdefault((row["pass"], row["impl"]), []).append(row)
    lines = []
    for (direction, impl), with_bar in sorted(found.items()):
        ratios = [row["tflops"] / row["bar_tflops"] for row in with_bar]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        below = [
            f"D={row['head_dim']} {'causal' if row['causal'] else 'full'} {row['seqlen_q']} "
            f"({value:.3f})"
            for row, value in zip(with_bar, ratios)
            if value < 1
        ]
        line = (
            f"{direction} {impl}: {mean:.3f} x the bar, geometric mean of {len(ratios)} cells; "
            f"{len(ratios) - len(below)} at or above it"
        )
        lines.append(f"{line}; below: {', '.join(below)}" if below else line)
    return lines
