"""Attention beside its peers: check, then time all providers on the same tensors.

    python -m bench.attention --head-dim 64 128 --seqlen 4096 16384 --output attention

The protocol is `bench.timing.PROTOCOL`; bench/README.md explains it. A provider that is missing,
cannot do a shape or fails the check is left out with a note. Exit status 1 if cupyflash failed the
check anywhere.
"""

import argparse
import itertools
import sys
import warnings
from collections.abc import Sequence

from bench.bars import add_bars, bar_lines
from bench.problem import DTYPES, Problem
from bench.providers import PROVIDERS, Call, is_ours
from bench.report import (
    attention_table,
    command_line,
    console,
    geometric_means,
    machine_fields,
    write_results,
)

PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}
CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}
SEQLENS = [512, 1024, 2048, 4096, 8192, 16384]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    add("--seqlen", type=int, nargs="+", default=SEQLENS)
    add("--batch-tokens", type=int, default=16384, help="batch = this / seqlen, at least 1")
    add("--hidden", type=int, default=2048, help="heads = this / head_dim, without --heads")
    add("--heads", type=int, help="query heads")
    add("--heads-kv", type=int, help="key and value heads, as many as query heads if not given")
    add("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    add("--causal", choices=CAUSAL, default="both")
    add("--pass", dest="direction", choices=PASSES, default="both")
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    add("--repeats", type=int, default=30)
    add("--output", metavar="NAME", default="attention", help="bench/results/NAME.json")
    add("--once", action="store_true", help="run each call once, untimed, for a profiler")
    return parser.parse_args(arguments)


def problems(options: argparse.Namespace) -> list[Problem]:
    """Every dtype x head dim x causal x seqlen, in this order."""
    found = []
    for dtype, head_dim, causal, seqlen in itertools.product(
        options.dtype, options.head_dim, CAUSAL[options.causal], options.seqlen
    ):
        heads = options.heads or options.hidden // head_dim
        batch = max(1, options.batch_tokens // seqlen)
        heads_kv = options.heads_kv or heads
        found.append(Problem(dtype, head_dim, batch, seqlen, heads, heads_kv, causal))
    return found


def run_once(options: argparse.Namespace) -> None:
    """Each call once and nothing else on the GPU but the inputs."""
    import torch

    for problem, name in itertools.product(problems(options), options.providers):
        call = Call(PROVIDERS[name], problem.tensors(), problem.causal)
        for direction in PASSES[options.direction]:
            call.forward() if direction == "fwd" else call.backward()
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    if options.once:
        run_once(options)
        return 0
    from rich.progress import track

    from bench.measure import Notes, measure
    from bench.timing import PROTOCOL, Timer

    out, timer, rows = console(), Timer(options.repeats), []
    notes = Notes(out)
    fields = {**machine_fields(), **timer.ceilings()}
    versions = ", ".join(f"{name} {version}" for name, version in fields["versions"].items())
    out.print(f"{fields['gpu']}: {versions}")
    out.print(f"matmul {fields['matmul_tflops']} TFLOP/s, copy {fields['copy_gbps']} GB/s")
    command = command_line("bench.attention", arguments)
    warnings.simplefilter("ignore")  # SDPA warns once for each backend that cannot do a shape
    cells = list(itertools.product(PASSES[options.direction], problems(options)))
    for direction, problem in track(cells, "attention", console=out):
        rows += measure(problem, direction, options.providers, timer, notes)
        add_bars(rows, fields["gpu"])
        # After every cell, so that a run that is cut short leaves what it measured.
        protocol = PROTOCOL.format(repeats=options.repeats)
        path = write_results(options.output, rows, protocol, command, **fields)
    out.print(attention_table(rows, fields["matmul_tflops"]))
    for line in (*geometric_means(rows), *bar_lines(rows)):
        out.print(line, soft_wrap=True)
    out.print(f"wrote {path}")
    return int(any(map(is_ours, notes.wrong)))


if __name__ == "__main__":
    sys.exit(main())
