"""``cupyflash check``: every operation on shapes of real models, against float64, and its speed.

Runs on the GPU with CuPy arrays, or on the CPU with NumPy arrays and smaller problems. Of attention
the first and the last group of heads are compared, of the rest everything, by the rule of the tests
(:mod:`cupyflash.testing.tolerance`).
"""

import contextlib
import dataclasses
import functools
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import cupyflash

from .. import environment, machine
from ..attention import backends
from ..attention.features import Access, Features
from ..testing import Inputs, expected
from . import measure
from .check_cases import Case, cases
from .check_operations import operations
from .check_problem import Check, Operation, Pass

_MESSAGE = re.compile(r"max error (\S+)(?: of them)?, allowed (\S+) ")


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of one pass of one problem.

    Attributes:
        name, dtype, shape: of the problem.
        label: the pass and, of attention, the backend.
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
        """Whether that is as documented."""
        return isinstance(self.error, NotImplementedError)


def run(case: Case, library: str) -> list[Row]:
    """Compute, verify and measure the passes of attention on arrays of "numpy" or "cupy"."""
    x = case.inputs(library)
    forward, backward = _passes(case, x)
    results = dict(zip(("out", "lse"), forward()))
    passes = [(forward, tuple(results))]
    if backward:
        backward = functools.partial(backward, *results.values())
        gradients = dict(zip(("dq", "dk", "dv"), backward()))
        passes.append((backward, tuple(gradients)))
        results |= gradients
    findings = verify(case, x, results)
    rows = []
    for number, (call, names) in enumerate(passes):
        found = [f for f in findings if f.name in names and (f.name != "lse" or f.failure)]
        label = ("fwd", "bwd")[number]
        backend = f" {_backend(case, bool(number))}" if library == "cupy" else ""
        flops = measure.attention_flops(case.lengths, case.heads[0], case.head_dim, bool(number))
        one = Pass(label, call, names, flops, "FLOP")
        problem = (case.name, case.dtype, case.shape, label + backend)
        rows.append(_row(problem, one, found, library))
    return rows


def run_operation(operation: Operation, library: str) -> list[Row]:
    """The same of an operation beside attention."""
    rows = []
    for one in operation.passes:
        results = zip(one.results, one.call(), strict=True)
        found = [_compare(operation.exact, name, result) for name, result in results]
        problem = (operation.name, operation.dtype, operation.shape, one.name)
        rows.append(_row(problem, one, found, library))
    return rows


def _row(
    problem: tuple[str, str, str, str], one: Pass, findings: list["Finding"], library: str
) -> Row:
    closest = max(findings, key=lambda f: f.error / f.allowed if f.allowed else f.error)
    milliseconds = measure.milliseconds(library, one.call)
    return Row(
        *problem,
        closest.error,
        closest.allowed,
        tuple(finding.failure for finding in findings if finding.failure),
        milliseconds,
        one.work / milliseconds * 1e3,
        one.unit,
        measure.peak_bytes(library, one.call),
    )


def _passes(case: Case, x: Inputs) -> tuple[Callable[[], Any], Callable[..., Any] | None]:
    """Functions of no argument -> (out, lse) and of (out, lse) -> (dq, dk, dv)."""
    qkv, options = (x.q, x.k, x.v), {"causal": True, "softcap": case.softcap}
    if not case.packed:
        return (
            functools.partial(cupyflash.attention, *qkv, return_lse=True, **options),
            functools.partial(cupyflash.attention_backward, x.dout, *qkv, **options),
        )
    longest = map(max, zip(*case.lengths))
    arguments = (*qkv, x.cu_seqlens_q, x.cu_seqlens_k, *longest)
    call = functools.partial(
        cupyflash.flash_attn_varlen_func, *arguments, return_attn_probs=True, **options
    )
    return call, None


@dataclasses.dataclass(frozen=True)
class Finding:
    """The comparison of a part of one result; ``failure`` is "" where it is within tolerance."""

    name: str
    error: float
    allowed: float
    failure: str


def verify(case: Case, inputs: Inputs, results: dict[str, Any]) -> list[Finding]:
    """Compare the first and the last group of heads of each result with float64."""
    heads_q, heads_kv = case.heads
    group, found = heads_q // heads_kv, []
    for batch, kv in ((0, 0), (len(case.lengths) - 1, heads_kv - 1)):
        batches, heads = slice(batch, batch + 1), slice(kv * group, (kv + 1) * group)
        of_q, of_lse = (batches, slice(None), heads), (batches, heads)
        of_k = (batches, slice(None), slice(kv, kv + 1))
        if case.packed:  # no batch axis
            of_q, of_lse, of_k = of_q[1:], of_lse[1:], of_k[1:]
        where = dict.fromkeys(("q", "dout", "out", "dq"), of_q) | {"lse": of_lse}
        where |= dict.fromkeys(("k", "v", "dk", "dv"), of_k)
        tensors = {name: getattr(inputs, name)[where[name]] for name in ("q", "k", "v", "dout")}
        part = dataclasses.replace(inputs, **tensors)
        exact = expected(part, causal=True, softcap=case.softcap)
        found += [_compare(exact, name, x[where[name]]) for name, x in results.items()]
    return found


def _compare(exact: Check, name: str, result: Any) -> Finding:
    failure = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exact.check(**{name: result})
        except AssertionError as error:
            failure = str(error)
    message = _MESSAGE.search(printed.getvalue())
    error, allowed = (message[1], message[2]) if message else ("nan", "nan")
    return Finding(name, float(error), float(allowed), failure)


def _backend(case: Case, backward: bool) -> str:
    import cupy

    backend = backends.choose(
        "check",
        environment.current().backend,
        case.dtype,
        case.head_dim,
        Access.TENSOR_MAP,
        Features(),
        divmod(int(cupy.cuda.Device().compute_capability), 10),
        backward=backward,
    )
    return backend.__name__.rpartition(".")[2]


def check() -> int:
    """Run everything and print the table; exit code 1 if a result is wrong or missing."""
    from rich.console import Console

    from .check_table import heading, table, verdict

    console = Console(highlight=False)
    problem = machine.gpu_problem()
    library = "numpy" if problem else "cupy"
    console.print(heading(problem))
    rows: list[Row] = []
    not_run: list[NotRun] = []
    with console.status("") as status:
        for name, compute in problems(library):
            status.update(name)
            try:
                rows += compute()
            except Exception as error:  # the rest is worth knowing all the same
                not_run.append(NotRun(name, error))
    console.print("", table(rows), "", verdict(rows, not_run), sep="\n")
    failed = any(row.failures for row in rows) or not all(x.refused for x in not_run)
    return 1 if failed else 0


def problems(library: str) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """(what it is, a function that computes its rows) for each problem."""
    bfloat16 = ("bfloat16",) if machine.has("ml_dtypes") else ()
    for case in cases(library == "cupy", ("float16", "float32", *bfloat16)):
        name = f"{case.name}, {case.dtype}: {case.shape}"
        yield name, functools.partial(run, case, library)
    for name, make in operations(library, *bfloat16 or ("float16",)):
        yield name, lambda: run_operation(make(), library)  # noqa: B023
