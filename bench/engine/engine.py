"""The engine of language models with random weights of published sizes, beside transformers.

    python -m bench engine --models llama-3.2-1b --seconds 400

Three kinds of cells for each model: a step of decoding of some sequences, a long prompt, and 200
requests of mixed lengths at once. The peers are transformers with a static cache, compiled with
CUDA graphs, and for the requests its own continuous batching. Two layers of each model are compared
with transformers in float64 first; a model that is wrong is left out and said so, and the exit
status is 1. Rows are written as they come; after --seconds no cell begins any more, and one that
has begun is broken off, as compiling a long prompt takes transformers minutes. `share` is the time
that the weights and the cache take at the rate of a copy, as a part of the time of a step.
"""

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from rich.table import Table

from bench.engine import ours, peers
from bench.lib import data, harness, plots
from bench.lib.deadline import Deadline
from bench.lib.report import Row, new_table

DECODE = ((1, 512), (32, 1024))  # sequences, keys of each
PREFILL = 8192
REQUESTS, PROMPTS, ANSWERS = 200, (16, 4096), (16, 512)
KINDS = ("decode", "prefill", "serve")
IMPLS = ("cupyflash", "transformers-compile", "transformers-batching")
DEFAULT = ("llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b")
PROTOCOL = (
    "decode: host clock of {steps} steps, greedy; prefill and serve: from the first call to the "
    "last token; everything after a first run that is not counted, median of {repeats}; serve once"
)


class Cell(NamedTuple):
    """A measurement of one kind (decoding, a prompt, requests) on one model."""

    model: str
    kind: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.model} {self.work}"

    @property
    def work(self) -> str:
        """The work that is timed, as tables and pictures name it."""
        if self.kind == "serve":
            return f"{self.batch} requests"
        return f"{self.kind} {self.batch} x {self.tokens}"

    @property
    def new(self) -> int:
        """Tokens that a time is for; of `serve` all new ones."""
        if self.kind == "serve":
            return sum(count for _, count in load(self))
        return self.batch * (1 if self.kind == "decode" else self.tokens)


def load(cell: Cell) -> list[tuple[list[int], int]]:
    """The requests of a cell: prompts and their numbers of new tokens."""
    rng, config = numpy.random.default_rng(7), peers.config_of(cell.model)
    if cell.kind == "prefill":
        return [(rng.integers(0, config.vocab_size, cell.tokens).tolist(), 1)]
    lengths = rng.integers(PROMPTS[0], PROMPTS[1] + 1, cell.batch)
    counts = rng.integers(ANSWERS[0], ANSWERS[1] + 1, cell.batch)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in lengths]
    return list(zip(prompts, map(int, counts)))


