"""The pictures of bench timeline, bench profile and bench time_budget.

The page behind them shows through, and their text is a grey that reads on white and on black. The
colours are Okabe and Ito's, or viridis without its darkest part; colour-blind readers can tell them
apart.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.attention.plot_models import GREY


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
                f"{DIRECTIONS[row['kernel']]}: of each group of heads the long tiles first, so "
                f"that all end within {max(ends) - min(ends):.0f} of {max(ends):.0f} µs; "
                f"{100 * row['busy']:.0f} % busy"
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


# The time budget ----------------------------------------------------------------------------------

PARTS = {
    "python": ("Python: look-up, allocation", "#E69F00"),
    "launch": ("launch", "#D55E00"),
    "waiting": ("start and synchronisation", "#999999"),
    "gpu": ("GPU at work", "#0072B2"),
}


def draw_budget(results: dict[str, Any], path: Path) -> None:
    """The parts of a repeated call, and beside them what a first call costs."""
    from matplotlib.patches import Patch

    rows, first = results["rows"], results["first_call_ms"]
    host = sum(rows[0][part] for part in ("python", "launch"))
    sizes = {"figsize": (10, 3.6), "width_ratios": (3, 2)}
    with picture(path, 1, 2, **sizes) as (figure, axes):
        repeated, firsts = axes[0]
        for place, row in enumerate(rows):
            # With a cold L2, as the GPU is timed, it may take longer than in the call itself.
            of_gpu = min(row["gpu"], row["wall"] - row["python"] - row["launch"])
            row = {**row, "gpu": of_gpu}
            row["waiting"] = row["wall"] - sum(row[x] for x in ("python", "launch", "gpu"))
            left = 0.0
            for part, (_, colour) in PARTS.items():
                share = 100 * row[part] / row["wall"]
                repeated.barh(place, share, 0.55, left, color=colour)
                if share > 6:
                    style = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}
                    repeated.text(left + share / 2, place, time_text(row[part]), **style)
                left += share
        text = "{call}: {seqlen_q} tokens\n{time}"
        names = [text.format(**row, time=time_text(row["wall"])) for row in rows]
        repeated.set_yticks(range(len(rows)), names)
        repeated.set_ylim(len(rows) - 0.5, -0.5)
        repeated.set_xlabel("% of the time of a call that is waited for")
        title = f"A repeated call cost this host about {host:.0f} µs, whatever its size"
        repeated.set_title(title, fontsize=11, loc="left")
        handles = [Patch(color=colour) for _, colour in PARTS.values()]
        labels = [label for label, _ in PARTS.values()]
        figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
        bars = {
            "first call of all:\ncompiles": (first["compile"], "#CC79A7"),
            "first call of a\nlater process: loads": (first["load"], "#56B4E9"),
            "every other call:\nlaunches": (host / 1e3, "#E69F00"),
        }
        for place, (ms, colour) in enumerate(bars.values()):
            firsts.barh(place, ms, 0.55, color=colour)
            firsts.text(ms, place, f" {time_text(1e3 * ms)}", ha="left", va="center", fontsize=9)
        firsts.set_xscale("log")
        firsts.set_xlim(0.3 * host / 1e3, 12 * first["compile"])
        firsts.set_yticks(range(len(bars)), list(bars))
        firsts.set_ylim(len(bars) - 0.5, -0.5)
        firsts.set_xticks([])
        firsts.set_xlabel("time, logarithmic")
        firsts.minorticks_off()
        firsts.set_title("Only the very first call compiles", fontsize=11, loc="left")


def time_text(microseconds: float) -> str:
    """A time with two or three digits and its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            value = microseconds / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{microseconds:.1f} µs" if microseconds < 10 else f"{microseconds:.0f} µs"


# The roofline -------------------------------------------------------------------------------------

