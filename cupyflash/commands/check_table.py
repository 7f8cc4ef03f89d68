"""What ``cupyflash check`` prints."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

import cupyflash

from .. import jit, machine

if TYPE_CHECKING:
    from .check import Row

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def heading(gpu_problem: str) -> str:
    """Where the check runs; on the CPU, why and what mends it."""
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
    steps = escape("\nand: ".join(machine.mend()))
    return (
        f"{version} on the [bold yellow]CPU[/], with NumPy arrays and short sequences\n"
        f"No GPU is used: {escape(gpu_problem)}.\nTo use one: {steps}"
    )


def table(rows: Sequence["Row"]) -> Table:
    """Two lines for each case, one a pass; fits 80 columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("model\ntokens, heads×dim", "pass\nkernels"):
        table.add_column(name, no_wrap=True)
    for name in ("error", "allowed", "time\nms", "speed\nTFLOP/s", "memory\nMiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for case, passes in itertools.groupby(rows, key=lambda row: row.case):
        name = f"[bold]{case.name}[/], {SHORT[case.dtype]}\n{case.shape}"
        columns = zip(*map(_cells, passes))
        table.add_row(name, *("\n".join(cells) for cells in columns))
    return table


def verdict(rows: Sequence["Row"]) -> str:
    """What the errors mean, and every wrong result."""
    failures = [
        f"[red]{row.case.name}, {'backward' if row.backward else 'forward'}[/]: {escape(failure)}"
        for row in rows
        for failure in row.failures
    ]
    if failures:
        return "\n".join(["[bold red]WRONG RESULTS[/]", *failures])
    return (
        f"[bold green]All {len(rows)} passes are correct[/]: compared with float64, each error is "
        "at most twice that of the same formula in the same dtype, plus rounding (the first and "
        "last group of heads). Memory is the peak while a pass runs, its results included."
    )


def _cells(row: "Row") -> tuple[str, ...]:
    return (
        f"{'bwd' if row.backward else 'fwd'} {row.family}",
        f"{row.error:.1e}",
        f"{row.allowed:.1e}",
        _significant(row.milliseconds),
        _significant(row.tflops),
        f"{row.peak_bytes / 2**20:.1f}",
        "[red]FAIL[/]" if row.failures else "[green]ok[/]",
    )


def _significant(number: float) -> str:
    """Three or four digits in at most seven characters."""
    if number < 0.001:
        return f"{number:.1e}"
    places = ((0.1, 4), (10, 3), (100, 2), (1000, 1))
    decimals = next((count for bound, count in places if number < bound), 0)
    return f"{number:.{decimals}f}"
