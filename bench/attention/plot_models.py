"""The picture of bench models: how many times as fast as the best peer, a group for each model.

The page behind it shows through, and its text is a grey that reads on white and on black.
"""

from pathlib import Path
from typing import Any

from bench.attention.models import peer_ratios, title
from bench.lib.report import geometric_mean

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PASSES = {"fwd": ("forward", "#D55E00"), "bwd": ("backward", "#0072B2")}
GREY = "#808080"
MOST = 4.0  # times; a bar that is longer ends here, and its figure says how long it is


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a results file; SVG keeps its text as text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = peer_ratios(results["rows"])
    names = list(dict.fromkeys(what for what, _ in found))
    style = {"svg.fonttype": "none", "svg.hashsalt": "models"} | {
        f"{part}.color": GREY for part in ("text", "xtick", "ytick")
    }
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.36 * len(names)), layout="constrained")
        for (what, direction), (ratio, peer) in found.items():
            place, end = names.index(what) + (0.2 if direction == "bwd" else -0.2), _end(ratio)
            axes.barh(place, end - 1, 0.36, 1, color=PASSES[direction][1])
            side = {"ha": "left" if ratio >= 1 else "right", "va": "center", "fontsize": 7}
            axes.text(end, place, f" {ratio:.2f} {title(peer)} ", **side)
        axes.axvline(1, color=GREY, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
        axes.set_xlim(min([1 / 1.35, *(_end(x) / 1.35 for x, _ in found.values())]), 1.35 * MOST)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="x", color=GREY, alpha=0.3, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel("times as fast as the best peer, whose name is at the end of the bar")
        what = f"Attention of {len(names)} models on {results['gpu']}: right of 1, cupyflash leads"
        axes.set_title(what, fontsize=11, loc="left", pad=24)
        axes.xaxis.label.set_color(GREY)
        handles, labels = [], []
        for direction, (label, colour) in PASSES.items():
            if of_pass := [ratio for (_, x), (ratio, _) in found.items() if x == direction]:
                handles.append(pyplot.Rectangle((0, 0), 1, 1, color=colour))
                labels.append(f"{label}, geometric mean {geometric_mean(of_pass):.2f}")
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(handles, labels, ncols=2, frameon=False, fontsize=9, handlelength=1.0, **place)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _end(ratio: float) -> float:
    return min(max(ratio, 1 / MOST), MOST)
