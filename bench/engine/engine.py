"""The engine of language models with random weights of published sizes, beside transformers.

    python -m bench engine --seconds 400

Three kinds of cells: a step of decoding of some sequences and a long prompt for each model, and for
the first one 200 requests of mixed lengths at once. The peers are transformers compiled, a step of
decoding as a whole with CUDA graphs, a prompt layer by layer; and for the requests its continuous
batching, on flash-attn or else SDPA, and on the attention of this package. All get the same
requests and at most --serve-seconds; tokens a second are the new tokens until then over the time
until then, or until the last of them (`bench.engine.serve`). Two layers of each model are
compared with transformers in float64 first; a model that is wrong is left out and said so, and the
exit status is 1. Rows are written as they come, the peer that compiles last; after --seconds no
cell begins any more, and one that has begun is broken off. `share` is the time that the weights and
the cache take at the rate of a copy, as a part of the time of a step, `done` the part of the new
tokens of all requests that there was time for.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from rich.table import Table

from bench.engine import ours, peers, serve
from bench.lib import data, harness, plots
from bench.lib.deadline import Deadline
from bench.lib.report import Row, new_table
from cupyflash.integrations.transformers import register
from cupyflash.integrations.transformers_models import NAME

DECODE = ((1, 512), (32, 1024))  # sequences, keys of each
PREFILL = 8192
REQUESTS, PROMPTS, ANSWERS = 200, (16, 4096), (16, 512)
KINDS = ("decode", "prefill", "serve")
ON_OURS = "transformers-on-ours"
IMPLS = {  # in the order in which they are measured: the kinds of each, and its colour
    "cupyflash": (KINDS, plots.RED),
    "transformers-batching": (("serve",), plots.SKY),
    ON_OURS: (("serve",), plots.GREEN),
    "transformers-compile": (("decode", "prefill"), plots.BLUE),
}
DEFAULT = ("llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b")
PROTOCOL = (
    "decode: host clock of {steps} steps, greedy; prefill: until the logits; both median of "
    "{repeats}; serve: all requests once, new tokens of at most {serve_seconds:g} s; everything "
    "after a first run that is not counted"
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


def cells_of(options: argparse.Namespace, model: str, impl: str) -> list[Cell]:
    """The cells that are wanted of an implementation of a model."""
    found = [Cell(model, "decode", *x) for x in DECODE]
    found.append(Cell(model, "prefill", 1, PREFILL))
    if model == options.models[0]:
        found.append(Cell(model, "serve", REQUESTS, 0))
    kinds, _ = IMPLS[impl]
    return [cell for cell in found if cell.kind in kinds and cell.kind in options.kinds]


def clock_of(impl: str, model: Any, cell: Cell, options: argparse.Namespace) -> Callable[[], float]:
    """The clock of a step of decoding or of a prompt, in ms."""
    if impl == "cupyflash" and cell.kind == "decode":
        return ours.OurDecode(model, cell.batch, cell.tokens, options.steps)
    if impl == "cupyflash":
        return ours.OurPrompt(model, *load(cell)[0])
    compiled, shape = data.DEVICE == "cuda", (cell.batch, cell.tokens)
    given = torch.randint(0, model.config.vocab_size, shape, device=data.DEVICE)
    if cell.kind == "decode":
        peer = peers.Peer(model, compiled)
        return lambda: peer.decode_ms(given, options.steps)
    if compiled:
        peers.compile_layers(model)
    return lambda: peers.prefill_ms(model, given)


def measured(impl: str, model: Any, cell: Cell, options: argparse.Namespace) -> Row:
    """The fields of a row that the timing of its cell gives; a first run compiles, without a clock.

    Raises:
        TimeoutError: --serve-seconds were too short for one token.
    """
    if cell.kind == "serve":
        engine = serve.ours if impl == "cupyflash" else serve.transformers
        with engine(model, load(cell), options.max_batch, options.serve_seconds) as generate:
            found = generate()
        if not found.tokens:
            raise TimeoutError(f"no token in {options.serve_seconds:g} s")
        row = {"ms": 1e3 * found.seconds, "tokens_per_s": round(found.tokens / found.seconds, 1)}
        return row | {"done": round(found.tokens / cell.new, 4), "settings": found.settings}
    clock = clock_of(impl, model, cell, options)
    clock()
    ms = statistics.median(clock() for _ in range(options.repeats))
    return {"ms": ms, "tokens_per_s": round(1e3 * cell.new / ms, 1)}


def row_of(run: harness.Run, impl: str, model: Any, cell: Cell) -> Row:
    """A row of the results."""
    row = {"op": f"engine_{cell.kind}", "model": cell.model, "batch": cell.batch}
    row |= {"tokens": cell.tokens, "impl": impl} | measured(impl, model, cell, run.options)
    ms = row["ms"] = round(row["ms"], 5)
    if cell.kind == "decode":
        weights, keys = peers.bytes_of(cell.model, run.options.dtype)
        moved = weights + keys * cell.batch * cell.tokens
        row["share"] = round(moved / run.fields["copy_gbps"] / 1e6 / ms, 4)
    return row


def model_of(name: str, impl: str, dtype: str) -> Any:
    """A model with random weights; ours after its check.

    Raises:
        AssertionError: ours is wrong.
    """
    peers.free_memory()
    if impl == ON_OURS:
        register()
    if impl != "cupyflash":
        attention = NAME if impl == ON_OURS else "sdpa"
        return peers.random_peer(peers.config_of(name), dtype, attention)
    ours.check(name, dtype)
    peers.free_memory()
    return ours.random_for_engine(name, dtype)


def measure(run: harness.Run, name: str, impl: str, deadline: Deadline) -> None:
    """The rows of one implementation of a model, of which one is in memory at a time."""
    options = run.options
    if not (cells := cells_of(options, name, impl)):
        return
    try:
        with deadline.enforced():
            model = model_of(name, impl, options.dtype)
    except Exception as error:  # transformers and the GPU raise many kinds
        run.notes.left_out(impl, error, name)
        return
    for cell in cells:
        try:
            with deadline.enforced():
                run.rows.append(row_of(run, impl, model, cell))
        except Exception as error:
            run.notes.left_out(impl, error, str(cell))
        if run.rows:
            run.write()
        peers.free_memory()


def table(rows: list[Row]) -> Table:
    """All rows, and how many times as many tokens a second cupyflash has as each peer."""
    figures = ("ms", "tokens/s", "share", "cupyflash x as fast")
    found = new_table("model", "cell", "impl", right=figures)
    best = {cell_of(row): row["tokens_per_s"] for row in rows if row["impl"] == "cupyflash"}
    for row in sorted(rows, key=lambda row: (*map(str, cell_of(row)), row["impl"])):
        cell, rate = cell_of(row), row["tokens_per_s"]
        mine = best.get(cell) if row["impl"] != "cupyflash" else None
        shares = {"share": "memory", "done": "tokens"}
        parts = [f"{row[x]:.0%} of {what}" for x, what in shares.items() if x in row]
        found.add_row(
            cell.model,
            cell.work,
            row["impl"],
            f"{row['ms']:.{3 if row['ms'] < 1000 else 0}f}",
            f"{rate:,.0f}",
            "".join(parts),
            f"{mine / rate:.2f}" if mine and rate else "",
        )
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a results file: tokens a second, relative to the best of a cell."""
    of_cells: dict[Cell, list[Row]] = {}
    for row in results["rows"]:
        of_cells.setdefault(cell_of(row), []).append(row)
    shown = [impl for impl in IMPLS if any(row["impl"] == impl for row in results["rows"])]
    with plots.picture(path, (8, 1 + 0.6 * len(of_cells))) as (figure, ((axes,),)):
        for place, rows in enumerate(of_cells.values()):
            best = max(row["tokens_per_s"] for row in rows)
            for i, row in enumerate(sorted(rows, key=lambda row: shown.index(row["impl"]))):
                rate, done = row["tokens_per_s"], row.get("done", 1)
                at = place + 0.8 * ((i + 0.5) / len(rows) - 0.5)
                axes.barh(at, rate / best, 0.75 / len(rows), color=IMPLS[row["impl"]][1])
                text = f" {rate:,.0f}" + (f" (first {row['ms'] / 1e3:.0f} s)" if done < 1 else "")
                axes.text(rate / best, at, text, va="center", fontsize=9)
        axes.set_yticks(range(len(of_cells)), [f"{x.model}, {x.work}" for x in of_cells])
        axes.set_ylim(len(of_cells) - 0.5, -0.5)
        axes.set_xlim(0, 1.15)
        axes.set_xticks([])
        axes.set_title("tokens a second")
        handles = plots.patches({impl: IMPLS[impl][1] for impl in shown})
        figure.legend(handles=handles, ncols=2, loc="outside lower center")


def make_parser() -> argparse.ArgumentParser:
    parser = harness.parser("engine", __doc__, repeats=3, impls=tuple(IMPLS))
    add = parser.add_argument
    add("--models", nargs="+", choices=peers.CONFIGS, default=list(DEFAULT))
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--dtype", choices=harness.DTYPES, default="bfloat16")
    add("--steps", type=int, default=64, help="of decoding, that are timed")
    add("--max-batch", type=int, default=256, help="of the requests that decode at once")
    add("--serve-seconds", type=float, default=30.0, help="of the timed run of all requests")
    add("--seconds", type=float, default=float("inf"), help="after these nothing goes on")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    run = harness.Run("engine", PROTOCOL, arguments, options)
    run.options, deadline = options, Deadline(options.seconds)
    impls = [impl for impl in IMPLS if impl in options.impls]
    for impl, name in run.each(itertools.product(impls, options.models)):
        measure(run, name, impl, deadline)
    run.draw(draw)
    lines = [f"{x['impl']}: {x['settings']}" for x in run.rows if "settings" in x]
    return run.finish(table(run.rows), "\n".join(lines))
