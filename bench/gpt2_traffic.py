"""HBM traffic from the hardware counters: the script runs itself below ncu.

ncu may need rights that a user does not have; then there are no figures, and none are made up.
"""

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TIMEOUT = 600


def bytes_of(module: str, arguments: Sequence[str]) -> float:
    """Bytes read and written by the kernels that ``python -m module arguments`` profiles.

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


def parse(text: str) -> float:
    """The sum of `METRICS` over all kernels in ncu's output with ``--csv --print-units base``.

    Raises:
        RuntimeError: there are none.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RuntimeError("ncu measured nothing")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[first:]))))
    found = [row for row in rows if row.get("Metric Name") in METRICS]
    wrong = {row["Metric Unit"] for row in found} - {"byte"}
    if not found or wrong:
        raise RuntimeError(f"ncu measured no bytes, got units {sorted(wrong)}")
    return sum(float(row["Metric Value"].replace(",", "")) for row in found)


def profiled(call: Any) -> None:
    """Run once to compile, then once between the marks that ncu looks for."""
    import cupy

    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.start()
    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.stop()
