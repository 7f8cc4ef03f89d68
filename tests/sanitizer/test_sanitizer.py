"""compute-sanitizer on a small case of each kernel (GPU only, where the tool is installed).

The programs are `sanitized_attention.py` and its neighbours.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import each, each_library
from places import PYTHONPATH

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
BESIDE = "norm|partials|diffusion|linear|mlp|rotary|vector|naive|fused|embedding|cache|sample"
BESIDE += "|flash_decode|dropout_add|gate"
TOOLS = pytest.mark.parametrize("tool", ["memcheck", "racecheck"])


@pytest.mark.no_backend
@each_library(library="cupy", device="cuda")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sanitizer_of_transformer_blocks(target, dtype, record_property):
    """Not racecheck: it does not see that __syncwarp() orders a warp's reads of a tile before the
    arrival of its first lane, and so reports every copy into a tile of the ring (bench/notes).
    """
    name = f"transformer {dtype}"
    sanitize("sanitized_blocks.py", (dtype,), "memcheck", name, "kns=decode", record_property)


@each_library(library="cupy", device="cuda")
@TOOLS
def test_sanitizer_beside_attention(target, tool, record_property):
    program, kernels = "sanitized_operations.py", f"regex={BESIDE}"
    sanitize(program, ("float16",), tool, "norms", kernels, record_property)


@each_library(library="cupy", device="cuda")
@TOOLS
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sanitizer_of_caches(target, dtype, tool, record_property):
    if dtype not in target.dtypes:
        pytest.skip(f"the forced backend does not compute {dtype}")
    program, kernels = "sanitized_caches.py", "regex=flash|cache|head_norm|rows|sequence_maps"
    sanitize(program, (dtype,), tool, f"caches {dtype}", kernels, record_property)


@each(library="cupy", device="cuda")
@TOOLS
def test_sanitizer(target, tool, record_property):
    given, kernels = (target.backend, target.dtypes[-1]), "regex=flash|sequence_maps|fp16x3"
    sanitize("sanitized_attention.py", given, tool, target.backend, kernels, record_property)


@each(library="torch", device="cuda")
@TOOLS
def test_sanitizer_of_texts(target, tool, record_property):
    given, kernels = (target.backend, target.dtypes[-1]), "regex=flash|mask|fp16x3|round_sums"
    name = f"texts {target.backend}"
    sanitize("sanitized_texts.py", given, tool, name, kernels, record_property)


def sanitize(program, arguments, tool, name, kernels, record_property):
    """Run a program under the tool; the report gets the result under this name.

    Neither CuPy nor torch keeps memory in a pool, so each array is an allocation of its own, whose
    end memcheck knows.
    """
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    run = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    paths = os.pathsep.join(filter(None, (PYTHONPATH, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run(run, check=True, env=environment)  # compiles outside of the tool
    options = ["--tool", tool, "--error-exitcode", "99", "--kernel-name", kernels]
    done = subprocess.run(
        [SANITIZER, *options, *run],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    result = "clean" if done.returncode == 0 else f"exit code {done.returncode}"
    record_property("sanitizer", f"{tool} {name}: {result}")
    assert result == "clean", done.stdout[-5000:]
