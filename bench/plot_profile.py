"""The pictures of bench.timeline, bench.profile and bench.time_budget.

The page behind them shows through, and their text is a grey that reads on white and on black. The
colours are Okabe and Ito's, or viridis without its darkest part; colour-blind readers can tell them
apart.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.plot_models import GREY


@contextlib.contextmanager
def picture(path: Path, *shape: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, written as SVG (text as text) and as PNG at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": path.stem} | {
        f"{part}.color": GREY for part in ("text", "xtick", "ytick")
    }
    with pyplot.rc_context({**style, "axes.labelcolor": GREY}):
        figure, axes = pyplot.subplots(*shape, layout="constrained", squeeze=False, **options)
        for axis in axes.flat:
            axis.tick_params(which="both", length=0)
            axis.set_axisbelow(True)
            for spine in axis.spines.values():
                spine.set_visible(False)
        yield figure, axes
        figure.savefig(path.with_suffix(".svg"), transparent=True, metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), transparent=True, dpi=160)
        pyplot.close(figure)


# The timeline -------------------------------------------------------------------------------------

DIRECTIONS = {"flash_fwd_sm90": "Forward", "flash_bwd_sm90": "Backward"}


def draw_timeline(results: dict[str, Any], path: Path) -> None:
    """A line for each multiprocessor, a bar for each tile, coloured by the work of the tile."""
    from matplotlib import cm, colors
    from matplotlib.collections import PolyCollection

    rows = results["rows"]
    viridis = colors.LinearSegmentedColormap.from_list(
        "viridis", [cm.viridis(x / 100) for x in range(25, 98)]
    )
    with picture(path, len(rows), 1, figsize=(10, 0.6 + 4.2 * len(rows))) as (figure, axes):
        for axis, row in zip(axes[:, 0], rows):
            places = {sm: i for i, sm in enumerate(sorted({tile[0] for tile in row["tiles"]}))}
            bars, shares = [], []
            for sm, begin, end, first, _, _ in row["tiles"]:
                low, high = places[sm] - 0.5, places[sm] + 0.5
                bars.append([(begin, low), (end, low), (end, high), (begin, high)])
                share = first / row["seqlen_q"]
                shares.append(share if row["rows_are"] == "queries" else 1 - share)
            bars = PolyCollection(bars, array=shares, cmap=viridis, linewidths=0)
            bars.set_clim(0, 1)
            axis.add_collection(bars)
            ends = [max(tile[2] for tile in row["tiles"] if tile[0] == sm) for sm in places]
            axis.set_xlim(0, 1.01 * max(ends))
            axis.set_ylim(len(places) - 0.5, -0.5)
            axis.set_yticks([])
            axis.set_ylabel(f"{len(places)} multiprocessors")
            title = (
                f"{DIRECTIONS[row['kernel']]}: long tiles first, so that all end within "
                f"{max(ends) - min(ends):.0f} of {max(ends):.0f} µs; busy "
                f"{100 * row['busy']:.0f} % of the time"
            )
            axis.set_title(title, fontsize=11, loc="left")
        axes[-1, 0].set_xlabel("time in µs since the first tile began")
        bar = figure.colorbar(bars, ax=axes, fraction=0.025, pad=0.01)
        bar.set_ticks([0, 1], labels=["fewest keys", "all keys"])
        bar.ax.tick_params(length=0, rotation=90)
        bar.outline.set_visible(False)
        problem = rows[0]
        text = (
            f"flash attention on {results['gpu']}, causal, {problem['dtype']}, head dim "
            f"{problem['head_dim']}, {problem['heads']} heads, {problem['seqlen_q']} tokens; "
            "a bar is a tile, gaps are waiting"
        )
        figure.supxlabel(text, fontsize=9, color=GREY)
