"""A picture of a results file: TFLOP/s by sequence length, a panel per head dim, full and causal.

python -m bench.plot bench/results/attention.json    writes attention-fwd.png and attention-bwd.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.providers import PROVIDERS

# Okabe and Ito's palette, which colour-blind readers can tell apart; ours are the warm ones.
COLOURS = {
    "cupyflash": "#D55E00",
    "cupyflash-sm90": "#E69F00",
    "cupyflash-sm80": "#F5C896",
    "cupyflash-simt": "#CC79A7",
    "sdpa-flash": "#0072B2",
    "sdpa-cudnn": "#009E73",
    "sdpa-efficient": "#56B4E9",
    "sdpa-math": "#999999",
    "flash-attn-2": "#1B2A49",
    "flash-attn-3": "#000000",
    "flash-attn-4": "#6B4C9A",
}
PASS_TITLES = {"fwd": "forward", "bwd": "backward"}


def panels(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The lines of the picture: (dtype, head_dim, heads, heads_kv) in order."""
    return sorted({(r["dtype"], r["head_dim"], r["heads"], r["heads_kv"]) for r in rows})


def draw(results: dict[str, Any], direction: str, path: Path) -> None:
    """Write the picture of one pass ("fwd" or "bwd") that has at least one row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if row["pass"] == direction]
    impls = [name for name in PROVIDERS if any(row["impl"] == name for row in rows)]
    lines, columns = panels(rows), sorted({row["causal"] for row in rows})
    # 11 inches at 160 dpi are two pixels for each one of a README's width.
    figure, axes = pyplot.subplots(
        len(lines),
        len(columns),
        figsize=(11, 0.9 + 2.6 * len(lines)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, (dtype, head_dim, heads, heads_kv) in enumerate(lines):
        for column, causal in enumerate(columns):
            key = (dtype, head_dim, heads, heads_kv, causal)
            fields = ("dtype", "head_dim", "heads", "heads_kv", "causal")
            shown = [row for row in rows if tuple(row[field] for field in fields) == key]
            axis = axes[line][column]
            draw_panel(axis, shown, impls)
            group = f"{heads} heads" if heads == heads_kv else f"{heads}/{heads_kv} heads"
            title = f"head dim {head_dim}, {'causal' if causal else 'full'} ({dtype}, {group})"
            axis.set_title(title, fontsize=11, loc="left")
            if column == 0:
                axis.set_ylabel("TFLOP/s")
            if line == len(lines) - 1:
                axis.set_xlabel("sequence length")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in impls]
    rows_of_legend = -(-len(impls) // 7)
    figure.legend(
        handles,
        impls,
        loc="outside upper center",
        ncols=-(-len(impls) // rows_of_legend),
        fontsize=9,
        frameon=False,
        handlelength=1.0,
    )
    rate = results["matmul_tflops"]
    figure.supxlabel(
        f"attention {PASS_TITLES[direction]} on {results['gpu']}; its matrix product "
        f"(8192\N{SUPERSCRIPT THREE}, bfloat16) in the same run: {rate:.0f} TFLOP/s",
        fontsize=9,
        color="#444444",
    )
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def draw_panel(axis: Any, rows: list[dict[str, Any]], impls: list[str]) -> None:
    """Bars of the providers side by side, a group for each sequence length."""
    seqlens = sorted({row["seqlen_q"] for row in rows})
    width = 0.84 / len(impls)
    for row in rows:
        index = impls.index(row["impl"])
        x = seqlens.index(row["seqlen_q"]) + (index - (len(impls) - 1) / 2) * width
        axis.bar(x, row["tflops"], 0.94 * width, color=COLOURS[row["impl"]])
        if row["impl"] == "cupyflash":
            style = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 7}
            axis.annotate(f" {row['tflops']:.0f}", (x, row["tflops"]), **style)
    axis.set_xticks(range(len(seqlens)), [str(seqlen) for seqlen in seqlens])
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.12)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", type=Path, help="a file that bench.attention wrote")
    source = parser.parse_args(arguments).results
    results = json.loads(source.read_text())
    for direction in PASS_TITLES:
        if any(row["pass"] == direction for row in results["rows"]):
            path = source.with_name(f"{source.stem}-{direction}.png")
            draw(results, direction, path)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
