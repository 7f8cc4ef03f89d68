"""The built-in tiles of attention beside the fastest that `python -m cupyflash tune` finds.

    python -m bench tuning             20 shapes
    python -m bench tuning --quick     6 of them, fewer rounds

Each shape gets `--budget` seconds. Candidates that spill or give wrong results are left out; the
table has the ones timed. A built-in choice should be within 2 % of the fastest: the last line names
those that are not. The results are bench/results/tuning.json and the table tuning.md. Exit status 1
if a candidate was wrong.
"""

from collections.abc import Sequence

from rich.table import Table

from bench.lib import harness, report
from bench.lib.report import Row
from cupyflash import environment
from cupyflash.commands.tuner import LEAST_ROUNDS, SLOW, Found, label, search
from cupyflash.testing import timing
from cupyflash.testing.problem import Problem

PROTOCOL = (
    f"{timing.PROTOCOL}; medians (a candidate {SLOW} times as slow as the fastest leaves after "
    f"{LEAST_ROUNDS} rounds)"
)
TOKENS, HIDDEN = 16384, 2048
WITHIN = 1.02
QUICK = 6  # shapes
# (pass, head dim, length, causal), and another backend than the one for this GPU; the first ones
# are the quick ones.
SHAPES = (
    ("fwd", 64, 4096, True, None),
    ("fwd", 96, 1024, True, None),
    ("fwd", 128, 4096, True, None),
    ("bwd", 128, 4096, True, None),
    ("fwd", 128, 4096, True, "sm80"),
    ("fwd", 64, 4096, True, "fp16x3"),
    ("fwd", 32, 2048, True, None),
    ("fwd", 64, 1024, False, None),
    ("fwd", 64, 2048, True, None),
    ("fwd", 64, 16384, False, None),
    ("fwd", 96, 4096, True, None),
    ("fwd", 96, 16384, False, None),
    ("fwd", 128, 1024, True, None),
    ("fwd", 128, 16384, False, None),
    ("fwd", 192, 1024, True, None),
    ("fwd", 256, 1024, True, None),
    ("fwd", 256, 4096, False, None),
    ("bwd", 256, 4096, True, None),
    ("fwd", 64, 4096, True, "sm80"),
    ("bwd", 64, 4096, True, "sm80"),
)


def problem_of(head_dim: int, seqlen: int, causal: bool, dtype: str) -> Problem:
    heads, batch = HIDDEN // head_dim, max(1, TOKENS // seqlen)
    return Problem(dtype, head_dim, batch, seqlen, heads, heads, causal)


def row_of(problem: Problem, direction: str, found: Found) -> Row:
    """The row of a search; ``ratio`` is how many times as fast the fastest is."""
    ms = {label(x.tile): round(x.ms, 5) for x in found.candidates if x.ms is not None}
    built_in, fastest = label(found.built_in.tile), min(ms, key=ms.get)
    return {
        "op": "tuning",
        "pass": direction,
        "backend": found.key.split()[2],
        **problem.row(),
        "impl": "cupyflash",
        "built_in": built_in,
        "ms": ms[built_in],
        "fastest": fastest,
        "fastest_ms": ms[fastest],
        "ratio": round(ms[built_in] / ms[fastest], 4),
        "rounds": found.rounds,
        "candidates": ms,
        "left_out": {label(x.tile): x.wrong or x.note for x in found.candidates if x.ms is None},
    }


def name_of(row: Row) -> str:
    mask = "causal" if row["causal"] else "full"
    return f"{row['pass']} {row['backend']} D={row['head_dim']} {row['seqlen_q']} {mask}"


def table_of(rows: list[Row]) -> Table:
    table = report.new_table(
        "problem", "built in", right=("ms", "fastest", "ms", "times as fast", "candidates")
    )
    for row in rows:
        table.add_row(
            name_of(row),
            row["built_in"],
            f"{row['ms']:.4f}",
            row["fastest"],
            f"{row['fastest_ms']:.4f}",
            f"{row['ratio']:.3f}",
            f"{len(row['candidates'])}",
        )
    return table


def summary(rows: list[Row]) -> str:
    """How many built-in choices are as fast as they should be, and which are not."""
    beyond = [f"{name_of(row)} ({row['ratio']:.3f})" for row in rows if row["ratio"] > WITHIN]
    start = f"{len(rows) - len(beyond)} of {len(rows)} built-in choices are within 2 % of the "
    return start + "fastest candidate" + (f"; not: {', '.join(beyond)}" if beyond else "")


def measure(
    run: harness.Run, problem: Problem, direction: str, backend: str | None, seconds: float
) -> None:
    """Add the row of a pass of a problem, and notes of what was wrong."""
    try:
        with environment.override(backend=backend):
            found = search(problem, direction, seconds)
    except Exception as error:  # the other shapes are worth knowing all the same
        run.notes.left_out("cupyflash", error, f"{direction} {problem}")
        return
    run.rows.append(row_of(problem, direction, found))
    for x in found.candidates:
        if x.wrong:
            error = AssertionError(x.wrong)
            run.notes.left_out(f"cupyflash {label(x.tile)}", error, found.key)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("tuning", __doc__, repeats=None)
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK} shapes")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for each shape")
    options = parser.parse_args(arguments)
    run = harness.Run("tuning", PROTOCOL, arguments, options, timed=False)
    shapes = SHAPES[:QUICK] if options.quick else SHAPES
    for direction, *shape, backend in run.each(shapes):
        dtype = "float32" if backend == "fp16x3" else "bfloat16"
        measure(run, problem_of(*shape, dtype), direction, backend, options.budget)
    table, line = table_of(run.rows), summary(run.rows)
    status = run.finish(table, line)
    run.write_page([table], [line], "ms")
    return status or int(len(run.rows) < len(shapes))
