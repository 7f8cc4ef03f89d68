"""Hardware counters: a script runs itself below ncu (Nsight Compute), once for all its calls.

ncu may need rights that a user does not have; then there are no figures, and none are made up.
"""

import contextlib
import csv
import dataclasses
import glob
import io
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

DRAM_BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TIMEOUT = 600
# Where installers put ncu without adding it to PATH.
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
NOT_INSTALLED = (
    "ncu is not installed; it is part of the CUDA toolkit and of Nsight Compute "
    "(https://developer.nvidia.com/nsight-compute), and must be on PATH"
)
# What ncu prints, and what the user can do about it.
ADVICE = {
    "ERR_NVGPUCTRPERM": "the driver lets only administrators read the counters: run as root (a "
    "container needs --cap-add SYS_ADMIN), or load the module nvidia with "
    "NVreg_RestrictProfilingToAdminUsers=0, see https://developer.nvidia.com/ERR_NVGPUCTRPERM",
    "LibraryNotLoaded": "the machine does not give its counters to programs (a sandbox such as "
    "gVisor hides them); run on another one",
    "ERR_NVGPUCTRRESOURCE": "another profiler (DCGM, a second ncu) holds the counters; stop it, "
    "with DCGM `dcgmi profile --pause`",
}


@dataclasses.dataclass(frozen=True)
class Counted:
    """The counters of one launch.

    Attributes:
        name: of the kernel, mangled.
        values: the metrics that ncu could read, in base units (bytes, nanoseconds, percent).
    """

    name: str
    values: dict[str, float]


def find_ncu() -> str | None:
    """The path of ncu: on PATH, or else the newest of `PLACES`."""
    return shutil.which("ncu") or max(itertools.chain(*map(glob.glob, PLACES)), default=None)


def available(metrics: Iterable[str]) -> list[str]:
    """Those of the metrics that this ncu knows for this GPU.

    Raises:
        RuntimeError: there is no ncu.
    """
    ncu = find_ncu()
    if ncu is None:
        raise RuntimeError(NOT_INSTALLED)
    listed = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=60)
    known = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    # Those of a launch ("launch__registers_per_thread") are not listed, and have no suffix.
    return [x for x in metrics if x.partition(".")[0] in known or x.startswith("launch__")]


def output_of(script: str, arguments: Sequence[str], metrics: Sequence[str]) -> str:
    """The output of ``python -m bench script arguments`` and of ncu around it.

    Raises:
        RuntimeError: there is no ncu, or it failed; says what to do where that is known.
    """
    ncu = find_ncu()
    if ncu is None:
        raise RuntimeError(NOT_INSTALLED)
    command = [
        ncu, "--metrics", ",".join(metrics), "--csv", "--print-units", "base",
        "--print-kernel-base", "mangled", "--clock-control", "none",
        "--profile-from-start", "off", "--target-processes", "all",
        sys.executable, "-m", "bench", script, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    both = done.stdout + done.stderr
    for sign, advice in ADVICE.items():
        if sign in both:
            raise RuntimeError(f"ncu failed ({sign}): {advice}")
    if done.returncode:
        text = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise RuntimeError(f"ncu failed: {text[-1]}")
    return done.stdout


def launches_of(text: str) -> list[Counted]:
    """The launches in the output of ncu with ``--csv``, in their order.

    Raises:
        RuntimeError: nothing was measured, or bytes in another unit.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RuntimeError("ncu measured nothing")
    table = "\n".join(line for line in lines[first:] if line.startswith('"'))
    launches = []
    for _, rows in itertools.groupby(csv.DictReader(io.StringIO(table)), lambda row: row["ID"]):
        rows = list(rows)
        if wrong := {x["Metric Unit"] for x in rows if "bytes" in x["Metric Name"]} - {"byte"}:
            raise RuntimeError(f"ncu measured no bytes, got units {sorted(wrong)}")
        values = {x["Metric Name"]: _number(x["Metric Value"]) for x in rows}
        values = {name: value for name, value in values.items() if value is not None}
        launches.append(Counted(rows[0]["Kernel Name"], values))
    return launches


def _number(text: str) -> float | None:
    """A value with commas between thousands; None for "n/a" of what ncu could not read."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def dram_bytes(launches: Sequence[Counted]) -> float:
    """The bytes that they read from and write to the memory of the GPU."""
    return sum(launch.values[name] for launch in launches for name in DRAM_BYTES)


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Context whose launches ncu measures."""
    import cupy

    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.start()
    yield
    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.stop()
