"""The ladder: attention from the scores in memory to the newest kernels, on the same tensors.

    python -m bench ladder --traffic      all lengths, float32 and bfloat16, DRAM bytes by ncu
    python -m bench ladder --quick        fewer lengths and repeats, a shorter limit for a call

Forward passes of batch 1 at 512 to 65536 tokens: naive attention with its scores in memory, fused
but not tiled, FlashAttention-1, cupyflash's backends from CUDA cores to Hopper, a Triton kernel of
our own, and SDPA's backends. Each rung is checked against float64 before it is timed; in float32
all but cupyflash's backends may have four times the usual error, as one sum over all keys has. A
rung that does not fit into memory is "OOM"; one that would take longer than ``--limit-ms``, as
predicted from the length before by its growth as the square, is left out; the tables say so.

Extra memory is the peak during a call beyond what there was before it, and holds the output. DRAM
bytes come from ncu, of a call with a cold L2 (``--traffic``); without them FLOP per byte is that of
the least possible bytes, which are q, k, v and the output once. The results are
bench/results/ladder.json, the tables ladder.md, the picture ladder.svg. Exit status 1 if a rung
of this project is wrong anywhere.
"""

import argparse
import copy
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from bench.attention.lengths import draw_ladder as draw
from bench.attention.memory import MIB, peak_extra
from bench.attention.rungs import OURS, QUADRATIC, RUNGS, of_dtype
from bench.lib import data, harness, report, traffic
from bench.lib.correctness import Check
from bench.lib.providers import Call
from bench.lib.report import Row
from cupyflash.testing import Expected, to_float64
from cupyflash.testing.problem import Problem

SEQLENS = [512 * 2**i for i in range(6)] + [65536]
QUICK = {"seqlen": [512, 2048, 8192, 16384], "repeats": 5, "limit_ms": 200.0}
SLACK = 4.0  # of the errors in float32 that are not those of cupyflash's backends
LEAST_REPEATS = 2  # of a call that takes long
PROFILED_MS = 100.0  # ncu runs no call that takes longer
# The conceptual table that this project started from: ms by length, and GB at 2048 tokens.
PUBLISHED = {
    512: {"naive": "1.5", "fused": "1.2", "flash": "0.5"},
    8192: {"naive": "OOM", "fused": "OOM", "flash": "8"},
    16384: {"flash": "18"},
}
PUBLISHED_GB = {2048: {"naive": "8", "flash": "below 0.1"}}
MEASURED_AS = {"naive": "naive", "fused": "fused", "flash": "cupyflash-sm90"}  # of bfloat16


class TooLongError(Exception):
    """A call is predicted to take longer than the limit."""


