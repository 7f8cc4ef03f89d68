"""Attention of real models beside its peers: check, then time all providers on the same tensors.

    python -m bench models                        every model of model_shapes.py, both passes
    python -m bench models --only Llama Whisper   the models with one of these in their names
    python -m bench models --list

Check and clock are those of bench attention: 128 query rows of one sequence and key head, at a
random place, are compared with float64, gradients of biases and sinks too, and everything else must
be finite. A provider that cannot do a model, or fails the check, has a dash. "ratio" is the time of
the best peer divided by ours. FlashAttention-3 is often built without windows, packed sequences and
softcap, so there are two more means: over the models it did, the ratio to the best peer, and to it
alone. The results are
bench/results/models.json, the table models.md, and the picture models.svg. Exit status 1 if
cupyflash failed the check anywhere.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.attention.model_shapes import MODELS, Model
from bench.lib import data, harness, plots, report
from bench.lib.correctness import Check
from bench.lib.providers import PROVIDERS, Call
from bench.lib.report import Row

DEFAULT = ("cupyflash", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "torch-varlen")
FA3 = "flash-attn-3"
PACKAGES = ("flash-attn-2", FA3, "flash-attn-4")
PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}
PASS_COLOURS = {"fwd": plots.RED, "bwd": plots.BLUE}
MOST = 4.0  # times; a bar that is longer ends here, and its figure says how long it is
TITLES = {"cupyflash": "ours", "sdpa-flash": "FA2", "sdpa-cudnn": "cuDNN"} | {
    "sdpa-efficient": "efficient", "torch-varlen": "FA2 varlen", "flash-attn-3": "FA3",
    "flash-attn-2": "FA2 pkg", "flash-attn-4": "FA4",
}  # fmt: skip


def measure(run: harness.Run, model: Model, directions: Sequence[str], names: list[str]) -> None:
    """Add the rows of a model, of each provider that can do a pass and does it right."""
    tensors, options = data.of_problem(model.problem), model.make_options()
    check = Check(model.problem, tensors, **options)
    for direction in directions:

        def checked_call(name: str, direction: str = direction) -> Callable[[], Any]:
            call = Call(PROVIDERS[name], tensors, model.problem.causal, **options)
            check(call, direction)
            return call.forward if direction == "fwd" else call.backward

        def row_of(name: str, ms: float, direction: str = direction) -> Row:
            row = model.problem.row(impl=name, ms=round(ms, 5))
            what = {"op": "models", "what": model.name, "shape": str(model), "pass": direction}
            return {**what, **row}

        run.compare(f"{direction} {model.name}", names, checked_call, row_of)


def cell(row: Row) -> tuple[str, str]:
    return row["what"], row["pass"]


def peer_ratios(rows: list[Row]) -> dict[tuple[str, str], tuple[float, str]]:
    """The best peer's time divided by ours, and its name, in each cell that has both."""
    best = report.best_rows(rows, cell)
    ours = {cell(row): row["ms"] for row in rows if row["impl"] == "cupyflash"}
    peers = {key: best[key] for key in ours if not report.is_ours(best[key]["impl"])}
    return {key: (row["ms"] / ours[key], row["impl"]) for key, row in peers.items()}


def models_table(rows: list[Row]) -> Table:
    """model | shape | pass | µs of each provider | ratio; a dash where there is none."""
    names = [name for name in PROVIDERS if any(row["impl"] == name for row in rows)]
    table = report.new_table("model", "shape", "pass", right=(*map(title, names), "ratio"))
    found, previous = peer_ratios(rows), None
    for key, group in itertools.groupby(rows, cell):
        times = {row["impl"]: row for row in group}
        shape = next(iter(times.values()))["shape"]
        what, direction = key
        figures = [f"{1e3 * times[name]['ms']:.1f}" if name in times else "-" for name in names]
        ratio = f"{found[key][0]:.2f}" if key in found else "-"
        head = (what, shape) if what != previous else ("", "")
        table.add_row(*head, direction, *figures, ratio)
        previous = what
    return table


def summary(rows: list[Row]) -> list[str]:
    """Our geometric means: of all models, of those that FlashAttention-3 did, and beside it."""
    did = {cell(row) for row in rows if row["impl"] == FA3}
    of_these = [row for row in rows if cell(row) in did]
    two = [row for row in of_these if row["impl"] in ("cupyflash", FA3)]
    lines = []
    for start, of in (("", rows), (f"where {FA3} runs, ", of_these), (f"{FA3} as the peer, ", two)):
        means = report.geometric_means(of, cell, lambda row: row["what"])
        lines += [start + line for line in means if report.is_ours(line.split()[1])]
    return lines


def title(name: str) -> str:
    return TITLES.get(name, name)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture: how many times as fast as the best peer, a group for each model."""
    found = peer_ratios(results["rows"])
    names = list(dict.fromkeys(what for what, _ in found))
    with plots.picture(path, (9, 1.2 + 0.36 * len(names))) as (_, ((axes,),)):
        for (what, direction), (ratio, peer) in found.items():
            place, end = names.index(what) + (0.2 if direction == "bwd" else -0.2), _end(ratio)
            axes.barh(place, end - 1, 0.36, 1, color=PASS_COLOURS[direction])
            side = {"ha": "left" if ratio >= 1 else "right", "va": "center", "fontsize": 7}
            axes.text(end, place, f" {ratio:.2f} {title(peer)} ", **side)
        axes.axvline(1, color=plots.GREY, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
        axes.minorticks_off()
        axes.set_xlim(min([1 / 1.35, *(_end(x) / 1.35 for x, _ in found.values())]), 1.35 * MOST)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        plots.grid(axes, axis="x")
        axes.set_xlabel("times as fast as the best peer, whose name is at the end of the bar")
        what = f"Attention of {len(names)} models on {results['gpu']}: right of 1, cupyflash leads"
        axes.set_title(what, pad=24)
        colours = {}
        for direction, label in plots.PASS_TITLES.items():
            if of_pass := [ratio for (_, x), (ratio, _) in found.items() if x == direction]:
                mean = f"geometric mean {report.geometric_mean(of_pass):.2f}"
                colours[f"{label}, {mean}"] = PASS_COLOURS[direction]
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(handles=plots.patches(colours), ncols=2, handlelength=1.0, **place)


def _end(ratio: float) -> float:
    return min(max(ratio, 1 / MOST), MOST)


def listing() -> Table:
    table = report.new_table("model", "shape", right=())
    for model in MODELS:
        table.add_row(model.name, str(model))
    return table


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("models", __doc__, repeats=10)
    add = parser.add_argument
    add("--list", action="store_true", help="print the models and their shapes")
    add("--only", nargs="+", default=[""], metavar="NAME", help="models with this in their names")
    add("--pass", dest="direction", choices=PASSES, default="both")
    add("--providers", nargs="+", choices=PROVIDERS, default=[*DEFAULT, *PACKAGES])
    options = parser.parse_args(arguments)
    if options.list:
        report.console().print(listing())
        return 0
    names = [name.lower() for name in options.only]
    chosen = [x for x in MODELS if any(name in x.name.lower() for name in names)]
    if not chosen:
        parser.error(f"--only: no model's name holds any of {options.only}")
    from bench.lib.timing import PROTOCOL

    run = harness.Run("models", PROTOCOL, arguments, options)
    if not run.out.is_terminal:
        run.out.width = report.WIDTH
    for model in run.each(chosen):
        measure(run, model, PASSES[options.direction], options.providers)
    table, lines = models_table(run.rows), summary(run.rows)
    status = run.finish(table, *lines)
    run.write_page([table], lines)
    run.draw(draw)
    return status
