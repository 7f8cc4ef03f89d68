"""The common parts of all scripts in this folder: command line, run, comparison, tables.

A script declares its options with `parser`, opens a `Run`, and hands it the rows of each cell. The
run holds the clock (`bench.lib.timing.Timer`), notes which implementations were left out and why,
writes the results file after every cell, prints the table, and computes the exit status. Without a
GPU, or without results, it ends with the exit status 1 and writes nothing.
"""

import argparse
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.lib import data, report
from bench.lib.deadline import Deadline
from bench.lib.report import (
    Row,
    command_line,
    console,
    is_ours,
    machine_fields,
    table_of,
    write_results,
)
from cupyflash import machine, packages

DTYPES = ("bfloat16", "float16", "float32")
CLOCK = (
    "CUDA events, L2 cold and clean and launch cost hidden before each call, all implementations "
    "in turn, median of {repeats} rounds (cupyflash.testing.timing)"
)


def parser(
    name: str,
    doc: str | None,
    *,
    repeats: int | None = 30,
    output: bool = True,
    impls: Sequence[str] = (),
    dtypes: bool = False,
) -> argparse.ArgumentParser:
    """The options that scripts share; each adds its own.

    Args:
        name: of the module.
        doc: its docstring.
        repeats: default of ``--repeats``; None without the option.
        output: with ``--output``, the name of the results file; else it is ``name``.
        impls: choices of ``--impls``.
        dtypes: with ``--dtype``.
    """
    found = argparse.ArgumentParser(prog=f"python -m bench {name}", description=doc)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    if dtypes:
        found.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    if impls:
        found.add_argument("--impls", nargs="+", choices=impls, default=list(impls))
    if repeats is not None:
        found.add_argument("--repeats", type=int, default=repeats)
    if output:
        help_text = "bench/results/NAME.json"
        found.add_argument("--output", metavar="NAME", default=name, help=help_text)
    return found


def require_gpu(name: str) -> None:
    """End a script that measures on a GPU where there is none, before it writes anything.

    Args:
        name: of the module.

    Raises:
        SystemExit: the reason, with the exit status 1.
    """
    if data.DEVICE == "cuda" and (reason := gpu_problem()):
        raise SystemExit(f"bench {name}: needs a GPU, and has written nothing: {reason}")


def gpu_problem() -> str:
    """Why neither cupyflash nor torch, which all comparisons need, can use a GPU here, or ""."""
    if found := machine.gpu_problem():
        return found
    if not machine.has("torch"):
        return f"torch is not installed; {packages.pip_line('torch')}"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


class Notes:
    """The implementations that were left out, and why; the same reason is printed once.

    Attributes:
        wrong: the implementations that failed a check.
    """

    def __init__(self, out: Console) -> None:
        self.out = out
        self.told: set[tuple[str, str]] = set()
        self.wrong: set[str] = set()

    def left_out(self, impl: str, error: Exception, where: str) -> None:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {first_line}"
        if isinstance(error, AssertionError):
            self.wrong.add(impl)
            reason = f"WRONG RESULT: {first_line}"
        if (impl, reason) not in self.told:
            self.told.add((impl, reason))
            self.say(f"{impl} left out from {where} on: {reason}")

    def late(self, name: str, timing: Any, where: str) -> None:
        """Say so if launch cost may be in the time."""
        if timing.late > timing.repeats // 4:
            self.say(f"{name}: host late in {timing.late} of {timing.repeats} runs of {where}")

    def say(self, text: str) -> None:
        self.out.print(text, markup=False, soft_wrap=True)

    def working(
        self, where: str, names: Iterable[str], make: Callable[[str], Callable[[], Any]]
    ) -> dict[str, Callable[[], Any]]:
        """The calls of those who are right and run; ``make`` checks and returns the call."""
        calls = {}
        for name in names:
            try:
                call = make(name)
                call()  # a call that fails only where it is timed must not end the run
                calls[name] = call
            except Exception as error:  # whatever a library raises where it cannot do this
                self.left_out(name, error, where)
                _free_memory()  # what ran out of memory has left it in pieces
        return calls


