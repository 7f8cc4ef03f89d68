"""Attention over the tokens of several GPUs, as a share of as many times the rate of one.

Each row has the time of the slowest GPU, host time included, and its share: the time of one GPU
with as much work (all tokens, and its part of the heads) over it. The processes are started here;
the results are written after every row, and what there is no time for is left out.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import Any

from bench.lib import data, harness, report
from bench.parallel.problems import CASES

PROTOCOL = (
    "host clock between two synchronisations, after a barrier, slowest rank, calls in a row of "
    "50 ms or one longer call, median of at most {repeats} rows, {dtype}; results of {checked} "
    "tokens a GPU checked first, beside float64 and one process"
)
SLACK = 60.0  # seconds that ranks may take to end after `--seconds`


def main(arguments: Sequence[str]) -> int:
    from bench.parallel.providers import PROVIDERS

    parser = harness.parser("parallel", __doc__, repeats=7, impls=PROVIDERS)
    add = parser.add_argument
    add("--gpus", type=int, help="default: all")
    add("--tokens", type=int, nargs="+", help="only these, of each GPU")
    add("--only", nargs="+", choices=("causal", "packed", "window"), help="only these cases")
    add("--dtype", choices=harness.DTYPES, default="bfloat16")
    add("--checked", type=int, default=1024, help="tokens of a GPU in the check of results")
    add("--seconds", type=float, default=420.0, help="after which nothing new begins")
    options = parser.parse_args(arguments)
    run = harness.Run("parallel", PROTOCOL, arguments, options, timed=False)
    import torch

    from bench.parallel.measure import Settings

    gpus = options.gpus or torch.cuda.device_count()
    cases = tuple(
        case for case in CASES
        if (options.tokens is None or case.tokens in options.tokens)
        and (options.only is None or case.kind.split()[0] in options.only)
    )  # fmt: skip
    settings = Settings(
        data.DEVICE, getattr(torch, options.dtype), cases, tuple(options.impls), options.repeats,
        options.checked, options.seconds,
    )  # fmt: skip
    run.fields["gpus"] = gpus
    status = _collect(run, gpus, settings)
    return run.finish(table(run.rows)) or status


def _collect(run: harness.Run, gpus: int, settings: Any) -> int:
    """Starts the ranks and writes what they find; 1 if any of them failed."""
    from bench.parallel import measure

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        processes = [
            context.Process(target=measure.run, args=(rank, gpus, settings, store, queue))
            for rank in range(gpus)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + settings.seconds + SLACK
        ended = False
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
            process.join(5.0)
            process.kill()
    return int(not ended)


def table(rows: list[dict[str, Any]]) -> Any:
    """One line a row; the share in bold where it is ours."""
    found = report.new_table(
        "problem", "pass", "impl", right=("ms", "TFLOP/s a GPU", "% of one GPU")
    )
    previous = None
    for row in rows:
        problem = row["problem"] if row["problem"] != previous else ""
        previous = row["problem"]
        found.add_row(
            problem, row["pass"], row["impl"], f"{row['ms']:.3f}", f"{row['tflops']:.0f}",
            f"{100 * row['share']:.1f}", style="bold" if report.is_ours(row["impl"]) else "",
        )  # fmt: skip
    return found
