"""What torch.func, functionalize and DTensor cannot do here is said, compiled or not."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from places import ROOT  # noqa: E402

import cupyflash  # noqa: E402

NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def calls():
    q, x = torch.randn(1, 6, 2, 16), torch.randn(4, 16)
    return {
        "attention": (lambda q: cupyflash.attention(q, q, q).square().sum(), q),
        "group_norm": (lambda x: cupyflash.group_norm(x[None], 2).square().sum(), x),
        "linear": (lambda x: cupyflash.linear(x, x).square().sum(), x),
        "rms_norm": (lambda x: cupyflash.rms_norm(x).square().sum(), x),
    }


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.grad_and_value])
@pytest.mark.parametrize("name", calls())
def test_derivatives_of_torch_func_within_a_graph(name, transform):
    function, x = calls()[name]
    torch.compiler.reset()
    graph = torch.compile(transform(function), fullgraph=True, backend="aot_eager")
    # Dynamo hands no text on before torch 2.11.
    with pytest.raises(Exception, match="derivatives of torch.func within torch.compile" * NEW):
        graph(x)


def test_derivatives_of_torch_func_beside_a_graph():
    """Without fullgraph, torch.compile leaves them to eager code."""
    function, x = calls()["attention"]
    torch.compiler.reset()
    found = torch.compile(torch.func.grad(function), backend="aot_eager")(x)
    torch.testing.assert_close(found, torch.func.grad(function)(x))


@pytest.mark.parametrize("name", calls())
def test_functionalize(name):
    function, x = calls()[name]
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.functionalize(function)(x)


SHARDED = """
import torch, torch.distributed as dist, cupyflash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
q = torch.randn(2, 6, 4, 16)
sharded = distribute_tensor(q, mesh, [Shard(0)])
norm = lambda x: cupyflash.rms_norm(x)
attend = lambda x: cupyflash.attention(x, x, x)
for call in (norm, attend, torch.compile(norm, fullgraph=True, backend="aot_eager"),
             torch.compile(attend, fullgraph=True, backend="aot_eager")):
    try:
        call(sharded)
    except Exception as error:
        assert "no function has a rule for sharded tensors" in str(error), error
    else:
        raise AssertionError("taken")
parts = ([Shard(0)],) * 3
local = local_map(cupyflash.attention, [Shard(0)], parts, device_mesh=mesh)
out = local(sharded, sharded, sharded).full_tensor()
assert torch.equal(out, cupyflash.attention(q, q, q))
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_sharded_tensors_are_refused():
    """And their local parts are taken, by the way that the error names."""
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, cwd=ROOT
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
