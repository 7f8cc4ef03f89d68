"""What a process with torch imports and what Dynamo traces in it, each case in a fresh one."""

import re
import subprocess
import sys

import pytest
from places import ROOT

pytest.importorskip("torch")


def printed(script):
    """The lines that a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# Modules that take a second to import, and that only torch.compile, export and DTensor need.
SLOW = ("torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp")

FIRST_CALLS = """
import sys
before = set(sys.modules)
import torch
brought = set(sys.modules) - before
import cupyflash

def leaf(*shape):
    return torch.randn(shape, requires_grad=True)

x, weight = leaf(16, 32), leaf(32)
for out in (
    cupyflash.attention(leaf(1, 16, 2, 32), *(leaf(1, 16, 1, 32) for _ in "kv"), causal=True),
    cupyflash.layer_norm(x, weight, leaf(32)),
    cupyflash.rms_norm(x, weight, residual=x)[0],
    cupyflash.group_norm(leaf(2, 32, 9), 4, weight, leaf(32)),
    cupyflash.linear(x, leaf(64, 32), leaf(64), activation="gelu"),
    cupyflash.mlp(x, leaf(64, 32), leaf(32, 64), norm=cupyflash.Norm(weight)),
):
    out.sum().backward()
print(*(name for name in SLOW if name in sys.modules and name not in brought))
"""


def test_first_calls_import_nothing_that_they_do_not_need():
    assert printed(f"SLOW = {SLOW}\n{FIRST_CALLS}") == []


# A function that has no torch operator is called outside of the graphs.
AFTER_A_CALL_WITHOUT_TENSORS = """
import contextlib
import torch
from cupyflash.ops.decode.embedding import embedding

weight = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
tokens = torch.tensor([3, 4], dtype=torch.int32)
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph

def step(tokens):
    return embedding(tokens, weight) + 0

expected = step(tokens)
with contextlib.suppress(TypeError):
    torch.compile(lambda: embedding(None, None), backend=backend)()
found = torch.compile(step, backend=backend)(tokens)
for graph in graphs:
    print(*(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"))
assert torch.equal(found, expected)
"""


def test_nothing_is_traced_after_a_call_without_tensors():
    """Dynamo gives a frame up for good if it is once called without tensors."""
    assert printed(AFTER_A_CALL_WITHOUT_TENSORS) == ["add"]


EXPORTS = """
import cupyflash
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        square = x[0, :, 0]
        out = cupyflash.layer_norm(cupyflash.attention(x, x, x), x[0, 0, 0])
        return cupyflash.group_norm(cupyflash.linear(out, square), 2)

x = torch.randn(1, 8, 2, 8)
torch.export.save(torch.export.export(Model(), (x,)), FILE)
torch.save((x, Model()(x)), FILE + ".pt")
"""

LOADS = """
import cupyflash.integrations.torch
import torch

x, right = torch.load(FILE + ".pt")
print(torch.equal(torch.export.load(FILE).module()(x), right))
print(*sorted(name for name in torch._C._dispatch_get_all_op_names() if "cupyflash::" in name))
"""


def test_programs_that_another_process_loads(tmp_path):
    """The integration defines each operator that a module of the package defines."""
    file = f"FILE = {str(tmp_path / 'model.pt2')!r}\n"
    assert printed(file + EXPORTS) == []
    same, *names = printed(file + LOADS)
    assert same == "True"
    sources = "".join(path.read_text() for path in (ROOT / "cupyflash/ops").rglob("torch_*.py"))
    declared = re.findall(r'@operator\(\s*f?"(\w+)\(', sources)
    assert sorted(f"cupyflash::{name}" for name in declared) == names