class Run:
    """One run of a script, from its options to its exit status; one without a GPU ends here.

    Attributes:
        rows: of the results file.
        fields: its other fields.
        timer: None in a run whose script has a clock of its own.
    """

    def __init__(
        self,
        name: str,
        protocol: str,
        arguments: Sequence[str],
        options: argparse.Namespace,
        *,
        timed: bool = True,
        on_gpu: bool = True,
        **fields: Any,
    ) -> None:
        if on_gpu:
            require_gpu(name)
        self.name, self.file = name, getattr(options, "output", name)
        self.protocol = protocol.format(**vars(options))
        self.command = command_line(name, arguments)
        self.out, self.rows, self.timer = console(), [], None
        self.notes, self.fields = Notes(self.out), {**machine_fields(), **fields}
        if timed:
            from bench.lib.timing import Timer

            self.timer = Timer(options.repeats)
            self.fields |= self.timer.ceilings()
            rates = "matmul {matmul_tflops} TFLOP/s, copy {copy_gbps} GB/s".format(**self.fields)
            self.out.print(f"{self.fields['gpu']}: {rates}")
        warnings.simplefilter("ignore")  # SDPA warns once for each backend that cannot do a shape

    def each(self, cells: Iterable[Any]) -> Iterator[Any]:
        """One cell after the other; a run that is cut short leaves the rows until then."""
        from rich.progress import track

        for cell in track(list(cells), self.name, console=self.out):
            yield cell
            if self.rows:
                self.write()

    def within(self, deadline: Deadline, where: str, step: Callable[[], None]) -> None:
        """Do a step, unless the time is over; one that takes too long is broken off."""
        try:
            with deadline.enforced():
                step()
        except TimeoutError as error:
            self.notes.left_out("everything", error, where)

    def write(self) -> Any:
        """The path of the results file with all rows so far.

        Raises:
            SystemExit: there are none, and results of an earlier run are kept.
        """
        if not self.rows and "kernels" not in self.fields:  # those of bench profile
            raise SystemExit(f"bench {self.name}: nothing was measured, and nothing written")
        return write_results(self.file, self.rows, self.protocol, self.command, **self.fields)

    def compare(
        self,
        where: str,
        impls: Sequence[str],
        checked_call: Callable[[str], Callable[[], Any]],
        row_of: Callable[[str, float], Row],
    ) -> None:
        """Add a row for each implementation that is right.

        Args:
            where: for the notes.
            checked_call: the call of an implementation, once its results are known to be right.
            row_of: the fields of an implementation that took so many ms.
        """
        for impl, timing in self.timer.compare(self.right(where, impls, checked_call)).items():
            self.notes.late(impl, timing, where)
            row = row_of(impl, timing.ms)
            quartiles = [round(ms, 5) for ms in timing.quartiles]
            clock = {"repeats": timing.repeats, "sm_mhz": self.timer.sm_mhz}
            self.rows.append({**row, "quartiles_ms": quartiles, **clock})

    def right(
        self, where: str, impls: Sequence[str], checked_call: Callable[[str], Callable[[], Any]]
    ) -> dict[str, Callable[[], Any]]:
        """The calls of the implementations that are right."""
        import torch

        # torch.compile makes eight versions of a function, no more: one for each problem is too
        # many.
        torch._dynamo.reset()
        return self.notes.working(where, impls, checked_call)

    def compare_bytes(self, problem: Any, impls: Sequence[str], checked_call: Callable) -> None:
        """`compare` of a problem bound by ``problem.bytes``; checked_call(problem, impl)."""

        def row_of(impl: str, ms: float) -> Row:
            gbps = problem.bytes / ms / 1e6
            return problem.row(impl=impl, ms=round(ms, 5), gbps=round(gbps, 1))

        self.compare(str(problem), impls, functools.partial(checked_call, problem), row_of)

    @property
    def results(self) -> dict[str, Any]:
        """The fields that pictures and pages are made of, as the results file has them."""
        return {**self.fields, "command": self.command, "rows": self.rows}

    def draw(self, picture: Callable[[dict[str, Any], Path], None]) -> None:
        """Write a picture of the results beside them, where matplotlib is installed."""
        try:
            picture(self.results, report.RESULTS / f"{self.file}.svg")
        except ImportError as error:
            self.notes.say(f"no picture: {error}")

    def write_page(self, tables: Sequence[Table], lines: Sequence[str], what: str = "µs") -> None:
        """Write a page of tables and lines beside the results; ``what`` begins its title."""
        report.write_page(self.file, self.results, tables, lines, what)

    def finish(self, *printed: Any) -> int:
        """Print these and where the results are.

        Returns:
            The exit status: 1 if cupyflash was wrong anywhere.
        """
        for x in printed:
            self.out.print(x, soft_wrap=isinstance(x, str))
        self.out.print(f"wrote {self.write()}", soft_wrap=True)
        return int(any(map(is_ours, self.notes.wrong)))


def _free_memory() -> None:
    import torch

    torch.cuda.empty_cache()


def assert_right(
    found: Any, exact: Any, eager: Any, what: str = "result", dtype: str | None = None
) -> None:
    """The rule of `cupyflash.testing`: AssertionError if a result is wrong.

    Args:
        eager: what torch's own operations give in the same dtype.
        dtype: that ``found`` was computed in; default its own.
    """
    from cupyflash.testing import compare_with_float64, dtype_name

    compared = compare_with_float64(found, exact, eager, dtype or dtype_name(found), what)
    assert not compared.failure, compared.failure


def table_of_bytes(run: Run, title_of: Callable[[Row], str] = lambda row: row["problem"]) -> Table:
    """`table_of` with the share of the copy."""
    rate_of = lambda row: (f"{row['gbps']:.0f}", row["gbps"] / run.fields["copy_gbps"])  # noqa: E731
    return table_of(run.rows, title_of, ("GB/s", "% of copy"), rate_of)
