"""The projections where torch has to see them: the operator, torch.compile, transforms."""

import pytest
from arrays import normal, stored
from matrix import each_library
from passes import one_graph

import cupyflash
from cupyflash.ops.linear.reference import Arrays, Options
from cupyflash.testing import expected_projection

HEADS = (4, 2)
DEPTH, HIDDEN, HEAD_DIM = 40, 64, 8
FUNCTIONS = ["linear", "mlp", "qkv_projection"]
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def problem_of(target, name, rows=(3, 5)):
    """(function of the tensors, the tensors, what `expected_projection` takes)."""
    make = lambda *shape, seed: stored(target, shape[-1] ** -0.5 * normal(shape, seed), "float32")
    x, weight, bias = make(*rows, DEPTH, seed=0), make(HIDDEN, DEPTH, seed=1), make(HIDDEN, seed=2)
    of_norm = make(DEPTH, seed=3)
    arrays = Arrays(x, weight, bias=bias, norm_weight=of_norm)
    norm = lambda weight: cupyflash.Norm(weight, rms=True)
    if name == "linear":
        residual = make(*rows, HIDDEN, seed=4)
        function = lambda x, weight, bias, of_norm, residual: cupyflash.linear(
            x, weight, bias, activation="silu", residual=residual, norm=norm(of_norm)
        )
        exact = arrays._replace(residual=residual), Options("silu", rms=True)
        return function, (x, weight, bias, of_norm, residual), exact
    if name == "mlp":
        gate, down = make(HIDDEN, DEPTH, seed=5), make(24, HIDDEN, seed=6)
        function = lambda x, weight, bias, of_norm, gate, down: cupyflash.mlp(
            x, weight, down, bias, gate_weight=gate, activation="gelu", norm=norm(of_norm)
        )
        exact = arrays._replace(gate_weight=gate), Options("gelu", rms=True), Arrays(None, down)
        return function, (x, weight, bias, of_norm, gate, down), exact
    cos, sin = (make(rows[-1], HEAD_DIM // 2, seed=7 + i) for i in range(2))
    function = lambda x, weight, bias, of_norm, cos, sin: cupyflash.qkv_projection(
        x,
        weight,
        bias,
        heads_q=HEADS[0],
        heads_kv=HEADS[1],
        norm=norm(of_norm),
        rotary=cupyflash.Rotary(cos, sin),
    )
    exact = arrays._replace(cos=cos, sin=sin), Options(rms=True, heads=HEADS)
    return function, (x, weight, bias, of_norm, cos, sin), exact


def joined(out, rows=(3, 5)):
    """q, k and v as one."""
    import torch

    return torch.cat(out, -2).reshape(*rows, -1) if isinstance(out, tuple) else out


@each_library(library="torch")
@each_function
def test_compiled(target, name):
    """One graph."""
    function, tensors, exact = problem_of(target, name)
    graph = one_graph(function)
    expected_projection(*exact).check(out=joined(graph(*tensors)))


@each_library(library="torch")
def test_compiled_for_any_size(target):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    frames, counts = CompileCounterWithBackend("aot_eager"), set()
    function, tensors, _ = problem_of(target, "mlp")
    graph = torch.compile(function, fullgraph=True, dynamic=True, backend=frames)
    for rows in (5, 7, 10):
        x = stored(target, normal((rows, DEPTH), rows), "float32")
        assert (graph(x, *tensors[1:]) == function(x, *tensors[1:])).all()
        counts.add(frames.frame_count)
    assert len(counts) == 1


@each_library(library="torch")
@each_function
def test_opcheck(target, name):
    import torch

    from cupyflash.ops.linear import torch_ops  # noqa: F401, defines the operator

    _, _, (arrays, options, *down) = problem_of(target, name)
    if down:
        arrays = arrays._replace(down_weight=down[0].weight)
    *scalars, heads = options
    arguments = (*arrays, name, *scalars, list(heads))
    torch.library.opcheck(torch.ops.cupyflash.linear.default, arguments)


@each_library(library="torch")
@each_function
def test_shapes_without_data(target, name):
    """Meta tensors: shape and strides of the result, nothing computed."""
    function, tensors, _ = problem_of(target, name)
    right, meta = function(*tensors), function(*(x.to("meta") for x in tensors))
    for a, b in zip(right, meta, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


@each_library(library="torch")
@each_function
def test_transforms_are_refused(target, name):
    import torch

    function, (x, *rest), _ = problem_of(target, name)
    loss = lambda x: joined(function(x, *rest)).sum()
    with pytest.raises(NotImplementedError, match="not built for transforms of torch.func"):
        torch.func.grad(loss)(x)
