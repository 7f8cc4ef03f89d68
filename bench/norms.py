"""Norms and the diffusion step beside torch eager, torch.compile and Liger: GB/s next to a copy's.

    python -m bench.norms --ops layer_norm group_norm_activation --output norms

Bytes are those that must move: each input read once, each output written once (weights and
statistics do not count), so a kernel that reads twice cannot reach the copy. Clock and rounds are
those of bench.attention; results are compared with float64 first, and whoever is wrong is left out
and said so. Exit status 1 if cupyflash was wrong anywhere. The target is 90 % of the copy for
tensors beyond the L2 cache.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from bench import beside
from bench.norm_problems import OPS, NormProblem, problems
from bench.report import Row

PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}
IMPLS = ("cupyflash", "torch-eager", "torch-compile", "liger")
PROTOCOL = (
    beside.CLOCK
    + "; gbps counts each input and output once; the backward is the whole autograd.grad"
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.norms", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--ops", nargs="+", choices=OPS, default=list(OPS))
    add("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    add("--pass", dest="direction", choices=PASSES, default="both")
    add("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    add("--repeats", type=int, default=30)
    add("--output", metavar="NAME", default="norms", help="bench/results/NAME.json")
    return parser.parse_args(arguments)


def measure(
    cell: tuple[str, NormProblem], timer: Any, notes: Any, impls: Sequence[str]
) -> list[Row]:
    """A row for each implementation that does this pass right; a cell is (pass, problem)."""
    direction, problem = cell

    def row_of(impl: str, ms: float) -> Row:
        gbps = problem.bytes(direction) / ms / 1e6
        return {"pass": direction, **problem.row(impl=impl, ms=round(ms, 5), gbps=round(gbps, 1))}

    checked = functools.partial(checked_call, problem, direction=direction)
    return beside.measure(f"{direction} {problem}", impls, checked, row_of, timer, notes)


def checked_call(problem: NormProblem, impl: str, direction: str) -> Callable[[], Any]:
    """One pass of one implementation, after its results were compared with float64."""
    import torch

    function, tensors, gradients = problem.function(impl), problem.tensors(), problem.gradients()
    exact = problem.results(problem.function("torch-eager"), direction, wide=True)
    eager = problem.results(problem.function("torch-eager"), direction)
    for number, (found, right, yardstick) in enumerate(
        zip(problem.results(function, direction), exact, eager, strict=True)
    ):
        beside.assert_right(found, right, yardstick, f"result {number}: ")
    del exact, eager
    if direction == "fwd":
        return lambda: problem.without_graph(function, tensors)
    outputs = function(*tensors)
    inputs = [x for x in tensors if x.requires_grad]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


def table_of(rows: list[Row], ceilings: dict[str, float]) -> Table:
    """A title has the pass as well."""
    title_of = lambda row: f"{row['pass']} {short_title(row['problem'])}"  # noqa: E731
    return beside.table_of_bytes(rows, ceilings, title_of)


def short_title(problem: str) -> str:
    """So that a row of the table fits into 120 columns."""
    for long, short in (("bfloat16", "bf16"), ("float", "fp"), ("_activation", "")):
        problem = problem.replace(long, short)
    return problem


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    measured = functools.partial(measure, impls=options.impls)
    cells = [
        (direction, problem)
        for problem, direction in itertools.product(
            problems(options.ops, options.dtype), PASSES[options.direction]
        )
        if direction in problem.passes
    ]
    benchmark = beside.Benchmark("norms", PROTOCOL, measured, table_of)
    return beside.run(benchmark, cells, options.repeats, arguments, options.output)


if __name__ == "__main__":
    sys.exit(main())
