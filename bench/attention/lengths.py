"""Pictures over the sequence length, both axes logarithmic: of bench ladder and of bench memory."""

from pathlib import Path
from typing import Any

from bench.lib import plots
from bench.lib.plots import COLOURS, GREY, LABELS, PASS_TITLES, RED

LOOKS = {  # marker and line; the rungs of other libraries are dashed
    "naive": ("v", "-"),
    "fused": ("^", "-"),
    "flash-attention-1": ("P", "-"),
    "cupyflash-simt": ("s", "-"),
    "cupyflash-fp16x3": ("h", "-"),
    "cupyflash-sm80": ("D", "-"),
    "cupyflash-sm90": ("o", "-"),
    "cupyflash": ("o", "-"),
    "triton": ("X", "-"),
    "sdpa-flash": ("s", "--"),
    "sdpa-cudnn": ("o", "--"),
    "sdpa-efficient": ("^", "--"),
    "sdpa-math": ("d", "--"),
}
OWN_COLOURS = {  # the others are those of `plots`
    "naive": "#7F7F7F",
    "fused": "#A6761D",
    "flash-attention-1": "#8C6BB1",
    "cupyflash-fp16x3": RED,
    "cupyflash-sm80": "#E69F00",
    "cupyflash-sm90": RED,
    "triton": "#999933",
}
NAMES = {
    "naive": "naive: scores in memory",
    "fused": "fused, not tiled",
    "flash-attention-1": "FlashAttention-1",
    "triton": "Triton (ours)",
}
BYTES = {1: "1 B", 2**10: "1 KiB", 2**20: "1 MiB", 2**30: "1 GiB"}
Line = tuple[str, list[tuple[float, float]]]  # an implementation, or a slope, and its points


Panel = tuple[str, list[Line], dict[str, str]]  # title, lines, and why a line ends


def draw_panels(panels: list[Panel], title: str, note: str, unit: str, path: Path) -> None:
    """Write a row of panels.

    Args:
        unit: "ms", or "bytes", whose ticks are powers of two.
    """
    with plots.picture(path, (11, 5.6), 1, len(panels), sharey=True) as (figure, row):
        handles: dict[str, Any] = {}
        for axes, (what, lines, ends) in zip(row[0], panels):
            labelled: list[tuple[float, float, str]] = []
            for impl, points in lines:
                (x, y), end = max(points), ends.get(impl, "")
                if any(x == x2 and y2 / 1.5 < y < 1.5 * y2 and end == t for x2, y2, t in labelled):
                    end = ""  # the label of another line is here
                labelled.append((x, y, end))
                handle = _plot(axes, impl, points, end)
                if impl in LOOKS:
                    handles.setdefault(label_of(impl), handle)
            _finish(axes, what, [line for line in lines if line[0] in LOOKS], unit)
        row[0][0].set_ylabel("ms" if unit == "ms" else "extra memory at the peak")
        figure.suptitle(title, fontsize=13, x=0.01, ha="left")
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5)
        row[0][0].text(0, -0.16, note, transform=row[0][0].transAxes, fontsize=8)


def label_of(impl: str) -> str:
    return NAMES.get(impl, LABELS.get(impl, impl))


def _plot(axes: Any, impl: str, points: list[tuple[float, float]], end: str) -> Any:
    points = sorted(points)
    place = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    if impl not in LOOKS:  # a slope to compare with
        axes.annotate(impl, points[-1], (4, 4), ha="center", **place)
        return axes.plot(*zip(*points), color=GREY, linewidth=1.2, linestyle=":")[0]
    marker, line = LOOKS[impl]
    colour = OWN_COLOURS.get(impl, COLOURS.get(impl))
    if end:
        axes.annotate(f"then {end}", points[-1], (7, 0), ha="left", color=colour, **place)
    look = {"color": colour, "marker": marker, "linestyle": line, "linewidth": 1.8}
    if line == "-":
        look |= {"markersize": 6, "zorder": 3}
    else:  # hollow and wide, so that both are seen where they coincide
        look |= {"markersize": 9, "fillstyle": "none", "zorder": 2}
    return axes.plot(*zip(*points), **look)[0]


