"""Attention beside its peers: check, then time all providers on the same tensors.

    python -m bench attention --head-dim 64 128 --seqlen 4096 16384 --output attention

The protocol is `bench.lib.timing.PROTOCOL`; bench/README.md explains it. A provider that is
missing, cannot do a shape or fails the check is left out with a note. Exit status 1 if cupyflash
failed the check anywhere.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from bench.attention.bars import draw
from bench.lib import data, harness
from bench.lib.correctness import Check
from bench.lib.providers import PROVIDERS, Call
from bench.lib.report import Row, attention_table, geometric_means
from cupyflash.testing.problem import Problem

PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}
CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}
SEQLENS = [512, 1024, 2048, 4096, 8192, 16384]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = harness.parser("attention", __doc__, dtypes=True)
    add = parser.add_argument
    add("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    add("--seqlen", type=int, nargs="+", default=SEQLENS)
    add("--batch-tokens", type=int, default=16384, help="batch = this / seqlen, at least 1")
    add("--hidden", type=int, default=2048, help="heads = this / head_dim, without --heads")
    add("--heads", type=int, nargs="+", help="query heads")
    add("--heads-kv", type=int, help="key and value heads, as many as query heads if not given")
    add("--causal", choices=CAUSAL, default="both")
    add("--pass", dest="direction", choices=PASSES, default="both")
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    add("--once", action="store_true", help="run each call once, untimed, for a profiler")
    return parser.parse_args(arguments)


def problems(options: argparse.Namespace) -> list[Problem]:
    """Every heads x dtype x head dim x causal x seqlen, in this order."""
    found = []
    for given, dtype, head_dim, causal, seqlen in itertools.product(
        options.heads or [None],
        options.dtype,
        options.head_dim,
        CAUSAL[options.causal],
        options.seqlen,
    ):
        heads = given or options.hidden // head_dim
        batch = max(1, options.batch_tokens // seqlen)
        heads_kv = options.heads_kv or heads
        found.append(Problem(dtype, head_dim, batch, seqlen, heads, heads_kv, causal))
    return found


def run_once(options: argparse.Namespace) -> None:
    """Each call once and nothing else on the GPU but the inputs."""
    harness.require_gpu("attention")
    import torch

    for problem, name in itertools.product(problems(options), options.providers):
        call = Call(PROVIDERS[name], data.of_problem(problem), problem.causal)
        for direction in PASSES[options.direction]:
            call.forward() if direction == "fwd" else call.backward()
        torch.cuda.synchronize()


def measure(run: harness.Run, direction: str, problem: Problem, names: Sequence[str]) -> None:
    """Add a row for each provider that can do this pass and does it right."""
    tensors = data.of_problem(problem)
    check = Check(problem, tensors)

    def checked_call(name: str) -> Callable[[], Any]:
        call = Call(PROVIDERS[name], tensors, problem.causal)
        check(call, direction)
        return call.forward if direction == "fwd" else call.backward

    def row_of(name: str, ms: float) -> Row:
        tflops = problem.flops(direction) / ms / 1e9
        row = problem.row(impl=name, ms=round(ms, 5), tflops=round(tflops, 2))
        return {"op": "attention", "pass": direction, **row}

    run.compare(f"{direction} {problem}", names, checked_call, row_of)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.once:
        run_once(options)
        return 0
    from bench.lib.timing import PROTOCOL

    run = harness.Run("attention", PROTOCOL, arguments, options)
    cells = itertools.product(PASSES[options.direction], problems(options))
    for direction, problem in run.each(cells):
        measure(run, direction, problem, options.providers)
    run.draw(draw)
    table = attention_table(run.rows, run.fields["matmul_tflops"])
    return run.finish(table, *geometric_means(run.rows))
