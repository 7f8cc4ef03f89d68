"""Every public function under torch.compile, in processes of their own: see compiled_calls.py.

Nothing of another test (plans, compiled kernels, an order of imports) helps them. On a GPU each
function has its own process. On a CPU, where a process mostly imports torch, a sample that changes
from day to day has, and one process runs all of them in an order that changes as well.
"""

import datetime
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from targets import GPU_TARGETS, compute_capability

pytest.importorskip("torch")

import compiled_calls
import torch

TESTS = Path(__file__).resolve().parent
NAMES = sorted(compiled_calls.CALLS)
SEED = datetime.date.today().toordinal()
SAMPLE = random.Random(SEED).sample(NAMES, 2)
ON_GPU = torch.cuda.is_available() and compute_capability()[0] > 0


def run(device, *names):
    variables = {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    done = subprocess.run(
        [sys.executable, str(TESTS / "compiled_calls.py"), device, *names],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.split() == list(names)


def test_every_public_function_is_called():
    public = set(compiled_calls.PUBLIC)
    assert public - compiled_calls.NOT_CALLED == set(NAMES)


@pytest.mark.parametrize("name", SAMPLE)
def test_on_a_cpu_in_its_own_process(name):
    run("cpu", name)


def test_on_a_cpu_in_any_order():
    run("cpu", *random.Random(SEED).sample(NAMES, len(NAMES)))


@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_in_its_own_process(name):
    if not ON_GPU:
        pytest.skip(GPU_TARGETS[0].missing or "torch sees no GPU")
    run("cuda", name)
