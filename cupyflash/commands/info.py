"""``cupyflash info``: what this machine has, what it lacks, and what mends that."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import cupyflash

from .. import jit, machine
from ..attention import backends


def show() -> int:
    """Print the facts; exit code 0, also where only the CPU can be used."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts():
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Rows (name, value) of the table; a name is empty where it continues the row above."""
    yield "cupyflash", f"{cupyflash.__version__} in {Path(__file__).resolve().parent}"
    yield from _named("GPU", _gpus())
    yield from _named("kernels", _kernels())
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    packages = (f"{name} {version}" for name, version in machine.versions().items())
    yield "packages", ", ".join(packages)
    yield "cache", _cache()
    yield from _named("settings", [f"{name}={x}" for name, x in machine.settings().items()])
    yield from _named("missing", _missing())


def _named(name: str, values: list[str]) -> Iterator[tuple[str, str]]:
    for value in values:
        yield name, value
        name = ""


def _gpus() -> list[str]:
    driver = machine.driver()
    if not driver.gpus:
        return ["none; attention runs on the CPU, with NumPy"]
    lines = [
        f"{gpu.name}, {jit.arch_of(gpu.capability)}, {gpu.memory / 2**30:.0f} GiB"
        for gpu in driver.gpus
    ]
    return [*lines, f"the driver runs CUDA {driver.cuda[0]}.{driver.cuda[1]}"]


def _kernels() -> list[str]:
    """The backends of the first GPU, or of all GPUs where there is none."""
    gpus = machine.driver().gpus
    if gpus:
        found = machine.backend_dtypes(gpus[0].capability)
        return [f"{name}: {', '.join(dtypes)}" for name, dtypes in found.items() if dtypes]
    lines = []
    for name in backends.BACKENDS:
        found = machine.backend_capabilities(name)
        dtypes = ", ".join(machine.backend_dtypes(found[-1])[name])
        younger = "≥ " if len(found) > 1 else ""
        major, minor = found[0]
        lines.append(f"{name}: {dtypes} on compute capability {younger}{major}.{minor}")
    return lines


def _cache() -> str:
    try:
        count, size = machine.cache_size()
    except (jit.UnsafeCacheError, OSError) as error:
        return f"not usable: {error}"
    folder = jit.cache_dir() or "none: you have no home folder"
    if os.path.isfile(folder):
        return f"not usable: {folder} is a file; set CUPYFLASH_CACHE_DIR to a folder"
    return f"{folder} ({count} kernels, {size / 2**20:.1f} MiB)"


def _missing() -> list[str]:
    missing = []
    if problem := machine.gpu_problem():
        missing += [f"a GPU to run on: {problem}", *(f"to mend: {x}" for x in machine.mend())]
    if machine.has("cupy") and not machine.has("ml_dtypes"):
        missing += ["bfloat16 in CuPy arrays", "to mend: pip install ml_dtypes"]
    return missing
