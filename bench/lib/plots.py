"""All pictures share these: a figure that reads on white and on black pages, colours, names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GREY = "#808080"  # of the text
# Okabe and Ito's palette, which colour-blind readers can tell apart.
RED, AMBER, PINK, BLUE = "#D55E00", "#E69F00", "#CC79A7", "#0072B2"
GREEN, SKY, YELLOW, PALE = "#009E73", "#56B4E9", "#F0E442", "#999999"
VIOLET = "#6B4C9A"  # is not in it
PASS_TITLES = {"fwd": "forward", "bwd": "backward"}
COLOURS = {  # by implementation; ours are the warm ones
    "cupyflash": RED,
    "cupyflash-sm90": AMBER,
    "cupyflash-sm80": "#F5C896",
    "cupyflash-simt": PINK,
    "sdpa-flash": BLUE,
    "sdpa-cudnn": GREEN,
    "sdpa-efficient": SKY,
    "sdpa-math": PALE,
    "torch-varlen": YELLOW,
    "flash-attn-2": "#999933",
    "flash-attn-3": VIOLET,
    "flash-attn-4": "#882255",
}
LABELS = {"sdpa-flash": "FA2 (sdpa-flash)", "sdpa-cudnn": "cuDNN (sdpa-cudnn)"}


@contextlib.contextmanager
def picture(
    path: Path, size: tuple[float, float], *shape: int, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which are written as SVG at the end; text stays text.

    Args:
        size: in inches.
        shape: rows and columns of axes; default one of each.
        options: of `Figure.subplots`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style = {f"{part}.color": GREY for part in ("text", "xtick", "ytick")}
    style |= {"axes.labelcolor": GREY, "axes.titlelocation": "left", "axes.titlesize": 11}
    style |= {"legend.frameon": False, "legend.fontsize": 9}
    style |= {"svg.fonttype": "none", "svg.hashsalt": path.stem}
    with matplotlib.rc_context(style):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots(*shape, squeeze=False, **options)
        for axis in axes.flat:
            axis.tick_params(which="both", length=0)
            axis.set_axisbelow(True)
            for spine in axis.spines.values():
                spine.set_visible(False)
        yield figure, axes
        figure.savefig(path.with_suffix(".svg"), transparent=True, metadata={"Date": None})


def grid(axes: Any, **options: Any) -> None:
    axes.grid(color=GREY, alpha=0.3, linewidth=0.8, **options)


def patches(colours: dict[str, str]) -> list[Any]:
    """The handles of a legend of filled boxes, by label."""
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=label) for label, colour in colours.items()]
