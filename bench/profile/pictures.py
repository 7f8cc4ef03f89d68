"""The pictures of bench timeline and of bench profile."""

from pathlib import Path
from typing import Any

from bench.lib import plots
from bench.lib.plots import AMBER, BLUE, GREEN, GREY, PALE, PINK, RED, SKY

DIRECTIONS = {"flash_fwd_sm90": "Forward", "flash_bwd_sm90": "Backward"}


def draw_timeline(results: dict[str, Any], path: Path) -> None:
    """A line for each multiprocessor, a bar for each tile, coloured by the work of the tile."""
    from matplotlib import cm, colors
    from matplotlib.collections import PolyCollection

    rows = results["rows"]
    viridis = colors.LinearSegmentedColormap.from_list(
        "viridis", [cm.viridis(x / 100) for x in range(25, 98)]
    )
    with plots.picture(path, (10, 0.6 + 4.2 * len(rows)), len(rows), 1) as (figure, axes):
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
            axis.set_title(title)
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
        figure.supxlabel(text, fontsize=9)


# Kernels by what they are for: (the beginnings of their names, colour, marker).
FAMILIES = {
    "attention on wgmma (sm90)": (
        ("flash_fwd_sm90", "flash_bwd_sm90", "flash_bwd_wide"),
        RED,
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
        AMBER,
        "s",
    ),
    "attention, float32": (
        ("flash_fwd_fp16x3", "flash_bwd_fp16x3", "flash_fwd_simt", "flash_bwd_simt"),
        PINK,
        "D",
    ),
    "linear layers": (("linear",), GREEN, "^"),
    "decoding": (("flash_decode", "decode_stack"), SKY, "v"),
    "norms": (("norm", "group_norm"), BLUE, "P"),
    "baselines": (("naive", "fused", "flash_attention_1"), PALE, "X"),
    "others": (("",), PALE, "."),
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
    with plots.picture(path, (10, 6.2)) as (_, ((axis,),)):
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
                axis.scatter(x, y, 46, colour, marker=marker, label=name, linewidths=0, zorder=3)
        for begin, (text, shift, side) in NAMED.items():
            if found := [x for x in points if x[2]["expression"].startswith(begin)]:
                style = {"ha": side, "va": "center", "fontsize": 8}
                axis.annotate(text, found[0][:2], shift, textcoords="offset points", **style)
        plots.grid(axis)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        axis.set_xlabel("operations for each byte of DRAM traffic, both counted by the hardware")
        axis.set_ylabel("TFLOP/s")
        title = (
            f"Every kernel on {results['gpu']}: attention and linear layers end near the roof of\n"
            "the tensor cores, norms and decoding near that of the memory"
        )
        axis.set_title(title)
        axis.legend(loc="lower right")


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
