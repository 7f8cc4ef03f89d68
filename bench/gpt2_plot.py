"""The picture of bench.gpt2: the time of a token by operation, and the roofline."""

from pathlib import Path
from typing import Any

from bench.gpt2_ops import GROUPS

COLOURS = dict(
    zip(
        GROUPS,
        ("#999999", "#6B4C9A", "#56B4E9", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7"),
    )
)
LABELS = {"naive": "(a) naive", "flash": "(b) flash", "fused": "(c) fused"}
MARKERS = {"naive": "o", "flash": "s", "fused": "^", "persistent": "*"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a results file.

    Args:
        results: with "ops", rows of (mode, name, group, count, ms, flops, bytes or None), and with
            the ceilings "copy_gbps" and "matmul_tflops".
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, roof) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _bars(bars, results["ops"])
    _roofline(roof, results)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


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
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def _roofline(axes: Any, results: dict[str, Any]) -> None:
    bandwidth, peak = results["copy_gbps"] / 1e3, results["matmul_tflops"]  # TB/s, TFLOP/s
    measured = [row for row in results["ops"] if row["bytes"]]
    corner = peak / bandwidth
    axes.loglog([0.1, corner, 10 * corner], [0.1 * bandwidth, peak, peak], color="black")
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
            axes.scatter([], [], color="black", marker=MARKERS[row["mode"]], label=row["mode"])
    if named:
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_xlabel("FLOP per byte of HBM traffic (ncu)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("" if measured else "traffic not measured: run with --ncu", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
