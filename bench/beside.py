"""An operation beside its peers: check each implementation, time all in turn, print a table.

What `bench.norms`, `bench.linear`, `bench.decode`, `bench.transformer` and `bench.unet` have in
common.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.box import MARKDOWN
from rich.table import Table

from bench.report import Row, command_line, console, is_ours, machine_fields, write_results

CLOCK = (
    "CUDA events, L2 cold and clean and launch cost hidden before each call, all implementations "
    "in turn, median of {repeats} rounds (bench.timing)"
)


class Benchmark(NamedTuple):
    """What `run` needs to know of a script.

    Attributes:
        name: of its module.
        protocol: what is said of it in the results, with {repeats}.
        measure: the rows of (problem, timer, notes).
        table: of (rows, ceilings of the card).
    """

    name: str
    protocol: str
    measure: Callable[[Any, Any, Any], list[Row]]
    table: Callable[[list[Row], dict[str, float]], Table]


def run(
    benchmark: Benchmark, problems: Iterable[Any], repeats: int, arguments: Sequence[str], file: str
) -> int:
    """Measure all problems, write them to bench/results/file.json, print them.

    Returns:
        The exit status: 1 if cupyflash was wrong anywhere.
    """
    from rich.progress import track

    from bench.measure import Notes
    from bench.timing import Timer

    out, timer, rows = console(), Timer(repeats), []
    notes, ceilings = Notes(out), timer.ceilings()
    fields = {**machine_fields(), **ceilings}
    out.print(f"{fields['gpu']}: copy {fields['copy_gbps']} GB/s")
    command = command_line(f"bench.{benchmark.name}", arguments)
    protocol = benchmark.protocol.format(repeats=repeats)
    warnings.simplefilter("ignore")
    for problem in track(list(problems), benchmark.name, console=out):
        rows += benchmark.measure(problem, timer, notes)
        path = write_results(file, rows, protocol, command, **fields)
    out.print(benchmark.table(rows, ceilings))
    out.print(f"wrote {path}")
    return int(any(map(is_ours, notes.wrong)))


def assert_right(found: Any, exact: Any, eager: Any, what: str = "") -> None:
    """AssertionError if a result is off float64 by more than twice eager, plus rounding."""
    import torch

    error, allowed = (float((x.double() - exact).abs().max()) for x in (found, eager))
    rounding = torch.finfo(found.dtype).eps * float(exact.abs().max())
    assert error <= 2 * allowed + rounding, f"{what}off by {error:.3g}, eager by {allowed:.3g}"


def right_calls(
    where: str, impls: Sequence[str], checked_call: Callable[[str], Callable[[], Any]], notes: Any
) -> dict[str, Callable[[], Any]]:
    """The calls of the implementations that are right; for the arguments see `measure`."""
    import torch

    # torch.compile makes eight versions of a function, no more: one for each problem is too many.
    torch._dynamo.reset()
    calls = {}
    for impl in impls:
        try:
            call = checked_call(impl)
            call()  # what fails only where it is timed must not end the run
            calls[impl] = call
        except Exception as error:  # whatever a library raises where it cannot do this
            notes.left_out(impl, error, where)
            torch.cuda.empty_cache()
    return calls


def measure(
    where: str,
    impls: Sequence[str],
    checked_call: Callable[[str], Callable[[], Any]],
    row_of: Callable[[str, float], Row],
    timer: Any,
    notes: Any,
) -> list[Row]:
    """A row for each implementation that is right.

    Args:
        where: for the notes.
        checked_call: the call of an implementation, once its results are known to be right.
        row_of: the fields of an implementation that took so many ms.
    """
    rows = []
    for impl, timing in timer.compare(right_calls(where, impls, checked_call, notes)).items():
        notes.late(impl, timing, where)
        row = row_of(impl, timing.ms)
        rows.append({**row, "repeats": timing.repeats, "sm_mhz": timer.sm_mhz})
    return rows


def measure_bytes(
    problem: Any, timer: Any, notes: Any, checked_call: Callable, impls: Sequence[str]
) -> list[Row]:
    """`measure` of a problem that is bound by ``problem.bytes``; checked_call(problem, impl)."""

    def row_of(impl: str, ms: float) -> Row:
        gbps = problem.bytes / ms / 1e6
        return problem.row(impl=impl, ms=round(ms, 5), gbps=round(gbps, 1))

    checked = functools.partial(checked_call, problem)
    return measure(str(problem), impls, checked, row_of, timer, notes)


def table_of_bytes(
    rows: list[Row],
    ceilings: dict[str, float],
    title_of: Callable[[Row], str] = lambda row: row["problem"],
) -> Table:
    """`table_of` with the share of the copy."""
    return table_of(
        rows,
        title_of,
        ("GB/s", "% of copy"),
        lambda row: (f"{row['gbps']:.0f}", row["gbps"] / ceilings["copy_gbps"]),
    )


def table_of(
    rows: list[Row],
    title_of: Callable[[Row], str],
    rate_titles: tuple[str, str],
    rate_of: Callable[[Row], tuple[str, float]],
) -> Table:
    """problem | implementation | ms | rate | its share | times as fast as the best peer.

    Args:
        title_of: what the rows of a problem have in common.
        rate_of: the rate, and the share that it is of what the card can do.
    """
    table = Table(box=MARKDOWN)
    for title in ("problem", "impl"):
        table.add_column(title, no_wrap=True)
    for title in ("ms", *rate_titles, "vs best peer"):
        table.add_column(title, justify="right", no_wrap=True)
    for problem, group in itertools.groupby(rows, title_of):
        cells = list(group)
        peers = [row["ms"] for row in cells if row["impl"] != "cupyflash"]
        best = min(peers or [row["ms"] for row in cells])
        for number, row in enumerate(cells):
            rate, share = rate_of(row)
            table.add_row(
                "" if number else problem,
                row["impl"],
                f"{row['ms']:.4f}",
                rate,
                f"{100 * share:.0f} %",
                f"{best / row['ms']:.2f}",
                style="bold" if row["impl"] == "cupyflash" else "",
            )
    return table
