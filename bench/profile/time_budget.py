"""Where the time of a call goes: Python, launch, waiting, GPU; and what the first call costs.

    python -m bench time_budget

Causal attention of a small, a middle and a large problem, on torch tensors, forward. Then the same
small problem in two fresh processes: with an empty cache of compiled kernels, and with the cache
that the first one left. The results are bench/results/time_budget.json, the picture
time_budget.svg.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.attention.host_time import sample
from bench.lib import data, harness, plots, report
from bench.lib.launches import recorded
from cupyflash.testing.problem import Problem

CALLS, SAMPLES, WALLS = 50, 10, 100
PROTOCOL = (
    f"host: median of {SAMPLES} means of {CALLS} calls, enqueue only; launch: the same of the "
    "launch alone, its arguments at hand; gpu: CUDA events, L2 cold; wall: median "
    f"of {WALLS} calls, each from an idle GPU to the return of the synchronisation; first calls: "
    "one fresh process each, CuPy arrays, CUDA context and CuPy already at work"
)
PARTS = {
    "python": ("Python: look-up, allocation", plots.AMBER),
    "launch": ("launch", plots.RED),
    "waiting": ("start and synchronisation", plots.PALE),
    "gpu": ("GPU at work", plots.BLUE),
}
PROBLEMS = {
    "small": Problem("bfloat16", 128, 1, 128, 16, 16, True),
    "middle": Problem("bfloat16", 128, 1, 4096, 16, 16, True),
    "large": Problem("bfloat16", 128, 1, 16384, 16, 16, True),
}
FIRST_CALL = """
import json, sys, time
import cupy
x = cupy.ones((1, 128, 16, 128), "float16")
cupy.matmul(x[0, :, 0], x[0, :, 0].T)
cupy.cuda.Device().synchronize()
times = [time.perf_counter()]
import cupyflash
times.append(time.perf_counter())
for _ in range(2):
    cupyflash.attention(x, x, x, causal=True)
    cupy.cuda.Device().synchronize()
    times.append(time.perf_counter())
print(json.dumps([1e3 * (b - a) for a, b in zip(times, times[1:])]))
"""


def budget(shape: Problem, timer: Any) -> dict[str, float]:
    """Microseconds of a repeated call: in Python, in the launch, waiting, on the GPU, in all."""
    import torch

    import cupyflash
    from bench.lib.timing import medians
    from cupyflash.runtime.lookup import library_of

    q, k, v, _ = data.of_problem(shape)
    call = functools.partial(cupyflash.attention, q, k, v, causal=True)
    call()
    results, ((launch, params),) = recorded(call)  # `results` holds the memory that it writes
    start = functools.partial(launch.start, library_of(q).stream(0), params)
    clocks = {
        name: functools.partial(sample, run, torch.cuda.synchronize, CALLS)
        for name, run in (("host", call), ("launch", start))
    }
    of_host = medians(clocks, SAMPLES)
    gpu = 1e3 * timer.compare({"call": call})["call"].ms
    wall = medians({"wall": functools.partial(wall_us, call)}, WALLS)["wall"]
    waiting = max(0.0, wall - of_host["host"] - gpu)
    found = {"python": of_host["host"] - of_host["launch"], "launch": of_host["launch"]}
    found |= {"waiting": waiting, "gpu": gpu, "wall": wall}
    return {name: round(us, 2) for name, us in found.items()}


def wall_us(call: Callable[[], Any]) -> float:
    """Microseconds from an idle GPU to the end of the call's work."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin)


def first_calls() -> dict[str, float]:
    """Milliseconds of the first call of all, of that of a later process, and of a second one."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**os.environ, "CUPYFLASH_CACHE_DIR": f"{folder}/kernels"}
        runs = []
        for _ in range(2):
            command = [sys.executable, "-c", FIRST_CALL]
            done = subprocess.run(command, env=settings, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the first call failed: {done.stderr.strip()[-500:]}")
            runs.append(json.loads(done.stdout))
    (_, compiled, _), (imported, loaded, _) = runs
    found = {"import": imported, "compile": compiled, "load": loaded}
    return {name: round(ms, 2) for name, ms in found.items()}


def draw(results: dict[str, Any], path: Path) -> None:
    """The parts of a repeated call, and beside them what a first call costs."""
    rows, first = results["rows"], results["first_call_ms"]
    host = sum(rows[0][part] for part in ("python", "launch"))
    with plots.picture(path, (10, 3.6), 1, 2, width_ratios=(3, 2)) as (figure, axes):
        repeated, firsts = axes[0]
        for place, row in enumerate(rows):
            # With a cold L2, as the GPU is timed, it may take longer than in the call itself.
            of_gpu = min(row["gpu"], row["wall"] - row["python"] - row["launch"])
            row = {**row, "gpu": of_gpu}
            row["waiting"] = row["wall"] - sum(row[x] for x in ("python", "launch", "gpu"))
            left = 0.0
            for part, (_, colour) in PARTS.items():
                share = 100 * row[part] / row["wall"]
                repeated.barh(place, share, 0.55, left, color=colour)
                if share > 6:
                    style = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}
                    repeated.text(left + share / 2, place, time_text(row[part]), **style)
                left += share
        text = "{call}: {seqlen_q} tokens\n{time}"
        names = [text.format(**row, time=time_text(row["wall"])) for row in rows]
        repeated.set_yticks(range(len(rows)), names)
        repeated.set_ylim(len(rows) - 0.5, -0.5)
        repeated.set_xlabel("% of the time of a call that is waited for")
        title = f"A repeated call cost this host about {host:.0f} µs, whatever its size"
        repeated.set_title(title)
        handles = plots.patches(dict(PARTS.values()))
        figure.legend(handles=handles, loc="outside lower left", ncols=4)
        bars = {
            "first call of all:\ncompiles": (first["compile"], plots.PINK),
            "first call of a\nlater process: loads": (first["load"], plots.SKY),
            "every other call:\nlaunches": (host / 1e3, plots.AMBER),
        }
        for place, (ms, colour) in enumerate(bars.values()):
            firsts.barh(place, ms, 0.55, color=colour)
            firsts.text(ms, place, f" {time_text(1e3 * ms)}", ha="left", va="center", fontsize=9)
        firsts.set_xscale("log")
        firsts.set_xlim(0.3 * host / 1e3, 12 * first["compile"])
        firsts.set_yticks(range(len(bars)), list(bars))
        firsts.set_ylim(len(bars) - 0.5, -0.5)
        firsts.set_xticks([])
        firsts.set_xlabel("time, logarithmic")
        firsts.minorticks_off()
        firsts.set_title("Only the very first call compiles")


def time_text(microseconds: float) -> str:
    """A time with two or three digits and its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            value = microseconds / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{microseconds:.1f} µs" if microseconds < 10 else f"{microseconds:.0f} µs"


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("time_budget", __doc__, repeats=20)
    options = parser.parse_args(arguments)
    run = harness.Run("time_budget", PROTOCOL, arguments, options)
    parts = ("python", "launch", "waiting", "gpu", "wall")
    table = report.new_table("call", right=[f"{part} µs" for part in parts])
    for name, shape in PROBLEMS.items():
        found = budget(shape, run.timer)
        run.rows.append(shape.row(call=name, **found))
        table.add_row(f"{name}: {shape}", *(f"{found[part]:.1f}" for part in parts))
    first = run.fields["first_call_ms"] = first_calls()
    run.draw(draw)
    line = "import {import} ms; first call {compile} ms, that of a later process {load} ms"
    return run.finish(table, line.format(**first))