def _finish(axes: Any, what: str, lines: list[Line], unit: str) -> None:
    lengths = sorted({x for _, points in lines for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(x) for x in lengths])
    axes.set_yscale("log", base=10 if unit == "ms" else 2)
    if unit == "bytes":
        values = [y for _, points in lines for _, y in points]
        ticks = [2**i for i in range(0, 50, 4) if min(values) / 8 < 2**i < 8 * max(values)]
        axes.set_yticks(ticks, [_bytes(x) for x in ticks])
    axes.minorticks_off()
    plots.grid(axes)
    axes.set_title(what)
    axes.set_xlabel("sequence length")


def _short(length: float) -> str:
    return f"{length:.0f}" if length < 1024 else f"{length / 1024:g}k"


def _bytes(count: int) -> str:
    size = max(x for x in BYTES if x <= count)
    return f"{count // size} {BYTES[size][2:]}"


def lines_of(rows: list[dict[str, Any]], field: str) -> list[Line]:
    """The points of each implementation, in the order of `LOOKS`."""
    points = {
        impl: [(row["seqlen_q"], row[field]) for row in rows if row["impl"] == impl]
        for impl in LOOKS
    }
    return [(impl, found) for impl, found in points.items() if found]


def draw_ladder(results: dict[str, Any], path: Path) -> None:
    """The times of each rung by length."""
    rows = results["rows"]
    if not rows:
        return
    times = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        found = [row for row in rows if row["dtype"] == dtype]
        why = [row for row in results["left_out"] if row["dtype"] == dtype]
        ends = {}  # why the next length is missing
        for row in sorted(why, key=lambda row: row["seqlen_q"]):
            if row["why"] != "no kernel":
                ends.setdefault(row["impl"], row["why"])
        times.append((dtype, lines_of(found, "ms"), ends))
    first = rows[0]
    shape = f"batch {first['batch']}, {first['heads']} heads, head dim {first['head_dim']}"
    note = f"{shape}, {'causal' if first['causal'] else 'full'}, on {results['gpu']}"
    draw_panels(times, _headline(rows), note, "ms", path)


def _headline(rows: list[dict[str, Any]]) -> str:
    """How far it is from the first rung to the fastest of ours, where both were measured."""
    title = "Forward pass of attention"
    naive = [row for row in rows if row["impl"] == "naive"]
    if naive:
        slow = max(naive, key=lambda row: (row["seqlen_q"], row["dtype"] != "float32"))
        same = [
            row["ms"]
            for row in rows
            if (row["dtype"], row["seqlen_q"]) == (slow["dtype"], slow["seqlen_q"])
            and row["impl"].startswith("cupyflash")
        ]
        times = f"{slow['ms'] / min(same):.0f} times as fast" if same else ""
        title += f": the top of the ladder is {times} as the first rung" if same else ""
        title += f" at {slow['seqlen_q']} tokens" if same else ""
    return title


def draw_memory(results: dict[str, Any], path: Path) -> None:
    """Extra memory of both passes by length, with the slopes of O(N) and O(N^2)."""
    rows, panels = results["rows"], []
    if not rows:
        return
    for direction, title in PASS_TITLES.items():
        found = [row for row in rows if row["pass"] == direction]
        lines = lines_of(found, "bytes")
        if lines:
            lengths = [row["seqlen_q"] for row in found]
            ends = {impl: "OOM" for impl, points in lines if max(points)[0] < max(lengths)}
            panels.append((title, [*lines, *_slopes(lengths, lines)], ends))
    first = rows[0]
    note = f"{first['dtype']}, {first['heads']} heads, head dim {first['head_dim']}, causal, "
    title = "Attention in tiles needs memory as O(N), with the scores in memory as O(N\u00b2)"
    draw_panels(panels, title, f"{note}batch 1, on {results['gpu']}", "bytes", path)


def _slopes(lengths: list[int], lines: list[Line]) -> list[Line]:
    """O(N) below all points and O(N^2) above them, from the shortest length to the longest."""
    short, long = min(lengths), max(lengths)
    points = [point for _, found in lines for point in found]
    below = 0.5 * min(y / x for x, y in points)
    above = 2.0 * max(y / x**2 for x, y in points if x == short)
    most = max(y for _, y in points)
    end = min(long, (4 * most / above) ** 0.5)
    return [
        ("O(N)", [(short, below * short), (long, below * long)]),
        ("O(N\u00b2)", [(short, above * short**2), (end, above * end**2)]),
    ]
