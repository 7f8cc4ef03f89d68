"""Forward and backward of the projections beside torch eager and torch.compile.

    python -m bench linear_training --output linear_training

A call is the forward and the whole autograd.grad: gradients of x, weights, biases, norm and
residual. Clock and rounds are those of bench attention. The result and all gradients are compared
with float64 first; an implementation that is wrong is reported and left out. The exit status is 1
if cupyflash was wrong anywhere. With ``--autocast`` weights are float32, as in mixed-precision
training.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from bench.lib import data, harness, report
from bench.lib.report import Row
from bench.linear.problems import OPS, LinearProblem, one_by_one, ours, projected

IMPLS = ("cupyflash", "torch-eager", "torch-compile")
PROTOCOL = harness.CLOCK + "; a call is forward and autograd.grad, tflops three times the forward's"
# d_in, hidden, gated, activation, rows.
MODELS = (
    (768, 3072, False, "gelu_tanh", 16384),
    (4096, 11008, True, "silu", 8192),
    (4096, 14336, True, "silu", 8192),
)
FIXED = ("cos", "sin")  # they get no gradient


def problems(
    ops: Sequence[str], dtypes: Sequence[str], rows: Sequence[int] | None
) -> Iterator[LinearProblem]:
    """Every op x dtype x model x number of rows; QKV projections as they stand in a block."""
    seen: dict[str, LinearProblem] = {}  # Llama's projection stands once
    for op, dtype, (*sizes, many) in itertools.product(ops, dtypes, MODELS):
        for count in rows or (many,):
            problem = LinearProblem(op, dtype, count, *sizes, op == "qkv_projection")
            seen.setdefault(str(problem), problem)
    return iter(seen.values())


def function_of(problem: LinearProblem, impl: str) -> Callable[..., tuple[Any, ...]]:
    """The operation on the tensors of a problem, with its results in a tuple."""
    if impl == "torch-compile":
        import torch

        return torch.compile(function_of(problem, "torch-eager"), dynamic=False)
    if problem.op == "mlp":
        function = ours if impl == "cupyflash" else one_by_one
        return lambda **tensors: (function(problem, **tensors),)
    if impl == "cupyflash":
        return functools.partial(projected, problem)
    heads_q, heads_kv = problem.heads
    heads = (heads_q, heads_kv, heads_kv)

    def separate(**tensors: Any) -> tuple[Any, ...]:
        out = one_by_one(problem, **tensors)[None]
        return out.unflatten(-1, (sum(heads), problem.head_dim)).split(heads, -2)

    return separate


def leaves_of(problem: LinearProblem, autocast: bool, wide: bool = False) -> dict[str, Any]:
    """The tensors of the problem as leaves; with ``wide`` in float64."""
    leaves = {}
    for name, x in problem.tensors().items():
        if x is not None:
            if name not in ("x", *FIXED) and autocast:
                x = x.float()
            x = (x.double() if wide else x).requires_grad_(name not in FIXED)
        leaves[name] = x
    return leaves


def training_call(
    problem: LinearProblem, impl: str, autocast: bool, wide: bool = False
) -> Callable[[], list[Any]]:
    """Forward and backward of one implementation; returns results and gradients."""
    import torch

    function, leaves = function_of(problem, impl), leaves_of(problem, autocast, wide)
    wanted = [x for x in leaves.values() if x is not None and x.requires_grad]
    device, on = data.DEVICE, autocast and not wide
    dtype, gradients = getattr(torch, problem.dtype), []

    def call() -> list[Any]:
        with torch.autocast(device, dtype) if on else contextlib.nullcontext():
            outputs = function(**leaves)
        if not gradients:
            source = data.generator(40)
            for y in outputs:
                random = data.random(y.shape, problem.dtype, source)
                gradients.append(random.to(y.dtype))
        return [*outputs, *torch.autograd.grad(outputs, wanted, gradients)]

    return call


def checked_call(problem: LinearProblem, impl: str, autocast: bool) -> Callable[[], Any]:
    """One implementation, after its results and gradients were compared with float64."""
    call = training_call(problem, impl, autocast)
    exact = training_call(problem, "torch-eager", autocast, wide=True)()
    eager = training_call(problem, "torch-eager", autocast)()
    for number, (found, right, yardstick) in enumerate(zip(call(), exact, eager, strict=True)):
        harness.assert_right(found, right, yardstick, f"result {number}")
    return call


def measure(run: harness.Run, problem: LinearProblem, impls: Sequence[str], autocast: bool) -> None:
    """Add a row for each implementation that does it right."""

    def row_of(impl: str, ms: float) -> Row:
        tflops = 3 * problem.flops / 1e9 / ms
        return problem.row(impl=impl, autocast=autocast, ms=round(ms, 5), tflops=round(tflops, 2))

    checked = functools.partial(checked_call, problem, autocast=autocast)
    run.compare(str(problem), impls, checked, row_of)


def table_of(run: harness.Run) -> Table:
    """Rates beside the card's own product."""

    def rate_of(row: Row) -> tuple[str, float]:
        return f"{row['tflops']:.0f} TF/s", row["tflops"] / run.fields["matmul_tflops"]

    return report.table_of(run.rows, lambda row: row["problem"], ("rate", "share"), rate_of)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("linear_training", __doc__, repeats=15, impls=IMPLS, dtypes=True)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--rows", nargs="+", type=int, help="instead of the model's own")
    text = "float32 weights, residuals and norms"
    parser.add_argument("--autocast", action="store_true", help=text)
    options = parser.parse_args(arguments)
    run = harness.Run("linear_training", PROTOCOL, arguments, options)
    for problem in run.each(problems(options.ops, options.dtype, options.rows)):
        measure(run, problem, options.impls, options.autocast)
    return run.finish(table_of(run))
