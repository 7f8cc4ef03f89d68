"""QKV projection and MLP beside torch eager, torch.compile and cuBLASLt's own epilogues.

    python -m bench.linear --ops mlp --rows 1 4 16 --output linear

With few rows what counts is the share of the copy bandwidth at which the weights are read once
(`gbps`, a read alone may reach a little more than a copy), with many the rate of the products
(`tflops`). Clock and rounds are those of bench.attention; results are compared with float64 first,
and whoever is wrong is left out and said so. Exit status 1 if cupyflash was wrong anywhere.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from bench import beside
from bench.linear_impls import function_of
from bench.linear_problems import OPS, LinearProblem, problems
from bench.report import Row

IMPLS = ("cupyflash", "torch-eager", "torch-compile", "cublaslt")
PROTOCOL = beside.CLOCK + "; gbps counts each weight once, tflops the products"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.linear", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--ops", nargs="+", choices=OPS, default=list(OPS))
    add("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    add("--rows", nargs="+", type=int, help="instead of 1, 4, 16 and the model's own many")
    add("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    add("--repeats", type=int, default=30)
    add("--output", metavar="NAME", default="linear", help="bench/results/NAME.json")
    return parser.parse_args(arguments)


def measure(problem: LinearProblem, timer: Any, notes: Any, impls: Sequence[str]) -> list[Row]:
    """A row for each implementation that does it right."""

    def row_of(impl: str, ms: float) -> Row:
        gbps, tflops = problem.bytes / 1e6 / ms, problem.flops / 1e9 / ms
        fields = {"ms": round(ms, 5), "gbps": round(gbps, 1), "tflops": round(tflops, 2)}
        return problem.row(impl=impl, **fields)

    checked = functools.partial(checked_call, problem)
    return beside.measure(str(problem), impls, checked, row_of, timer, notes)


def checked_call(problem: LinearProblem, impl: str) -> Callable[[], Any]:
    """One implementation, after its result was compared with float64."""
    import torch

    function, tensors = function_of(problem, impl), problem.tensors()
    eager, wide = function_of(problem, "torch-eager"), _doubled(tensors)
    with torch.no_grad():
        exact, yardstick, found = eager(**wide), eager(**tensors), function(**tensors)
    beside.assert_right(found, exact, yardstick)
    del exact, yardstick, found, wide

    def call() -> Any:
        with torch.no_grad():
            return function(**tensors)

    return call


def _doubled(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if x is None else x.double() for name, x in tensors.items()}


def table_of(rows: list[Row], ceilings: dict[str, float]) -> Table:
    """By what limits it: reading the weights, or multiplying."""

    def rate_of(row: Row) -> tuple[str, float]:
        if row["rows"] > 128:
            return f"{row['tflops']:.0f} TF/s", row["tflops"] / ceilings["matmul_tflops"]
        return f"{row['gbps']:.0f} GB/s", row["gbps"] / ceilings["copy_gbps"]

    return beside.table_of(rows, lambda row: row["problem"], ("rate", "share"), rate_of)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    measured = functools.partial(measure, impls=options.impls)
    cells = problems(options.ops, options.dtype, options.rows)
    benchmark = beside.Benchmark("linear", PROTOCOL, measured, table_of)
    return beside.run(benchmark, cells, options.repeats, arguments, options.output)


if __name__ == "__main__":
    sys.exit(main())
