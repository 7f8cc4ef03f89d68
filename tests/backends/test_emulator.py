"""Kernels, emulated on the CPU: the one test of their results that needs no GPU."""

import os
import subprocess
import sys

import pytest
from emulator import COMPILER
from places import PYTHONPATH, SUPPORT
from targets import has


@pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")
def test_calls(emulated_kernels):
    """In a process that takes itself for one with a Hopper GPU, of whatever GPU and backend."""
    variables = {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""}
    variables["CUPYFLASH_BACKEND"] = ""
    command = [sys.executable, str(SUPPORT / "emulated_calls.py"), str(emulated_kernels)]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=500
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
