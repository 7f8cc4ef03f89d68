"""Kernels, emulated on the CPU: the one test of their results that needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import COMPILER
from targets import has


@pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")
def test_calls(tmp_path):
    """In a process that takes itself for one with a Hopper GPU, of whatever GPU and backend."""
    script = Path(__file__).with_name("emulated_calls.py")
    paths = map(str, (script.parent, script.parent.parent))
    variables = {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    variables["CUPYFLASH_BACKEND"] = ""
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=500
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
