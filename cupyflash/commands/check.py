"""``cupyflash check``: every operation on shapes of real models, against float64, and its speed.

Runs on the GPU with CuPy arrays, or on the CPU with NumPy arrays and smaller problems. Everything
is compared by the rule of the tests (:mod:`cupyflash.testing.tolerance`), but of attention only the
first and the last group of heads.
"""

import dataclasses
import functools
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from .. import machine
from ..testing import Comparison
from ..testing.timing import Rounds
from . import check_attention, check_operations
from .check_operations import Check, Maker, Operation, Pass

NO_KERNEL = 3  # an exit code; argparse has 2
REPEATS = 10  # on the GPU
STATISTICS = ("lse", "stats")  # compared, but shown only where they are wrong


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one pass of one problem.

    Attributes:
        name, dtype, shape: of the problem.
        label: name of the pass.
        error, allowed: of the result that comes closest to its tolerance.
        failures: a message for each result beyond its tolerance.
        rate: of work each second, in ``unit``, "FLOP" or "B".
        peak_bytes: memory taken while it ran, the results included.
    """

    name: str
    dtype: str
    shape: str
    label: str
    error: float
    allowed: float
    failures: tuple[str, ...]
    milliseconds: float
    rate: float
    unit: str
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class NotRun:
    """A problem that this machine or setting refuses, or that failed before there was a result."""

    name: str
    error: Exception

    @property
    def refused(self) -> bool:
        """Whether the refusal is documented."""
        return isinstance(self.error, NotImplementedError)


def check() -> int:
    """Run everything and print the table.

    Returns:
        The exit code: 1 if a result is wrong or missing; `NO_KERNEL` if no GPU kernel ran, and what
        ran on the CPU is right.
    """
    from rich.console import Console
    from rich.markup import escape

    from .tables import check_heading, check_table, check_verdict, print_whole

    console = Console(highlight=False)
    problem = machine.gpu_problem()
    library = "numpy" if problem else "cupy"
    console.print(check_heading(problem))
    rows: list[Row] = []
    not_run: list[NotRun] = []
    with console.status("") as status:
        for name, make in operations(library, "bfloat16" if machine.has("ml_dtypes") else None):
            status.update(name)
            try:
                rows += run(make(), library)
            except Exception as error:  # the rest is worth knowing all the same
                not_run.append(NotRun(name, error))
    console.print()
    print_whole(check_table(rows))
    console.print("", check_verdict(rows, not_run, problem), sep="\n")
    if slow := machine.slow_kernels():
        console.print(f"[yellow]Not as fast as it should be[/]: {escape('; '.join(slow))}")
    if any(row.failures for row in rows) or not all(x.refused for x in not_run):
        return 1
    return NO_KERNEL if problem or not rows else 0


def operations(library: str, bfloat16: str | None) -> Iterator[tuple[str, Callable[[], Operation]]]:
    """The name of every operation and a function that makes it; problems are smaller on the CPU.

    Args:
        library: "numpy" or "cupy".
        bfloat16: None where the library lacks it; float16 stands in for it then.
    """
    bfloat16 = bfloat16 or "float16"
    size, length = (1, 1024) if library == "cupy" else (8, 64)
    attention, other = check_attention, check_operations
    packed = (1, 113, 2 * length, length - 1, 911 * length // 1024)
    return named(
        Maker(library),
        (attention.attention, "GPT-2", "float16", (12, 12), 64, max(8 // size, 2), (length,) * 2),
        (attention.attention, "Llama 3 8B", bfloat16, (32, 8), 128, 1, (4 * length,) * 2),
        (attention.attention, "Gemma 2 9B", bfloat16, (16, 8), 256, 1, (4 * length,) * 2, 50.0),
        (attention.attention, "GPT-2", "float32", (12, 12), 64, 1, (length,) * 2),
        (attention.attention, "odd lengths", "float16", (3, 1), 40, 2, (113, 1023)),
        (attention.packed_attention, bfloat16, (32, 8), 128, packed),
        (other.rms_norm, bfloat16, 1024 // size, 4096),
        (other.rms_norm, "float16", 1024 // size, 4096, 0.1),
        (other.layer_norm, "float16", 4096 // size, 768),
        (other.group_norm, "float16", (8 // size, 320, 32, 32), "silu", "NCHW"),
        (other.group_norm, "float32", (8 // size, 256, 32, 32), "gelu", "NHWC"),
        (other.linear, "float16", 4, 768, 3072),
        (other.linear, "float16", 512 // size, 768, 3072),
        (other.linear, "float32", 64, 768, 768),
        (other.mlp, "float16", 4, 768, 3072, False),
        (other.mlp, bfloat16, 512 // size, 1024, 2816, True),
        (other.qkv_projection, bfloat16, 2, (16, 4), 64),
        (other.qkv_projection, bfloat16, 512 // size, (16, 4), 64),
        (attention.decode, bfloat16, (32, 8), 128, (100, 1000)),
        (attention.decode, "float16", (12, 12), 64, (30000 // size, 3)),
        (other.diffusion, "float16", (32 // size, 16, 1024)),
        (other.diffusion, "float32", (32 // size, 16, 1024)),
        (attention.sampling, 8, 50257),
        (attention.blocks, "float16", 2, (12, 64)),
    )


def named(make: Maker, *problems: tuple) -> Iterator[tuple[str, Callable[[], Operation]]]:
    """Problems, each a function and all of its arguments except the maker of arrays."""
    for function, *arguments in problems:
        name = ", ".join(map(str, (function.__name__, *arguments)))
        yield name, functools.partial(function, make, *arguments)


def run(operation: Operation, library: str) -> list[Row]:
    """Compute, verify and measure the passes of an operation on arrays of "numpy" or "cupy"."""
    return [_row(operation, one, library) for one in operation.passes]


def _row(operation: Operation, one: Pass, library: str) -> Row:
    found = {name: compare(operation.exact, name, x) for name, x in one.compute().items()}
    shown = (x for name, x in found.items() if x.failure or name not in STATISTICS)
    closest = max(shown, key=lambda x: x.closeness)
    milliseconds = _milliseconds(library, one.call)
    return Row(
        operation.name,
        operation.dtype,
        operation.shape,
        one.name,
        closest.error,
        closest.allowed,
        tuple(x.failure for x in found.values() if x.failure),
        milliseconds,
        one.work / milliseconds * 1e3,
        one.unit,
        _peak_bytes(library, one.call),
    )


def compare(exact: Check, name: str, result: Any) -> Comparison:
    """The comparison of a result: that of its wrong part, or of the part nearest to being wrong."""
    found = exact.compare(**{name: result})
    return max(found, key=lambda x: (bool(x.failure), x.closeness))


def _milliseconds(library: str, call: Callable[[], Any]) -> float:
    """Time of a call, which has run before, on the GPU for "cupy", else on the CPU."""
    if library == "cupy":
        rounds = Rounds({"call": call})
        for _ in range(REPEATS):
            rounds.run()
        return rounds.timings()["call"].ms
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _peak_bytes(library: str, call: Callable[[], Any]) -> int:
    """The most memory that a call holds at a time, its results included."""
    if library == "cupy":
        import cupy

        pool = cupy.cuda.MemoryPool()  # an empty one, which grows to the peak
        with cupy.cuda.using_allocator(pool.malloc):
            call()
        return pool.total_bytes()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