class Ladder:
    """The measurements of one run.

    Attributes:
        left_out: a row for each rung that has no figure at a length, and why.
        last: the last row of each (dtype, rung), from which the next is predicted.
    """

    def __init__(self, run: harness.Run, options: argparse.Namespace) -> None:
        self.run, self.options, self.memory = run, options, total_memory()
        self.left_out: list[Row] = []
        self.last: dict[tuple[str, str], Row] = {}
        self.extra: dict[str, int] = {}
        run.fields["left_out"] = self.left_out

    def measure(self, problem: Problem) -> None:
        """Add a row for each rung that can do the problem, and does it right and in time."""
        names = [x for x in of_dtype(problem.dtype) if x in self.options.rungs]
        tensors = data.of_problem(problem)
        check = Check(problem, tensors)
        checks = check, with_slack(check) if problem.dtype == "float32" else check
        checked = functools.partial(self.checked_call, problem, tensors, checks)
        rows_before = len(self.run.rows)
        self.run.compare(str(problem), names, checked, functools.partial(self.row_of, problem))
        for row in self.run.rows[rows_before:]:
            self.last[problem.dtype, row["impl"]] = row

    def checked_call(
        self, problem: Problem, tensors: tuple[Any, ...], checks: tuple[Check, Check], name: str
    ) -> Callable[[], Any]:
        strict, slack = checks
        try:
            self.require_time(problem, name)
            call = Call(RUNGS[name], tensors, problem.causal)
            (strict if report.is_ours(name) else slack)(call, "fwd")
            self.extra[name] = peak_extra(call.forward)
            return call.forward
        except Exception as error:
            row = problem.row(impl=name, why=_reason(error))
            self.left_out.append(row)
            raise

    def require_time(self, problem: Problem, name: str) -> None:
        """Raise TooLongError if the call is predicted to take too long and to fit into memory."""
        before = self.last.get((problem.dtype, name))
        if before is None:
            return
        growth = (problem.seqlen / before["seqlen_q"]) ** 2
        fits = name not in QUADRATIC or before["extra_mib"] * MIB * growth < self.memory
        if fits and before["ms"] * growth > self.options.limit_ms:
            raise TooLongError(f"over {self.options.limit_ms / 1000:g} s")

    def row_of(self, problem: Problem, name: str, ms: float) -> Row:
        flops, least = problem.flops("fwd"), least_bytes(problem)
        row = problem.row(impl=name, ms=round(ms, 5), tflops=round(flops / ms / 1e9, 3))
        extra = round(self.extra[name] / MIB, 3)
        figures = {"extra_mib": extra, "least_mb": round(least / 1e6, 3)}
        return {"op": "ladder", "pass": "fwd", **row, **figures}

    def add_traffic(self, arguments: Sequence[str]) -> None:
        """DRAM bytes of each row, in place, where ncu can measure them."""
        kept = [x for x in arguments if x != "--traffic"]
        try:
            self.run.write()
            moved = traffic.bytes_of("ladder", [*kept, "--profile"])
        except Exception as error:  # no ncu, no rights, too old
            self.run.notes.left_out("ncu", error, "the traffic")
            return
        for row in self.run.rows:
            if label(row) in moved:
                row["dram_mb"] = round(moved[label(row)] / 1e6, 3)
                row["flop_per_byte"] = round(flops_of(row) / moved[label(row)], 2)


def with_slack(check: Check) -> Check:
    """The check with `SLACK` times the error of the yardstick, which sets the tolerance."""
    results, found = {}, copy.copy(check)
    for name, result in check.expected.results.items():
        error = to_float64(result.yardstick) - result.exact
        results[name] = result._replace(yardstick=result.exact + SLACK * error)
    found.expected = Expected(results)
    return found


