"""Peak extra GPU memory of attention at 512 to 65536 tokens, beside what is predicted.

    python -m bench memory

Extra is what is allocated at the worst moment of a pass beyond what was there before it. The
forward runs under autograd: it leaves out and LSE. The backward leaves dq, dk, dv and needs a
float32 dQ accumulator, and the LSE and delta of each row in float32. All of it grows as seqlen.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from bench.attention.lengths import draw_memory as draw
from bench.lib import data, harness, report
from bench.lib.providers import PROVIDERS, Call, is_ours
from bench.lib.report import Row
from cupyflash.runtime.structs import header
from cupyflash.testing.problem import Problem

structs = header("attention/params.cuh")

SEQLENS = [512 * 2**i for i in range(8)]
DEFAULT_PROVIDERS = ["cupyflash", "sdpa-flash", "sdpa-cudnn", "sdpa-math"]
HIDDEN = 2048
MIB = 2**20
PROTOCOL = (
    "bytes: torch.cuda.max_memory_allocated in the pass minus memory_allocated before it; "
    "predicted_bytes: out and lse; dq, dk, dv, the float32 dQ accumulator, lse_log2 and delta"
)


def predicted_bytes(problem: Problem, direction: str) -> int:
    """Bytes cupyflash allocates in a pass: its results and the backward's accumulators."""
    itemsize = 4 if problem.dtype == "float32" else 2
    rows = problem.batch * problem.heads * problem.seqlen
    key_rows = problem.batch * problem.heads_kv * problem.seqlen
    if direction == "fwd":
        return rows * problem.head_dim * itemsize + rows * 4
    padded = -(-problem.seqlen // structs.ACCUM_ROW_ALIGN) * structs.ACCUM_ROW_ALIGN
    accum_rows = problem.batch * problem.heads * padded
    gradients = (rows + 2 * key_rows) * problem.head_dim * itemsize
    return gradients + accum_rows * (problem.head_dim + 2) * 4


def peak_extra(run: Callable[[], Any]) -> int:
    """Bytes allocated at the worst moment of ``run`` beyond those before it."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del results
    return peak - before


def measure(problem: Problem, name: str) -> dict[str, int]:
    """Bytes by pass; the graph and its output stay alive between the passes, as in training."""
    call = Call(PROVIDERS[name], data.of_problem(problem), problem.causal)
    return {"fwd": peak_extra(lambda: call.graph), "bwd": peak_extra(call.backward)}


def usable(names: Sequence[str], head_dim: int, notes: harness.Notes) -> list[str]:
    """The providers that run here; libraries keep a workspace from this first call on."""
    found = []
    for name in names:
        try:
            measure(shape(256, head_dim), name)
            found.append(name)
        except Exception as error:  # whatever a library raises where it cannot do this
            notes.left_out(name, error, "the start")
    return found


def shape(seqlen: int, head_dim: int) -> Problem:
    heads = HIDDEN // head_dim
    return Problem("bfloat16", head_dim, 1, seqlen, heads, heads, True)


def rows_of(problem: Problem, name: str) -> list[Row]:
    """A row for each pass; none where it does not fit."""
    import torch

    try:
        measured = measure(problem, name)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return []
    rows = []
    for direction, count in measured.items():
        predicted = (
            {"predicted_bytes": predicted_bytes(problem, direction)} if is_ours(name) else {}
        )
        row = problem.row(impl=name, bytes=count, **predicted)
        rows.append({"op": "memory", "pass": direction, **row})
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("memory", __doc__, repeats=None, output=False)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=DEFAULT_PROVIDERS)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args(arguments)
    run = harness.Run("memory", PROTOCOL, arguments, options, timed=False)
    figures = ("fwd MiB", "predicted", "bwd MiB", "predicted")
    table = report.new_table("tokens", "provider", right=figures)
    names = usable(options.providers, options.head_dim, run.notes)
    for seqlen, name in run.each(itertools.product(SEQLENS, names)):
        new = rows_of(shape(seqlen, options.head_dim), name)
        columns = [row.get(key) for row in new for key in ("bytes", "predicted_bytes")]
        texts = ["" if count is None else f"{count / MIB:.1f}" for count in columns]
        table.add_row(f"{seqlen}", name, *(texts or ["does not fit"]))
        run.rows += new
    run.draw(draw)
    return run.finish(table)
