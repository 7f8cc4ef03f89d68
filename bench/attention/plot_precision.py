"""The picture of bench precision: error by length, and by the largest logit.

The page behind it shows through, and its text is a grey that reads on white and on black.
"""

from pathlib import Path
from typing import Any

from bench.attention.plot_models import GREY

# Okabe and Ito's palette, which colour-blind readers can tell apart, and a marker each.
STYLES = {
    "cupyflash-bfloat16": ("cupyflash, bfloat16", "#0072B2", "D"),
    "cupyflash-tf32": ('cupyflash, float32, "tf32"', "#E69F00", "s"),
    "sdpa-math": ("SDPA math, float32", "#999999", "v"),
    "sdpa-efficient": ("SDPA efficient, float32", "#56B4E9", "^"),
    "cupyflash-simt": ("cupyflash, float32, CUDA cores", "#CC79A7", "x"),
    "cupyflash": ("cupyflash, float32 (default)", "#D55E00", "o"),
}
SHOWN = ("out", "dq", "dk", "dv")  # SDPA gives no LSE


def worst(row: dict[str, Any]) -> float:
    """The largest of the rms errors of out and the gradients."""
    return max(row["rms"][name] for name in SHOWN)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a results file as SVG, which keeps its text as text, and as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [x for x in results["rows"] if x["head_dim"] == 128]
    rows = [x for x in rows if not (x["causal"] or x["outliers"])]
    most = max((row["seqlen"] for row in rows if row["spread"] != 1), default=0)
    panels = (
        ("Error hardly grows with the length", "seqlen", [x for x in rows if x["spread"] == 1]),
        (
            f"Error grows with the logits in every precision (length {most})",
            "largest_logit",
            [x for x in rows if x["seqlen"] == most],
        ),
    )
    style = {"svg.fonttype": "none", "svg.hashsalt": "precision"} | {
        f"{part}.color": GREY for part in ("text", "xtick", "ytick")
    }
    with pyplot.rc_context(style):
        figure, both = pyplot.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
        for axes, (title, key, shown) in zip(both, panels):
            for impl, (label, colour, marker) in STYLES.items():
                points = sorted((row[key], worst(row)) for row in shown if row["impl"] == impl)
                look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6}
                axes.plot(*zip(*points), label=label, **look) if points else None
            axes.set_xscale("log", base=2)
            ticks = sorted({row[key] for row in shown})
            axes.set_xticks(ticks, [f"{x:.0f}" for x in ticks])
            axes.minorticks_off()
            axes.set_yscale("log")
            axes.grid(color=GREY, alpha=0.3, linewidth=0.8)
            axes.tick_params(which="both", length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
            axes.set_title(title, fontsize=11, loc="left")
        both[0].set_xlabel("sequence length", color=GREY)
        both[1].set_xlabel("largest magnitude of a logit", color=GREY)
        both[0].set_ylabel("rms error / rms, worst of out, dq, dk, dv", color=GREY)
        place = {"loc": "outside upper left", "ncols": 3, "frameon": False, "fontsize": 9}
        figure.legend(*both[0].get_legend_handles_labels(), **place)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), transparent=True, dpi=160)
        pyplot.close(figure)
