"""``cupyflash check``: attention on shapes of real models, against float64, and its speed.

Runs on the GPU with CuPy arrays, or on the CPU with NumPy arrays and shorter sequences. The first
and the last group of heads are compared with float64, by the rule of the tests
(:mod:`cupyflash.testing.tolerance`).
"""

import contextlib
import dataclasses
import functools
import io
import re
from collections.abc import Callable
from typing import Any

import cupyflash

from .. import environment, machine
from ..attention import families
from ..kernel_config import Access, Features
from ..testing import Expected, Inputs, expected
from . import measure
from .check_cases import Case, cases

_MESSAGE = re.compile(r"max error (\S+), allowed (\S+) ")


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of one pass of one case.

    Attributes:
        family: kernel family, or "CPU".
        error, allowed: of the output or gradient that comes closest to its tolerance.
        failures: a message for each result beyond its tolerance.
        peak_bytes: memory taken while it ran, the results included.
    """

    case: Case
    backward: bool
    family: str
    error: float
    allowed: float
    failures: tuple[str, ...]
    milliseconds: float
    tflops: float
    peak_bytes: int


def run(case: Case, library: str) -> list[Row]:
    """Compute, verify and measure the passes of a case on arrays of "numpy" or "cupy"."""
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
    return [
        _row(case, library, call, [f for f in findings if f.name in names])
        for call, names in passes
    ]


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


def _row(case: Case, library: str, call: Callable[[], Any], findings: list["Finding"]) -> Row:
    backward = findings[0].name not in ("out", "lse")
    shown = [x for x in findings if x.name != "lse" or x.failure]
    worst = max(shown, key=lambda finding: finding.error / finding.allowed)
    milliseconds = measure.milliseconds(library, call)
    flops = measure.attention_flops(case.lengths, case.heads[0], case.head_dim, backward)
    return Row(
        case,
        backward,
        _family(case, backward) if library == "cupy" else "CPU",
        worst.error,
        worst.allowed,
        tuple(finding.failure for finding in findings if finding.failure),
        milliseconds,
        flops / milliseconds / 1e9,
        measure.peak_bytes(library, call),
    )


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


def _compare(exact: Expected, name: str, result: Any) -> Finding:
    failure = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exact.check(**{name: result})
        except AssertionError as error:
            failure = str(error)
    message = _MESSAGE.search(printed.getvalue())
    error, allowed = (message[1], message[2]) if message else ("nan", "nan")
    return Finding(name, float(error), float(allowed), failure)


def _family(case: Case, backward: bool) -> str:
    import cupy

    family = families.choose(
        "check",
        environment.current().family,
        case.dtype,
        case.head_dim,
        Access.TENSOR_MAP,
        Features(),
        divmod(int(cupy.cuda.Device().compute_capability), 10),
        backward=backward,
    )
    return family.__name__.rpartition(".")[2]


def check() -> int:
    """Run all cases and print the table; exit code 1 if a result is wrong."""
    from rich.console import Console

    from .check_table import heading, table, verdict

    console = Console(highlight=False)
    problem = machine.gpu_problem()
    library = "numpy" if problem else "cupy"
    console.print(heading(problem))
    dtypes = ("float16", "float32") + (("bfloat16",) if machine.has("ml_dtypes") else ())
    rows: list[Row] = []
    with console.status("") as status:
        for case in cases(not problem, dtypes):
            status.update(f"{case.name}: {case.shape}")
            rows += run(case, library)
    console.print("", table(rows), "", verdict(rows), sep="\n")
    return 1 if any(row.failures for row in rows) else 0
