"""A kernel of three files that compiles in milliseconds, for the tests of cupyflash.jit."""

import contextlib
import ctypes
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import PYTHONPATH

from cupyflash import environment
from cupyflash.jit import builder, cache, compiler, sources
from cupyflash.runtime.config import KernelConfig

FILES = {
    "tiny/scale.cu": (
        '#include "../common/scale.cuh"\n'
        "template <typename T, int FACTOR>\n"
        "__global__ void scale(const __grid_constant__ ScaleParams params) {\n"
        "  params.x[threadIdx.x] = scaled<FACTOR>(params.x[threadIdx.x]);\n"
        "}\n"
    ),
    "common/scale.cuh": (
        '#pragma once\n#include "common/offset.cuh"\n'
        "struct ScaleParams {\n  float* x;\n  int n;\n};\n"
        "template <int FACTOR>\nfloat scaled(float x) {\n  return FACTOR * x + OFFSET;\n}\n"
    ),
    "common/offset.cuh": "#pragma once\nconstexpr float OFFSET = 1.0f;\n",
}


# Also runs in the worker processes that the script starts.
HEADER = """
import sys
from pathlib import Path
from cupyflash.jit import sources
sources.root = lambda: Path(__file__).parent / "cuda_src"
"""


class ScaleParams(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("n", ctypes.c_int)]


@dataclasses.dataclass(frozen=True)
class Scale(KernelConfig):
    source = "tiny/scale.cu"
    params = ScaleParams

    dtype: str = "float32"
    factor: int = 2
    smem_bytes = 65536


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Sources in folder/cuda_src, cache in folder/cache, no memory of earlier kernels."""
    for name, text in FILES.items():
        path = folder / "cuda_src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        patch.setattr(sources, "root", lambda: folder / "cuda_src")
        patch.setattr(cache, "_private", None)
        patch.setattr(builder, "_functions", {})
        plain = environment.Environment(cache_dir=folder / "cache")
        with environment.override(**dataclasses.asdict(plain)):
            yield folder


def record_compilations(
    monkeypatch: pytest.MonkeyPatch, change: Callable = lambda compiled: compiled
) -> list[tuple[KernelConfig, str]]:
    """The list to which each compilation appends its configuration and architecture.

    Args:
        change: is called with what the compiler gives, and returns what it seems to give.
    """
    calls, compile_kernel = [], compiler.compile_kernel

    def recording(config, target):
        calls.append((config, target))
        return change(compile_kernel(config, target))

    monkeypatch.setattr(compiler, "compile_kernel", recording)
    return calls


def start_python(code: str, folder: Path, *arguments: str) -> subprocess.Popen:
    """Start a script in a fresh interpreter, with the sources and the cache of ``folder``."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=folder, delete=False) as script:
        script.write(HEADER + code)
    variables = {
        "PYTHONPATH": PYTHONPATH,
        "CUPYFLASH_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
    }
    return subprocess.Popen(
        (sys.executable, script.name, *arguments),
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(code: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """`start_python` and wait: exit status, output, error output."""
    process = start_python(code, folder, *arguments)
    output, error = process.communicate(timeout=120)
    return process.returncode, output, error


def has_nvrtc() -> bool:
    try:
        compiler.nvrtc()
    except ImportError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs CuPy and NVRTC")
