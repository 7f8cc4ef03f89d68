"""Every public function under torch.compile, in processes of their own: see compiled_calls.py.

Nothing of another test (plans, compiled kernels, an order of imports) helps them. On a GPU each
function has its own process; with a forced backend, those that compute attention or products. On a
CPU, where a process mostly imports torch, one runs all of them in an order, and so with a first
one, that changes from day to day; where there is no GPU, half of them.
"""

import ast
import datetime
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import each_marked
from places import PYTHONPATH, ROOT, SUPPORT
from targets import GPU_TARGETS, compute_capability, few

pytest.importorskip("torch")

import compiled_calls
import torch

import cupyflash

NAMES = sorted(compiled_calls.CALLS)
NO_BACKEND = {
    *("BlockStack", "DiffusionSampler", "beta_schedule", "cache_append", "flash_attn_combine"),
    *("group_norm", "group_norm_backward", "index_first_axis", "layer_norm", "layer_norm_backward"),
    *("pad_input", "rms_norm", "rms_norm_backward", "timestep_embeddings", "transformer_block"),
    "unpad_input",
}
SEED = datetime.date.today().toordinal()
ON_GPU = torch.cuda.is_available() and compute_capability()[0] > 0


def run(device, *names):
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "compiled_calls.py"), device, *names],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.split() == list(names)


def test_every_public_function_is_called():
    public = set(compiled_calls.PUBLIC)
    assert public - compiled_calls.NOT_CALLED == set(NAMES)


# With CuPy first, as in the process of these tests, test_torch_compile.py traces them.
ORDERS = {
    "torch first": ("import torch", "from cupyflash import attention"),
    "torch last": ("from cupyflash import attention", "import torch"),
}


@pytest.mark.no_backend
@pytest.mark.parametrize("order", ORDERS)
def test_traced_again_after_cupy_is_imported(order):
    """CuPy leaves modules behind that are loaded when something reads them.

    The first call of the process is compiled, with its gradient.
    """
    lines = (
        *ORDERS[order],
        "graph = torch.compile(attention, fullgraph=True, backend='aot_eager', dynamic=False)",
        "q = torch.nn.Parameter(torch.ones(1, 2, 1, 8))",
        "graph(q, q, q).sum().backward()",
        "assert q.grad.sum() == 16",
        "import cupy",  # as the first launch on a GPU does
        "q = torch.nn.Parameter(torch.ones(1, 3, 1, 8))",
        "graph(q, q, q).sum().backward()",
        "assert q.grad.sum() == 24",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


# These are not called by code that torch.compile traces.
READ_SYS_MODULES = {
    "integrations/transformers_models.py",
    "jit/compiler.py",
    "runtime/loaded.py",
    "runtime/tuning.py",
}


def test_traced_code_does_not_read_sys_modules():
    root = Path(cupyflash.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.ImportFrom)
        and ast.unparse(node) in ("sys.modules", "from sys import modules")
    }
    assert found == READ_SYS_MODULES


@pytest.mark.no_backend
def test_on_a_cpu_in_any_order():
    names = random.Random(SEED).sample(NAMES, len(NAMES))
    run("cpu", *names[:: 2 if few() else 1])


@pytest.mark.parametrize("name", each_marked(NAMES, NO_BACKEND))
def test_on_a_gpu_in_its_own_process(name):
    if not ON_GPU:
        pytest.skip(GPU_TARGETS[0].missing or "torch sees no GPU")
    run("cuda", name)
