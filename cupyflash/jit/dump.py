"""CUPYFLASH_DUMP: ``kernel.ptx`` and ``kernel.sass`` beside the cubin."""

import importlib.util
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path

from .. import environment
from . import compiler
from .entry import Built
from .kernel import Kernel

_DISASSEMBLERS = {"nvdisasm": ("-c", "-g"), "cuobjdump": ("-sass",)}


def write(kinds: Sequence[str], built: Built, config: Kernel) -> None:
    """Write the files of ``kinds`` that are not there yet; a warning for each that cannot be."""
    makers = {"ptx": _ptx, "sass": _sass}
    for kind in kinds:
        path = built.path.with_suffix(f".{kind}")
        try:
            if not path.exists():
                path.write_bytes(makers[kind](built, config))
        except (OSError, subprocess.CalledProcessError) as error:
            warnings.warn(f"cupyflash: no {path}: {error}", RuntimeWarning, stacklevel=2)


def _ptx(built: Built, config: Kernel) -> bytes:
    # The cache keeps no PTX, which is larger than the cubin: compile once more.
    if environment.current().no_jit:
        raise PermissionError("it takes a compilation, which CUPYFLASH_NO_JIT forbids")
    return compiler.compile_kernel(config, built.arch).ptx


def _sass(built: Built, config: Kernel) -> bytes:
    for name, options in _DISASSEMBLERS.items():
        if tool := _find(name):
            command = (tool, *options, str(built.path))
            return subprocess.run(command, check=True, capture_output=True).stdout
    raise FileNotFoundError(
        "SASS needs nvdisasm or cuobjdump on PATH, or the triton package, which brings them"
    )


def _find(name: str) -> str | None:
    if tool := shutil.which(name):
        return tool
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    return shutil.which(name, path=str(Path(triton.origin).parent / "backends/nvidia/bin"))
