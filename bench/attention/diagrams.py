"""The diagrams of bench/REPORT.md: a block of the sm_90 forward kernel, and its overlaps in time.

    python -m bench plot_diagrams

Sizes are those of head dim 128 (`FORWARD_TILES` in attention/sm90/forward.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib import harness, plots
from bench.lib.plots import AMBER, BLUE, GREEN, GREY, RED, SKY
from bench.lib.report import RESULTS

DARK = "#202020"  # text on the light colours; on BLUE, GREEN and RED it is white


def box(axes: Any, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    """A filled box with text, or a frame without a filling where the colour is GREY."""
    from matplotlib.patches import Rectangle

    hollow = colour == GREY
    face = "none" if hollow else colour
    patch = Rectangle((x, y), width, height, facecolor=face, edgecolor=GREY, linewidth=1)
    axes.add_patch(patch)
    ink = GREY if hollow else "white" if colour in (BLUE, GREEN, RED) else DARK
    place = {"ha": "center", "va": "center", "color": ink, "fontsize": 9}
    axes.text(x + width / 2, y + height / 2, text, **place)


def arrow(axes: Any, start: tuple, end: tuple, text: str = "", above: float = 1.5) -> None:
    """An arrow, with text over its middle."""
    look = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look)
    place = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + above)
    axes.text(*place, text, ha="center", va="bottom", fontsize=8.5)


def draw_block(axes: Any) -> None:
    """Producers on top, global memory on the left, consumers on the right."""
    axes.set_xlim(-0.5, 100.5)
    axes.set_ylim(-0.5, 56)
    # ---- producers ----
    for x, text in ((29, "scheduler"), (52, "loader of K, V"), (75, "mover of Q, O")):
        box(axes, x, 46, 17, 5, text, AMBER)
    text = "warpgroup 0, the producers: one lane of a warp each, 40 registers a thread"
    axes.text(60.5, 53, text, ha="center", fontsize=9)
    # ---- global memory ----
    box(axes, 0, 0, 13, 54, "", GREY)
    axes.text(6.5, 52.2, "L2, DRAM", ha="center", va="center", fontsize=9)
    for y, text, colour in ((45.5, "counter", AMBER), (22, "Q, K, V", SKY), (7, "O", RED)):
        box(axes, 2, y, 9, 5 if colour == AMBER else 8, text, colour)
    arrow(axes, (11, 48), (28.7, 48), "the next tile", 0.6)
    # ---- shared memory ----
    box(axes, 29, 0, 30, 40, "", GREY)
    axes.text(46.5, 38.2, "shared memory, 192 of 227 KB", ha="center", va="center", fontsize=9)
    box(axes, 31, 30.5, 26, 5.5, "four records, all barriers", AMBER)
    for column, name in enumerate("QKV"):
        for stage in range(2):
            text = f"{name}\nstage {stage}\n32 KB"
            box(axes, 31 + 9 * column, 16.5 - 14 * stage, 8, 12.5, text, SKY)
    arrow(axes, (33, 46), (33, 36.2))
    axes.text(34, 42.8, "a record of the tile", va="center", fontsize=8.5)
    arrow(axes, (11, 26), (30.7, 26), "TMA, started\nby both lanes", 0.5)
    arrow(axes, (30.7, 11), (11.3, 11), "TMA, started\nby the mover", 0.5)
    # ---- consumers ----
    box(axes, 74, 0, 26, 40, "", GREY)
    axes.text(87, 38.4, "232 registers a thread", ha="center", va="center", fontsize=9)
    for y, number, rows in ((20, 1, "0 to 63"), (2, 2, "64 to 127")):
        axes.text(87, y + 13, f"warpgroup {number}: queries {rows}", ha="center", fontsize=9)
        left = 75.5
        for name, count, colour in (("S", 64, BLUE), ("P", 32, GREEN), ("O", 64, RED)):
            box(axes, left, y, count / 10, 11.5, f"{name}\n{count}", colour)
            left += count / 10
        box(axes, left, y, 7, 11.5, "other\n72", GREY)
    arrow(axes, (59.3, 31), (73.7, 31), "full: the bytes\nhave arrived", 0.5)
    arrow(axes, (73.7, 20), (59.3, 20), "empty: a warp\nhas read it", 0.5)
    arrow(axes, (73.7, 8), (59.3, 8), "O, to the\nplace of Q", 0.5)


def draw_turns(axes: Any) -> None:
    """Three rounds of two warpgroups; a unit of time is one product of one of them."""
    axes.set_xlim(-1.9, 12.3)
    axes.set_ylim(-1.1, 3.9)
    rows = {"warpgroup 1": 2.9, "tensor cores": 1.5, "warpgroup 2": 0.1}
    for name, y in rows.items():
        axes.text(-0.15, y + 0.4, name, ha="right", va="center", fontsize=10)
    box(axes, 0, rows["tensor cores"], 1, 0.8, "P0 V", SKY)
    box(axes, 0, rows["warpgroup 2"], 2, 0.8, "softmax of S1", GREEN)
    for turn in range(6):
        start, number, colour = 2 * turn, turn // 2 + 1 + turn % 2, (BLUE, SKY)[turn % 2]
        y = rows[f"warpgroup {1 + turn % 2}"]
        box(axes, start, y, 2, 0.8, f"turn: issues S{number}, P{number - 1} V", AMBER)
        if turn < 5:
            box(axes, start + 2, y, 2, 0.8, f"softmax of S{number}", GREEN)
        products = (f"S{number}", f"P{number - 1} V")
        for place, text in enumerate(products[: 1 if turn == 5 else 2]):
            box(axes, start + 1 + place, rows["tensor cores"], 1, 0.8, text, colour)
        away = (2.85, 2.35) if turn % 2 == 0 else (0.95, 1.45)
        arrow(axes, (start + 0.5, away[0]), (start + 1.05, away[1]))
    axes.annotate("", (12.3, -0.4), (0, -0.4), arrowprops={"arrowstyle": "-|>", "color": GREY})
    text = "time, not to scale; a product of one warpgroup takes 512 clocks at head dim 128"
    axes.text(0, -0.9, text, fontsize=9)


DIAGRAMS = {
    "hopper-block": (draw_block, (10, 5.4), "A block of the sm_90 forward kernel at head dim 128"),
    "hopper-turns": (
        draw_turns,
        (10, 3.4),
        "While one warpgroup has the turn, the other computes its softmax",
    ),
}


def draw_all(folder: Path) -> None:
    for name, (draw, size, title) in DIAGRAMS.items():
        with plots.picture(folder / name, size) as (_, ((axes,),)):
            axes.axis("off")
            axes.set_title(title)
            draw(axes)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("plot_diagrams", __doc__, repeats=None, output=False)
    parser.parse_args(arguments)
    draw_all(RESULTS)
    return 0
