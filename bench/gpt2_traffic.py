"""HBM traffic from the hardware counters: the script runs itself below ncu, once for all calls.

ncu may need rights that a user does not have; then there are no figures, and none are made up.
"""

import csv
import io
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TIMEOUT = 600
MARK = "vector_add"  # the kernel that follows each call
LABEL = "profiled: "


def bytes_of(module: str, arguments: Sequence[str]) -> dict[str, float]:
    """Bytes read and written by each call that ``python -m module arguments`` gives to `profile`.

    Raises:
        RuntimeError: no ncu, or it measured nothing.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu is not installed")
    command = [
        ncu, "--metrics", ",".join(METRICS), "--csv", "--print-units", "base",
        "--profile-from-start", "off", "--target-processes", "all",
        sys.executable, "-m", module, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        text = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise RuntimeError(f"ncu failed: {text[-1]}")
    return parse(done.stdout)


def parse(text: str) -> dict[str, float]:
    """The sum of `METRICS` of each call in ncu's output with ``--csv --print-units base``.

    Raises:
        RuntimeError: nothing was measured, or not what `profile` announced.
    """
    lines = text.splitlines()
    labels = [line[len(LABEL) :] for line in lines if line.startswith(LABEL)]
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RuntimeError("ncu measured nothing")
    table = "\n".join(line for line in lines[first:] if line.startswith('"'))
    rows = [x for x in csv.DictReader(io.StringIO(table)) if x["Metric Name"] in METRICS]
    if wrong := {row["Metric Unit"] for row in rows} - {"byte"}:
        raise RuntimeError(f"ncu measured no bytes, got units {sorted(wrong)}")
    between = itertools.groupby(rows, lambda row: MARK in row["Kernel Name"])
    sums = [
        sum(float(row["Metric Value"].replace(",", "")) for row in kernels)
        for is_mark, kernels in between
        if not is_mark
    ]
    if len(sums) != len(labels):
        raise RuntimeError(f"ncu saw {len(sums)} calls, expected {len(labels)}")
    return dict(zip(labels, sums))


def profile(calls: Mapping[str, Callable[[], Any]]) -> None:
    """Run each once to compile, then once for ncu, with `MARK` behind it."""
    import cupy

    from cupyflash.baselines.baselines import vector_add

    zeros = cupy.zeros(1, "float32")
    vector_add(zeros, zeros)
    for label, call in calls.items():
        call()
        cupy.cuda.Device().synchronize()
        print(LABEL + label, flush=True)
        cupy.cuda.profiler.start()
        call()
        vector_add(zeros, zeros)
        cupy.cuda.Device().synchronize()
        cupy.cuda.profiler.stop()
