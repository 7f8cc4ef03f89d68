"""QKV projection and MLP beside torch eager, torch.compile and cuBLASLt's own epilogues.

    python -m bench linear --ops mlp --rows 1 4 16 --output linear

With small M the figure that matters is the share of the copy bandwidth at which the weights are
read once (`gbps`; a read alone may reach a little more than a copy), with large M it is the rate of
the products (`tflops`). Clock and rounds are those of bench attention. Results are compared with
float64 first; an implementation that is wrong is reported and left out. The exit status is 1 if
cupyflash was wrong anywhere.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from bench.lib import harness, report
from bench.lib.report import Row
from bench.linear.problems import OPS, LinearProblem, function_of, problems

IMPLS = ("cupyflash", "torch-eager", "torch-compile", "cublaslt")
PROTOCOL = harness.CLOCK + "; gbps counts each weight once, tflops the products"


def measure(run: harness.Run, problem: LinearProblem, impls: Sequence[str]) -> None:
    """Add a row for each implementation that does it right."""

    def row_of(impl: str, ms: float) -> Row:
        gbps, tflops = problem.bytes / 1e6 / ms, problem.flops / 1e9 / ms
        fields = {"ms": round(ms, 5), "gbps": round(gbps, 1), "tflops": round(tflops, 2)}
        return problem.row(impl=impl, **fields)

    run.compare(str(problem), impls, functools.partial(checked_call, problem), row_of)


def checked_call(problem: LinearProblem, impl: str) -> Callable[[], Any]:
    """One implementation, after its result was compared with float64."""
    import torch

    function, tensors = function_of(problem, impl), problem.tensors()
    eager, wide = function_of(problem, "torch-eager"), _doubled(tensors)
    with torch.no_grad():
        exact, yardstick, found = eager(**wide), eager(**tensors), function(**tensors)
    harness.assert_right(found, exact, yardstick)
    del exact, yardstick, found, wide

    def call() -> Any:
        with torch.no_grad():
            return function(**tensors)

    return call


def _doubled(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if x is None else x.double() for name, x in tensors.items()}


def table_of(run: harness.Run) -> Table:
    """By what limits it: reading the weights, or multiplying."""

    def rate_of(row: Row) -> tuple[str, float]:
        if row["rows"] > 128:
            return f"{row['tflops']:.0f} TF/s", row["tflops"] / run.fields["matmul_tflops"]
        return f"{row['gbps']:.0f} GB/s", row["gbps"] / run.fields["copy_gbps"]

    return report.table_of(run.rows, lambda row: row["problem"], ("rate", "share"), rate_of)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("linear", __doc__, impls=IMPLS, dtypes=True)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    text = "instead of 1, 4, 16 and the model's own many"
    parser.add_argument("--rows", nargs="+", type=int, help=text)
    options = parser.parse_args(arguments)
    run = harness.Run("linear", PROTOCOL, arguments, options)
    for problem in run.each(problems(options.ops, options.dtype, options.rows)):
        measure(run, problem, options.impls)
    return run.finish(table_of(run))
