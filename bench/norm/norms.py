"""Norms and the diffusion step beside torch eager, torch.compile and Liger: GB/s next to a copy's.

    python -m bench norms --ops layer_norm group_norm_activation --output norms

Bytes are those that must move: each input read once, each output written once (weights and
statistics do not count), so a kernel that reads twice cannot reach the copy. Clock and rounds are
those of bench attention. Results are compared with float64 first; an implementation that is wrong
is reported and left out. The exit status is 1 if cupyflash was wrong anywhere. The target is 90 %
of the copy for tensors beyond the L2 cache.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from bench.lib import harness
from bench.lib.report import Row
from bench.norm.problems import OPS, NormProblem, problems

PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}
IMPLS = ("cupyflash", "torch-eager", "torch-compile", "liger")
PROTOCOL = (
    harness.CLOCK
    + "; gbps counts each input and output once; the backward is the whole autograd.grad"
)


def measure(run: harness.Run, direction: str, problem: NormProblem, impls: Sequence[str]) -> None:
    """Add a row for each implementation that does this pass right."""

    def row_of(impl: str, ms: float) -> Row:
        gbps = problem.bytes(direction) / ms / 1e6
        return {"pass": direction, **problem.row(impl=impl, ms=round(ms, 5), gbps=round(gbps, 1))}

    checked = functools.partial(checked_call, problem, direction=direction)
    run.compare(f"{direction} {problem}", impls, checked, row_of)


def checked_call(problem: NormProblem, impl: str, direction: str) -> Callable[[], Any]:
    """One pass of one implementation, after its results were compared with float64."""
    import torch

    function, tensors, gradients = problem.function(impl), problem.tensors(), problem.gradients()
    exact = problem.results(problem.function("torch-eager"), direction, wide=True)
    eager = problem.results(problem.function("torch-eager"), direction)
    for number, (found, right, yardstick) in enumerate(
        zip(problem.results(function, direction), exact, eager, strict=True)
    ):
        harness.assert_right(found, right, yardstick, f"result {number}")
    del exact, eager
    if direction == "fwd":
        return lambda: problem.without_graph(function, tensors)
    outputs = function(*tensors)
    inputs = [x for x in tensors if x.requires_grad]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


def short_title(problem: str) -> str:
    """So that a row of the table fits into 120 columns."""
    for long, short in (("bfloat16", "bf16"), ("float", "fp"), ("_activation", "")):
        problem = problem.replace(long, short)
    return problem


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("norms", __doc__, impls=IMPLS, dtypes=True)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--pass", dest="direction", choices=PASSES, default="both")
    options = parser.parse_args(arguments)
    run = harness.Run("norms", PROTOCOL, arguments, options)
    cells = itertools.product(problems(options.ops, options.dtype), PASSES[options.direction])
    for problem, direction in run.each(x for x in cells if x[1] in x[0].passes):
        measure(run, direction, problem, options.impls)
    title_of = lambda row: f"{row['pass']} {short_title(row['problem'])}"  # noqa: E731
    return run.finish(harness.table_of_bytes(run, title_of))
