"""The tables of the command line, made by rich; each fits 80 columns, and is never cut.

`new_table` makes those of the benchmarks, too.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import cupyflash

from .. import jit, machine
from .generate import DTYPES

if TYPE_CHECKING:
    from .check import NotRun, Row

MOST_COLUMNS = 1000
# The style of tables that are read in a terminal.
TERMINAL: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "show_edge": False,
    "pad_edge": False,
    "padding": (0, 1, 0, 0),
}
UNITS = {"FLOP": "FLOPS", "B": "B/s"}
SHORT = {dtype: short for short, dtype in DTYPES.items()}


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print rows of a name and a text."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)


def print_kernels(sizes: dict[tuple[str, str], list[int]]) -> None:
    """Print the number and the KiB of the cubins of each (architecture, kernel)."""
    table = new_table("architecture", "kernel", right=("variants", "KiB"), **TERMINAL)
    for names, of_variants in sorted(sizes.items()):
        table.add_row(*names, f"{len(of_variants)}", f"{sum(of_variants) / 1024:.0f}")
    print_whole(table)


def print_whole(table: Table) -> None:
    """Print a table with all that is in it: a narrow terminal breaks its lines, but cuts nothing.

    Where there is no terminal, lines may be longer than the 80 columns that rich assumes.
    """
    console = Console(highlight=False)
    unlimited = console.options.update(max_width=MOST_COLUMNS)
    console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table)


def new_table(*left: str, right: Sequence[str], **style: Any) -> Table:
    """An empty table with columns of texts and, right-justified, columns of numbers.

    Args:
        style: of rich's `Table`, `TERMINAL` say; without it the table is Markdown.
    """
    table = Table(**{"box": MARKDOWN, **style})
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def check_heading(gpu_problem: str) -> str:
    """The device of the check; where that is the CPU, the reason and the remedy."""
    version = f"[bold]cupyflash {cupyflash.__version__}[/]"
    if not gpu_problem:
        import cupy

        device = cupy.cuda.Device()
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        arch = jit.arch_of(divmod(int(device.compute_capability), 10))
        text = f"{version} on {escape(name)} ({arch}), CuPy {cupy.__version__} arrays"
        if not machine.has("ml_dtypes"):
            text += "\nfp16 stands in for bf16, which CuPy lacks: pip install ml_dtypes"
        return text
    where = "on the [bold yellow]CPU[/], with NumPy arrays and small problems"
    return f"{version} {where}\n{no_gpu(gpu_problem)}"


def no_gpu(problem: str) -> str:
    """The reason and the remedy."""
    steps = escape("\nand: ".join(machine.mend()))
    return f"No GPU is used: {escape(problem)}.\nTo use one: {steps}"


def check_table(rows: Sequence["Row"]) -> Table:
    """Two lines for each problem, one a pass."""
    numbers = ("error", "allowed", "time\nms", "speed", "memory\nMiB", "")
    style = TERMINAL | {"padding": 0}
    table = new_table("operation or model\nshape", "pass\nkernels", right=numbers, **style)
    for problem, passes in itertools.groupby(rows, key=lambda x: (x.name, x.dtype, x.shape)):
        name, dtype, shape = map(escape, problem)
        columns = zip(*map(_cells, passes))
        first = f"[bold]{name}[/], {SHORT[dtype]}\n[dim]{shape}[/]"
        table.add_row(first, *("\n".join(cells) for cells in columns))
    return table


def check_verdict(
    rows: Sequence["Row"], not_run: Sequence["NotRun"] = (), gpu_problem: str = ""
) -> str:
    """The meaning of the errors, every wrong result, and the problems that did not run.

    It ends with what the user must know: where no kernel ran, that and why.
    """
    failures = [
        f"[red]{escape(row.name)}, {row.label.split()[0]}[/]: {escape(failure)}"
        for row in rows
        for failure in row.failures
    ]
    broken = [
        f"[red]{escape(x.name)}[/]: {type(x.error).__name__}: {escape(str(x.error))}"
        for x in not_run
        if not x.refused
    ]
    lines = ["[bold red]WRONG RESULTS[/]", *failures] if failures else []
    lines += ["[bold red]DID NOT RUN[/]", *broken] if broken else []
    for x in not_run:
        if x.refused:
            lines.append(f"[yellow]not here[/]: {escape(x.name)}: {escape(str(x.error))}")
    if rows and not failures and not broken:
        colour, where = ("yellow", " on the CPU") if gpu_problem else ("green", "")
        lines.append(
            f"[bold {colour}]All {len(rows)} passes{where} are correct[/]: compared with float64, "
            "each error is at most twice that of the same formula in the same dtype, plus rounding "
            "(of attention the first and the last group of heads). Memory is the peak while a pass "
            "runs, its results included; speeds count each input and result once."
        )
    if gpu_problem:
        lines += ["[bold yellow]NO GPU KERNEL RAN[/], and none was checked.", no_gpu(gpu_problem)]
    elif not rows and not broken:
        lines.append("[bold yellow]NO GPU KERNEL RAN[/]: everything was refused, as said above.")
    return "\n".join(lines)


def _cells(row: "Row") -> tuple[str, ...]:
    return (
        row.label,
        f"{row.error:.1e}" if row.error else "0",
        f"{row.allowed:.1e}" if row.allowed else "0",
        _significant(row.milliseconds),
        _rate(row.rate, row.unit),
        f"{row.peak_bytes / 2**20:.1f}",
        "[red]FAIL[/]" if row.failures else "[green]ok[/]",
    )


def _rate(rate: float, unit: str) -> str:
    """The rate with the prefix that it needs: "712 TFLOPS", "3.91 TB/s"."""
    prefix, size = next((p, n) for p, n in (("T", 1e12), ("G", 1e9), ("M", 0.0)) if rate >= n)
    return f"{_significant(rate / (size or 1e6))} {prefix}{UNITS[unit]}"


def _significant(number: float) -> str:
    """A number as three digits in at most seven characters."""
    if number < 0.001:
        return f"{number:.1e}"
    decimals = next((n for bound, n in ((1, 3), (10, 2), (100, 1)) if number < bound), 0)
    return f"{number:.{decimals}f}"