# Kernels by what they are for: (the beginnings of their names, colour, marker).
FAMILIES = {
    "attention on wgmma (sm90)": (
        ("flash_fwd_sm90", "flash_bwd_sm90", "flash_bwd_wide"),
        "#D55E00",
        "o",
    ),
    "attention on mma.sync": (
        (
            "flash_fwd_sm80",
            "flash_bwd_sm80",
            "flash_bwd_keys",
            "flash_bwd_short",
            "flash_bwd_dbias",
        ),
        "#E69F00",
        "s",
    ),
    "attention, float32": (
        ("flash_fwd_fp16x3", "flash_bwd_fp16x3", "flash_fwd_simt", "flash_bwd_simt"),
        "#CC79A7",
        "D",
    ),
    "linear layers": (("linear", "mlp"), "#009E73", "^"),
    "decoding": (("flash_decode", "decode_stack"), "#56B4E9", "v"),
    "norms": (("norm", "group_norm"), "#0072B2", "P"),
    "baselines": (("naive", "fused", "flash_attention_1"), "#999999", "X"),
    "others": (("",), "#999999", "."),
}
# Names of kernels by the beginning of their expressions, and where they stand: the shift from the
# point in pt, and the side of the text that is there.
NAMED = {
    "flash_fwd_sm90<bfloat16_t, 128, 128": ("forward 128", (0, -13), "right"),
    "flash_fwd_sm90<bfloat16_t, 64, 64, 192": ("forward 64", (7, -8), "left"),
    "flash_bwd_sm90<bfloat16_t, 128": ("backward 128", (-8, -16), "right"),
    "flash_fwd_sm80<bfloat16_t, 128": ("forward, mma.sync", (8, -12), "left"),
    "flash_fwd_fp16x3": ("float32 in float16 parts", (-8, 0), "right"),
    "flash_fwd_simt": ("float32 on CUDA cores", (8, 0), "left"),
    "linear_sm90<bfloat16_t, gelu": ("linear layer", (-8, -12), "right"),
    "flash_decode<": ("decoding", (8, 0), "left"),
    "naive_attention<bfloat16_t, scores": ("scores in memory", (8, 0), "left"),
    "fused_attention": ("fused, but no tiles", (8, 0), "left"),
    "flash_attention_1": ("FlashAttention-1", (8, 0), "left"),
    "norm_fwd<": ("RMSNorm", (8, -4), "left"),
}


def family_of(kernel: str) -> str:
    """The one of `FAMILIES` that a kernel belongs to."""
    return next(name for name, (begins, *_) in FAMILIES.items() if kernel.startswith(begins))


def draw_roofline(results: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Every kernel that computes: operations counted by the hardware over its DRAM bytes.

    Args:
        rows: with counters, one for each kernel.
    """
    points = [
        (flops / row["dram_bytes"], flops / row["us"] / 1e6, row)
        for row in rows
        if (flops := row["tensor_flops"] + row["fp32_flops"]) and row["dram_bytes"]
    ]
    with picture(path, 1, 1, figsize=(10, 6.2)) as (_, axes):
        axis = axes[0, 0]
        ridge = 1e3 * results["matmul_tflops"] / results["copy_gbps"]
        low, high = min(x for x, *_ in points) / 2, 2 * max(4 * ridge, *(x for x, *_ in points))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(low, high)
        axis.set_ylim(min(y for _, y, _ in points) / 2, 2 * results["matmul_tflops"])
        _draw_roofs(axis, results, low, high)
        for name, (_, colour, marker) in FAMILIES.items():
            if found := [x for x in points if family_of(x[2]["kernel"]) == name]:
                x, y, _ = zip(*found)
                axis.scatter(x, y, 46, colour, marker, label=name, linewidths=0, zorder=3)
        for begin, (text, shift, side) in NAMED.items():
            if found := [x for x in points if x[2]["expression"].startswith(begin)]:
                style = {"ha": side, "va": "center", "fontsize": 8}
                axis.annotate(text, found[0][:2], shift, textcoords="offset points", **style)
        axis.grid(color=GREY, alpha=0.25, linewidth=0.8)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        axis.set_xlabel("operations for each byte of DRAM traffic, both counted by the hardware")
        axis.set_ylabel("TFLOP/s")
        title = (
            f"Every kernel on {results['gpu']}: attention and linear layers end near the roof of\n"
            "the tensor cores, norms and decoding near that of the memory"
        )
        axis.set_title(title, fontsize=11, loc="left")
        axis.legend(loc="lower right", frameon=False, fontsize=9)


def _draw_roofs(axis: Any, results: dict[str, Any], low: float, high: float) -> None:
    """Copy bandwidth, and the rates of the tensor cores and of float32 on CUDA cores."""
    copy = results["copy_gbps"] / 1e3
    for name, key in (("matrix product", "matmul_tflops"), ("float32, CUDA cores", "fp32_tflops")):
        level = results[key]
        axis.plot([low, level / copy, high], [low * copy, level, level], color=GREY, lw=1.2)
        style = {"ha": "right", "va": "bottom", "fontsize": 9}
        axis.text(high, 1.03 * level, f"{name}: {level:.0f} TFLOP/s", **style)
    middle = (low * results["fp32_tflops"] / copy) ** 0.5
    axis.text(middle, copy * middle, f"copy: {copy:.1f} TB/s    ", ha="right", fontsize=9)
