"""The tables and pictures of bench gpt2: the steps from naive to fused, the time of a token by
operation, and the roofline, with the peers in every row.
"""

from pathlib import Path
from typing import Any

from rich.table import Table

from bench.gpt2.measure import DECODE, MODES
from bench.gpt2.ops import GROUPS
from bench.lib import plots
from bench.lib.report import Row, new_table

COLOURS = dict(
    zip(
        GROUPS,
        (plots.PALE, plots.VIOLET, plots.SKY, plots.BLUE, plots.RED, plots.GREEN, plots.AMBER)
        + (plots.PINK,),
    )
)
LABELS = {"naive": "(a) naive", "flash": "(b) flash", "fused": "(c) fused"}
MARKERS = {"naive": "o", "flash": "s", "fused": "^", "persistent": "*"}


def story_table(rows: list[Row], traffic: dict[str, Row]) -> Table:
    """(a), (b) and (c): what each step brings. Cells that were not measured stay empty."""
    figures = ("prefill ms", "decode tokens/s", "prefill vs (a)")
    table = new_table("", "HBM MB of attention, a layer", "FLOP/byte", right=figures)
    of = lambda op, mode: [  # noqa: E731
        row for row in rows
        if row["op"] == op and row["impl"].startswith(f"cupyflash-{mode}")
        and (op == "gpt2_prefill" or row["batch"] == DECODE[0][0])
    ]  # fmt: skip
    first = of("gpt2_prefill", "naive")
    for letter, mode in zip("abc", MODES):
        prefill, decode = of("gpt2_prefill", mode), of("gpt2_decode", mode)
        moved = traffic.get(mode)
        table.add_row(
            f"({letter}) {mode}",
            f"{moved['bytes'] / 1e6:.2f}" if moved else "",
            f"{moved['flop_per_byte']:.1f}" if moved else "",
            f"{prefill[0]['ms']:.2f}" if prefill else "",
            f"{max(x['tokens_per_s'] for x in decode):.0f}" if decode else "",
            f"{first[0]['ms'] / prefill[0]['ms']:.2f}" if first and prefill else "",
        )
    return table


def peers_table(rows: list[Row], weight_bytes: int, copy_gbps: float) -> Table:
    """All rows, how many times as fast as each peer.

    The roofline of a step is to read the weights once, at the bandwidth of a copy.
    """
    figures = ("ms", "tokens/s", "vs compile", "vs eager", "roofline")
    table = new_table("op", "batch x tokens", "impl", right=figures)
    for row in rows:
        ratios = []
        for peer in ("transformers-compile", "transformers-eager"):
            same = [
                x["ms"] for x in rows
                if x["impl"] == peer and (x["op"], x["batch"]) == (row["op"], row["batch"])
            ]  # fmt: skip
            ratios.append(f"{same[0] / row['ms']:.2f}" if same else "")
        share = 100 * weight_bytes / copy_gbps / 1e6 / row["ms"]
        table.add_row(
            row["op"].removeprefix("gpt2_"),
            f"{row['batch']} x {row['tokens']}",
            row["impl"],
            f"{row['ms']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            *ratios,
            f"{share:.0f} %" if row["op"] == "gpt2_decode" else "",
            style="bold" if row["impl"].startswith("cupyflash-fused") else "",
        )
    return table


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a results file.

    Args:
        results: with "ops", rows of (mode, name, group, count, ms, flops, bytes or None), and with
            the ceilings "copy_gbps" and "matmul_tflops".
    """
    with plots.picture(path, (11, 4.2), 1, 2) as (_, ((bars, roof),)):
        _bars(bars, results["ops"])
        _roofline(roof, results)


def _bars(axes: Any, ops: list[dict[str, Any]]) -> None:
    modes = list(dict.fromkeys(row["mode"] for row in ops))
    shown = set()
    for place, mode in enumerate(modes):
        left = 0.0
        for group in GROUPS:
            times = (x["ms"] * x["count"] for x in ops if x["mode"] == mode and x["group"] == group)
            if microseconds := 1e3 * sum(times):
                label = None if group in shown else group
                shown.add(group)
                axes.barh(place, microseconds, left=left, color=COLOURS[group], label=label)
                left += microseconds
        axes.text(left, place, f" {left:.0f}", va="center")
    axes.set_yticks(range(len(modes)), [LABELS.get(mode, f"(c) {mode}") for mode in modes])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("µs of kernels for one token, each timed by itself")
    if shown:
        axes.legend(ncols=2, loc="lower right")


def _roofline(axes: Any, results: dict[str, Any]) -> None:
    bandwidth, peak = results["copy_gbps"] / 1e3, results["matmul_tflops"]  # TB/s, TFLOP/s
    measured = [row for row in results["ops"] if row["bytes"]]
    corner = peak / bandwidth
    axes.loglog([0.1, corner, 10 * corner], [0.1 * bandwidth, peak, peak], color=plots.GREY)
    named = set()
    for row in measured:
        axes.scatter(
            row["flops"] / row["bytes"],
            row["flops"] / row["ms"] / 1e9,
            color=COLOURS[row["group"]],
            marker=MARKERS[row["mode"]],
            s=30,
        )
        if row["mode"] not in named:
            named.add(row["mode"])
            axes.scatter([], [], color=plots.GREY, marker=MARKERS[row["mode"]], label=row["mode"])
    if named:
        axes.legend(loc="lower right")
    axes.set_xlabel("FLOP per byte of HBM traffic (ncu)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("" if measured else "traffic not measured: run with --ncu", fontsize=9)