def cell_of(row: Row) -> Cell:
    """The cell that a row of the results was measured for."""
    kind = row["op"].removeprefix("engine_")
    return Cell(row["model"], kind, row["batch"], row["tokens"])


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The cells that are wanted, those of a model together."""
    found = []
    for model in options.models:
        of_model = [Cell(model, "decode", *x) for x in DECODE]
        of_model += [Cell(model, "prefill", 1, PREFILL), Cell(model, "serve", REQUESTS, 0)]
        found += [cell for cell in of_model if cell.kind in options.kinds]
    return found


def our_clock(model: Any, cell: Cell, options: argparse.Namespace) -> Callable[[], float]:
    """The clock of a cell, in ms."""
    if cell.kind == "decode":
        return ours.OurDecode(model, cell.batch, cell.tokens, options.steps)
    return ours.OurLoad(model, load(cell), options.max_batch)


def peer_clock(impl: str, model: Any, cell: Cell, options: argparse.Namespace) -> Any:
    """The same of a peer, None if it does no such thing."""
    if (impl == "transformers-batching") != (cell.kind == "serve"):
        return None
    if cell.kind == "serve":
        return lambda: 1e3 * peers.serve_seconds(model, load(cell))
    peer = peers.Peer(model, compiled=data.DEVICE == "cuda")
    shape, vocabulary = (cell.batch, cell.tokens), model.config.vocab_size
    given = torch.randint(0, vocabulary, shape, device=data.DEVICE)
    if cell.kind == "prefill":
        return lambda: peer.prefill_ms(given)
    return lambda: peer.decode_ms(given, options.steps)


def measured(run: harness.Run, cell: Cell, impl: str, clock: Any) -> list[Row]:
    """A row, or none without a clock; the first run compiles."""
    if clock is None:
        return []
    repeats = 1 if cell.kind == "serve" else run.options.repeats
    clock()
    ms = statistics.median(clock() for _ in range(repeats))
    row = {"op": f"engine_{cell.kind}", "model": cell.model, "batch": cell.batch}
    row |= {"tokens": cell.tokens, "impl": impl, "ms": round(ms, 5)}
    row["tokens_per_s"] = round(1e3 * cell.new / ms, 1)
    if cell.kind == "decode":
        weights, keys = peers.bytes_of(cell.model, run.options.dtype)
        moved = weights + keys * cell.batch * cell.tokens
        row["share"] = round(moved / run.fields["copy_gbps"] / 1e6 / ms, 4)
    return [row]


def model_of(name: str, impl: str, dtype: str) -> Any:
    """A model with random weights; ours after its check.

    Raises:
        AssertionError: ours is wrong.
    """
    peers.free_memory()
    if impl != "cupyflash":
        return peers.random_peer(peers.config_of(name), dtype)
    ours.check(name, dtype)
    peers.free_memory()
    return ours.random_for_engine(name, dtype)


def measure(run: harness.Run, name: str, impl: str, deadline: Deadline) -> None:
    """The rows of one implementation of a model, of which one is in memory at a time."""
    options = run.options
    try:
        with deadline.enforced():
            model = model_of(name, impl, options.dtype)
    except Exception as error:  # transformers and the GPU raise many kinds
        run.notes.left_out(impl, error, name)
        return
    clock_of = our_clock if impl == "cupyflash" else functools.partial(peer_clock, impl)
    for cell in (cell for cell in cells_of(options) if cell.model == name):
        try:
            with deadline.enforced():
                run.rows += measured(run, cell, impl, clock_of(model, cell, options))
        except Exception as error:
            run.notes.left_out(impl, error, str(cell))
        if run.rows:
            run.write()
        peers.free_memory()


def table(rows: list[Row]) -> Table:
    """All rows, and how many times as fast cupyflash is as each peer."""
    figures = ("ms", "tokens/s", "% of memory", "cupyflash is x as fast")
    found = new_table("model", "cell", "impl", right=figures)
    best = {cell_of(row): row["ms"] for row in rows if row["impl"] == "cupyflash"}
    for row in sorted(rows, key=lambda row: (*map(str, cell_of(row)), row["impl"])):
        cell, share = cell_of(row), row.get("share")
        mine = best.get(cell)
        found.add_row(
            cell.model,
            cell.work,
            row["impl"],
            f"{row['ms']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{100 * share:.0f}" if share else "",
            f"{row['ms'] / mine:.2f}" if mine and row["impl"] != "cupyflash" else "",
        )
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a results file: tokens a second, relative to the best of a cell."""
    rows = results["rows"]
    cells, best = list(dict.fromkeys(map(cell_of, rows))), {}
    for row in rows:
        best[cell_of(row)] = max(best.get(cell_of(row), 0), row["tokens_per_s"])
    colours = dict(zip(IMPLS, (plots.RED, plots.BLUE, plots.SKY)))
    with plots.picture(path, (8, 1 + 0.6 * len(cells))) as (figure, ((axes,),)):
        for row in rows:
            place = cells.index(cell_of(row)) + 0.27 * (IMPLS.index(row["impl"]) - 1)
            share = row["tokens_per_s"] / best[cell_of(row)]
            axes.barh(place, share, 0.25, color=colours[row["impl"]])
            axes.text(share, place, f" {row['tokens_per_s']:,.0f}", va="center", fontsize=9)
        axes.set_yticks(range(len(cells)), [f"{cell.model}, {cell.work}" for cell in cells])
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_xlim(0, 1.15)
        axes.set_xticks([])
        axes.set_title("tokens a second")
        handles = plots.patches(colours)
        figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")


def make_parser() -> argparse.ArgumentParser:
    parser = harness.parser("engine", __doc__, repeats=3, impls=IMPLS)
    add = parser.add_argument
    add("--models", nargs="+", choices=peers.CONFIGS, default=list(DEFAULT))
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--dtype", choices=harness.DTYPES, default="bfloat16")
    add("--steps", type=int, default=64, help="of decoding, that are timed")
    add("--max-batch", type=int, default=256, help="of the engine for requests at once")
    add("--seconds", type=float, default=float("inf"), help="after these nothing goes on")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    run = harness.Run("engine", PROTOCOL, arguments, options)
    run.options, deadline = options, Deadline(options.seconds)
    for name, impl in run.each(itertools.product(options.models, options.impls)):
        measure(run, name, impl, deadline)
    run.draw(draw)
    return run.finish(table(run.rows))
