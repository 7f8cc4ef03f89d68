"""The cost of masks, biases, dropout and padding, beside cupyflash without them and beside SDPA.

    python -m bench masks

Batches of 4 x 4096 tokens, 2048 hidden, bfloat16, not causal; the clock of bench attention, all in
turn. With a mask or bias, results are compared with float64 first; dropout and lengths are left to
the tests. SDPA gets the same mask; a bias with a gradient stands alone here and has its peers in
bench models. "of plain" is the rate beside that of cupyflash without the
option; rates count the scores that lengths leave.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from bench.lib import data, harness, report
from bench.lib.correctness import Check
from bench.lib.providers import PROVIDERS, Call, trained
from bench.lib.report import Row
from cupyflash.testing.problem import Problem

BATCH, SEQLEN, HIDDEN, HEAD_DIMS = 4, 4096, 2048, (64, 128, 256)
BIASES = {  # whether batch and heads have biases of their own, dtype
    "bias (B,1,S,S)": (True, False, "bfloat16"),
    "bias (B,1,S,S) float32": (True, False, "float32"),
    "bias (1,H,S,S), gradient": (False, True, "bfloat16"),
    "mask (B,1,S,S)": (True, False, "bool"),
}
PLAIN, DROPOUT, LENGTHS = "plain", "dropout 0.1", "lengths S/2"
KINDS = (PLAIN, *BIASES, DROPOUT, LENGTHS)
BACKENDS = ("sdpa-cudnn", "sdpa-efficient")


def make_bias(kind: str, problem: Problem) -> Any:
    """Standard normal; a mask shows half of the keys."""
    import torch

    of_batch, of_heads, dtype = BIASES[kind]
    rows = problem.batch if of_batch else 1, problem.heads if of_heads else 1
    bias = torch.randn(*rows, problem.seqlen, problem.seqlen, device=data.DEVICE)
    bias = bias > 0 if dtype == "bool" else bias.to(getattr(torch, dtype))
    return bias.requires_grad_() if kind.endswith("gradient") else bias


def options_of(kind: str, problem: Problem) -> dict[str, Any]:
    """Options of `cupyflash.attention`."""
    import torch

    if kind in BIASES:
        return {"bias": make_bias(kind, problem)}
    if kind == DROPOUT:
        return {"dropout_p": 0.1}
    if kind == LENGTHS:
        half = torch.full((problem.batch,), problem.seqlen // 2, dtype=torch.int32)
        half = half.to(data.DEVICE)
        return {"seqused_q": half, "seqused_k": half}
    return {}


def measure(run: harness.Run, kind: str, problem: Problem) -> None:
    """Add rows of both passes, of each that can, and is right where that is known."""
    tensors, options = data.of_problem(problem), options_of(kind, problem)
    known = None if kind in (DROPOUT, LENGTHS) else Check(problem, tensors, **options)
    alone = kind == LENGTHS or trained(options)
    share = 0.25 if kind == LENGTHS else 1.0
    for direction in ("fwd", "bwd"):

        def checked_call(impl: str, direction: str = direction) -> Callable[[], Any]:
            call = Call(PROVIDERS[impl], tensors, problem.causal, **options)
            if known:
                known(call, direction)
            return call.forward if direction == "fwd" else call.backward

        def row_of(impl: str, ms: float, direction: str = direction) -> Row:
            rate = share * problem.flops(direction) / ms / 1e9
            fields = problem.row(ms=round(ms, 5), tflops=round(rate, 2))
            return {"op": "masks", "what": kind, "impl": impl, "pass": direction, **fields}

        impls = ["cupyflash"] if alone else ["cupyflash", *BACKENDS]
        run.compare(f"{direction} {kind} {problem}", impls, checked_call, row_of)


def masks_table(rows: list[Row]) -> Table:
    figures = ("ms", "TFLOP/s", "of plain", "vs best SDPA")
    table = report.new_table("head dim", "option", "pass", "impl", right=figures)
    key = lambda row: (row["head_dim"], row["what"], row["pass"])  # noqa: E731
    ours = {key(row): row["tflops"] for row in rows if row["impl"] == "cupyflash"}
    for row in rows:
        plain = ours.get((row["head_dim"], PLAIN, row["pass"]))
        peers = [x["tflops"] for x in rows if key(x) == key(row) and x["impl"] in BACKENDS]
        is_ours = row["impl"] == "cupyflash"
        table.add_row(
            str(row["head_dim"]),
            row["what"],
            row["pass"],
            row["impl"],
            f"{row['ms']:.3f}",
            f"{row['tflops']:.0f}",
            f"{row['tflops'] / plain:.2f}" if plain and is_ours else "",
            f"{row['tflops'] / max(peers):.2f}" if peers and is_ours else "",
            style="bold" if is_ours else "",
        )
    return table


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("masks", __doc__, output=False)
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS)
    options = parser.parse_args(arguments)
    from bench.lib.timing import PROTOCOL

    run = harness.Run("masks", PROTOCOL, arguments, options)
    for head_dim, kind in run.each(itertools.product(options.head_dim, KINDS)):
        heads = HIDDEN // head_dim
        measure(run, kind, Problem("bfloat16", head_dim, BATCH, SEQLEN, heads, heads, False))
    return run.finish(masks_table(run.rows))