def total_memory() -> int:
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _reason(error: Exception) -> str:
    """What the table says in place of the figures."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "OOM"
    if isinstance(error, TooLongError):
        return str(error)
    return "wrong" if isinstance(error, AssertionError) else "no kernel"


def least_bytes(problem: Problem) -> int:
    """q, k, v and the output once."""
    itemsize = 4 if problem.dtype == "float32" else 2
    numbers = 2 * (problem.seqlen * problem.heads + problem.keys * problem.heads_kv)
    return problem.batch * numbers * problem.head_dim * itemsize


def flops_of(row: Row) -> float:
    return report.cell(row)[1].flops("fwd")


def label(row: Row) -> str:
    return f"{row['dtype']} {row['seqlen_q']} {row['impl']}"


def profile(options: argparse.Namespace) -> int:
    """Runs the calls of the rows in the results file for ncu, the short ones."""
    rows = json.loads((report.RESULTS / f"{options.output}.json").read_text())["rows"]

    @functools.lru_cache(maxsize=1)
    def tensors(problem: Problem) -> tuple[Any, ...]:
        return data.of_problem(problem)

    def forward(row: Row) -> Any:
        problem = report.cell(row)[1]
        return Call(RUNGS[row["impl"]], tensors(problem), problem.causal).forward()

    short = [row for row in rows if row["ms"] <= PROFILED_MS]
    traffic.profile({label(row): functools.partial(forward, row) for row in short})
    return 0


def ladder_table(rows: list[Row], left_out: list[Row]) -> Table:
    """tokens | rung | its figures, or why there are none."""
    measured = any("dram_mb" in row for row in rows)
    dram = "DRAM MB" if measured else "DRAM MB (no ncu)"
    figures = ("ms", "TFLOP/s", "extra MiB", dram, "least MB", "FLOP/byte")
    table = report.new_table("dtype", "tokens", "rung", right=figures)
    place = {name: i for i, name in enumerate(RUNGS)}
    dtypes = list(dict.fromkeys(row["dtype"] for row in [*rows, *left_out]))
    every = sorted(
        (row for row in [*rows, *left_out] if row.get("why") != "no kernel"),
        key=lambda row: (dtypes.index(row["dtype"]), row["seqlen_q"], place[row["impl"]]),
    )
    previous = None
    for row in every:
        head = (row["dtype"], str(row["seqlen_q"]))
        texts = (row["why"],) if "why" in row else _texts(row)
        style = "bold" if report.is_ours(row["impl"]) else ""
        table.add_row(*(head if head != previous else ("", "")), row["impl"], *texts, style=style)
        previous = head
    return table


def _texts(row: Row) -> tuple[str, ...]:
    intensity = row.get("flop_per_byte")
    at_most = f"<= {flops_of(row) / row['least_mb'] / 1e6:.0f}"
    return (
        f"{row['ms']:.4f}",
        f"{row['tflops']:.2f}",
        f"{row['extra_mib']:.1f}",
        f"{row['dram_mb']:.1f}" if "dram_mb" in row else "-",
        f"{row['least_mb']:.1f}",
        at_most if intensity is None else f"{intensity:.0f}",
    )


def published_table(rows: list[Row], left_out: list[Row]) -> Table:
    """The conceptual figures beside those of the same kind in bfloat16, and the memory."""
    found = {
        (row["seqlen_q"], row["impl"]): row
        for row in [*left_out, *rows]
        if row["dtype"] == "bfloat16"
    }
    table = report.new_table("", right=("tokens", "published", "measured"))
    lines = [(x, *("ms", "ms", ".3f"), n, t) for n, of in PUBLISHED.items() for x, t in of.items()]
    lines += [
        (x, "GB", "extra_mib", ".4f", n, t) for n, of in PUBLISHED_GB.items() for x, t in of.items()
    ]
    for kind, unit, field, digits, seqlen, text in lines:
        row = found.get((seqlen, MEASURED_AS[kind]), {})
        value = row.get(field)
        value = value if value is None or unit == "ms" else value * MIB / 1e9
        measured = row.get("why", "-") if value is None else format(value, digits)
        table.add_row(f"{kind}, {unit} ({MEASURED_AS[kind]})", str(seqlen), text, measured)
    return table


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("ladder", __doc__, repeats=10, dtypes=True)
    parser.set_defaults(dtype=["float32", "bfloat16"])
    add = parser.add_argument
    add("--seqlen", type=int, nargs="+", default=SEQLENS)
    add("--heads", type=int, default=16)
    add("--head-dim", type=int, default=64)
    add("--causal", action="store_true")
    add("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS))
    add("--limit-ms", type=float, default=2000.0, help="a longer call is left out")
    add("--traffic", action="store_true", help="measure DRAM bytes, too, by ncu")
    add("--quick", action="store_true")
    add("--profile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    if options.profile:
        return profile(options)
    from bench.lib.timing import PROTOCOL

    protocol = f"{PROTOCOL}; here after at least {LEAST_REPEATS}; dram_mb by ncu, of a cold L2"
    run = harness.Run("ladder", protocol, arguments, options)
    run.timer.least_repeats = LEAST_REPEATS
    ladder, shape = Ladder(run, options), (options.heads, options.heads, options.causal)
    cells = itertools.product(options.dtype, sorted(options.seqlen))
    for problem in run.each([Problem(x, options.head_dim, 1, n, *shape) for x, n in cells]):
        ladder.measure(problem)
    if options.traffic:
        ladder.add_traffic(arguments)
    tables = [table(run.rows, ladder.left_out) for table in (ladder_table, published_table)]
    status = run.finish(*tables)
    run.write_page(tables, [], "Attention forward")
    run.draw(draw)
    return int(bool(status or run.notes.wrong.intersection(OURS)))
