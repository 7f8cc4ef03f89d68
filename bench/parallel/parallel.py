"""Attention over the tokens of several GPUs, as a share of as many times the rate of one.

Each row has the time of the slowest GPU, host time included, and its share: the time of one GPU
with as much work (all tokens, and its part of the heads) over it. Beside it stand the share that a
model expects, and the peak memory beyond the inputs with what a formula expects. The processes are
started here; the results are written after every row, and what there is no time for is left out.

    python -m bench parallel --gpus 4 2     on four GPUs of a host, then on two of them
"""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import Any

from bench.lib import data, harness, report
from bench.parallel.picture import draw as draw
from bench.parallel.problems import cases

PROTOCOL = (
    "host clock between two synchronisations, after a barrier, slowest rank, calls in a row of "
    "50 ms or one longer call, median of at most {repeats} rows, {dtype}; results of {checked} "
    "tokens a GPU checked first, beside float64 and one process"
)
SLACK = 0.05  # of `--seconds`: nothing begins in it, and what runs may end


def main(arguments: Sequence[str]) -> int:
    from bench.parallel.providers import PROVIDERS

    parser = harness.parser("parallel", __doc__, repeats=7, impls=PROVIDERS)
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", help="numbers of GPUs, one after another; default: all")
    add("--tokens", type=int, nargs="+", help="only these, of each GPU")
    add("--only", nargs="+", choices=("causal", "packed", "window"), help="only these cases")
    add("--dtype", choices=harness.DTYPES, default="bfloat16")
    add("--checked", type=int, default=1024, help="tokens of a GPU in the check of results")
    add("--seconds", type=float, default=470.0, help="after which all has ended")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    run = harness.Run("parallel", PROTOCOL, arguments, options, timed=False)
    import torch

    numbers = options.gpus or [torch.cuda.device_count()]
    run.fields["gpus"] = max(numbers)
    if data.DEVICE == "cuda":
        _warm(options.dtype)
    status = 0
    for left, gpus in zip(range(len(numbers), 0, -1), numbers):
        now = time.monotonic()
        status |= _collect(run, gpus, options, now + (end - now) / left)
    run.draw(draw)
    return run.finish(*tables(run.rows)) or status


def _warm(dtype: str) -> None:
    """Compiles the kernels on all cores, those that the cache lacks, before ranks ask for them."""
    import torch

    import cupyflash
    from cupyflash.jit.compiler import target_arch

    arch = target_arch(torch.cuda.get_device_capability())
    cupyflash.warmup([arch], head_dims=[128], dtypes=[dtype], topics=["transfer"], progress=False)


def _collect(run: harness.Run, gpus: int, options: Any, end: float) -> int:
    """Starts the ranks and writes what they find until the clock shows ``end``; 1 if any failed."""
    import torch

    from bench.parallel import measure

    some = tuple(
        case for case in cases(gpus)
        if (options.tokens is None or case.tokens in options.tokens)
        and (options.only is None or case.kind.split()[0] in options.only)
    )  # fmt: skip
    settings = measure.Settings(
        data.DEVICE, getattr(torch, options.dtype), some, tuple(options.impls), options.repeats,
        options.checked, end - SLACK * options.seconds,
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    queue, ended = context.Queue(), False
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        processes = [
            context.Process(target=measure.run, args=(rank, gpus, settings, store, queue))
            for rank in range(gpus)
        ]
        for process in processes:
            process.start()
        while not ended:
            try:
                kind, content = queue.get(timeout=1.0)
            except Empty:
                if time.monotonic() > end or not all(x.is_alive() for x in processes):
                    run.notes.say("a rank has failed, or there is no time left")
                    break
                continue
            ended = kind == "end"
            if kind == "row":
                run.rows.append(content)
                run.write()
            elif kind == "note":
                name, error, text, where, rank = content
                run.notes.left_out(name, error(f"{text} (rank {rank})"), where)
        for process in processes:
            process.join(5.0 if ended else 0.0)
            process.kill()
    return int(not ended)


def tables(rows: list[dict[str, Any]]) -> list[Any]:
    """The times, ours in bold and with a star where "auto" makes this move; and the memory."""
    right = ("ms", "TFLOP/s", "% of one", "model")
    times = report.new_table("problem", "pass", "impl", right=right)
    memory = report.new_table("problem", "impl", right=("GiB a GPU beyond inputs", "formula"))
    previous = None
    for row in rows:
        problem = f"{row['gpus']} x {row['problem']}"
        model = f"{100 * row['model']:.1f}" if "model" in row else ""
        ours = report.is_ours(row["impl"])
        times.add_row(
            problem if problem != previous else "", row["pass"],
            row["impl"] + "*" * row.get("auto", False), f"{row['ms']:.3f}", f"{row['tflops']:.0f}",
            f"{100 * row['share']:.1f}", model, style="bold" if ours else "",
        )  # fmt: skip
        previous = problem
        if "gib" in row:
            formula = f"{row['formula_gib']:.2f}" if "formula_gib" in row else ""
            memory.add_row(problem, row["impl"], f"{row['gib']:.2f}", formula)
    return [times, memory] if memory.row_count else [times]
