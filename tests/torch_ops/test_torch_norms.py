"""The norms where torch has to see them: operators, torch.compile, autocast, second derivatives."""

import contextlib
import dataclasses
import functools
import importlib

import pytest
from arrays import normal, stored
from matrix import each_library
from passes import one_graph, without_gradient

import cupyflash
from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.testing import expected_group_norm, expected_norm

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Problem:
    """A norm with everything that it can have.

    Attributes:
        function: of the inputs; the outputs as a tuple.
        inputs: leaves that want a gradient, by name; those that are missing are None.
        gradients: of the outputs.
    """

    function: object
    named: dict
    gradients: tuple

    @property
    def inputs(self):
        return tuple(self.named.values())

    def all_inputs(self, *names):
        """Detached, of these names, with None where there is none."""
        return [self.named[name].detach() if name in self.named else None for name in names]

    def results(self, function=None):
        """Outputs and gradients of the inputs, in a list."""
        import torch

        outputs = (function or self.function)(*self.inputs)
        return [*outputs, *torch.autograd.grad(outputs, self.inputs, self.gradients)]


def problem_of(target, name):
    make = lambda shape, i, storage="contiguous": stored(
        target, normal(shape, i), "float32", storage
    )
    if name == "layer_norm":
        shape = (5, 3, 40)  # x and residual differ in their strides
        inputs = {"x": make(shape, 0, "transposed"), "weight": make(40, 1), "bias": make(40, 2)}
        inputs["residual"] = make(shape, 3, "padded")
        gradients = (make(shape, 4), make(shape, 5))
        function = lambda x, weight, bias, residual: cupyflash.layer_norm(
            x, weight, bias, residual=residual, eps=EPS
        )
    elif name == "rms_norm":
        inputs, gradients = {"x": make((4, 40), 0), "weight": make(40, 1)}, (make((4, 40), 4),)
        function = lambda x, weight: (cupyflash.rms_norm(x, weight, eps=EPS),)
    elif name == "rms_norm of a float32 residual":
        inputs = {"x": make((4, 40), 0).bfloat16(), "weight": make(40, 1)}
        inputs["residual"] = make((4, 40), 3)
        gradients = make((4, 40), 4).bfloat16(), make((4, 40), 5)
        function = lambda x, weight, residual: cupyflash.rms_norm(
            x, weight, residual=residual, eps=EPS
        )
    elif name == "layer_norm plain":  # x has more axes than a kernel, and no weight
        x = make((2, 3, 2, 3, 2, 40), 0).permute(4, 1, 2, 3, 0, 5)
        inputs, gradients = {"x": x}, (make(tuple(x.shape), 4),)
        function = lambda x: (cupyflash.layer_norm(x, eps=EPS),)
    elif name == "group_norm plain":  # a cropped image, no weight
        inputs, gradients = {"x": make((3, 12, 5, 4), 0)[..., :3]}, (make((3, 12, 5, 3), 4),)
        function = lambda x: (cupyflash.group_norm(x, 3, activation="mish"),)
    else:
        shape, storage = (3, 12, 5, 4), name.removeprefix("group_norm ")
        inputs = {"x": make(shape, 0, storage), "weight": make(12, 1), "bias": make(12, 2)}
        gradients = (make(shape, 4),)
        function = lambda *x: (cupyflash.group_norm(x[0], 3, *x[1:], activation="mish"),)
    leaves = {key: x.detach().requires_grad_() for key, x in inputs.items()}
    return Problem(function, leaves, gradients)


def check(problem, name, results):
    """Against float64."""
    names = [f"d{key}" for key in problem.named if key != "residual"]
    if name.startswith("group_norm"):
        x, weight, bias = problem.all_inputs("x", "weight", "bias")
        exact = expected_group_norm(*problem.gradients, x, 3, weight, bias, "mish", EPS)
        names.insert(0, "out")
    else:
        dout, *dh = problem.gradients
        inputs = problem.all_inputs("x", "weight", "bias", "residual")
        exact = expected_norm(name.startswith("rms"), dout, *inputs, *(dh or [None]), eps=EPS)
        names = ["out", *["h"] * len(dh), *names]
        if dh:  # the gradient of x is that of the residual, in its own dtype
            of_x, of_residual = results[2], results.pop()
            assert of_residual.dtype == inputs[-1].dtype and of_x.dtype == inputs[0].dtype
            assert (of_residual.to(of_x.dtype) == of_x).all()
            results[2] = of_residual
    exact.check(**dict(zip(names, results, strict=True)))


each_norm = pytest.mark.parametrize(
    "name",
    [
        *("layer_norm", "layer_norm plain", "rms_norm", "rms_norm of a float32 residual"),
        *("group_norm contiguous", "group_norm channels_last", "group_norm plain"),
    ],
)


@each_library(library="torch")
@each_norm
def test_opcheck(target, name):
    import torch

    importlib.import_module("cupyflash.ops.group_norm.torch_ops")  # they define the operators
    importlib.import_module("cupyflash.ops.norm.torch_ops")

    operators = torch.ops.cupyflash
    problem = problem_of(target, name)
    dout, *dh = problem.gradients
    if name.startswith("group_norm"):
        options = (3, EPS, "mish")
        padded = (*problem.inputs, *[None] * (3 - len(problem.inputs)))
        plain = problem.all_inputs("x", "weight", "bias")
        torch.library.opcheck(operators.group_norm.default, (*padded, *options))
        _, stats = operators.group_norm(*plain, *options)
        torch.library.opcheck(operators.group_norm_backward.default, (dout, *plain, stats, "mish"))
        return
    names = ("x", "weight", "bias", "residual")
    rms, options = name.startswith("rms"), (name.split()[0], name.startswith("rms"), EPS)
    leaves = [problem.named.get(key) for key in names]
    torch.library.opcheck(operators.norm.default, (*leaves, *options))
    x, weight, _, residual = plain = problem.all_inputs(*names)
    _, *h, stats = operators.norm(*plain, *options)
    values = x if residual is None else h[0]
    arguments = (dout, values, weight, stats, *(dh or [None]), *options[:2], not rms)
    torch.library.opcheck(operators.norm_backward.default, arguments)


@each_library(library="torch")
@each_norm
def test_compiled(target, name):
    """One graph, with gradients."""
    problem = problem_of(target, name)
    graph = one_graph(problem.function)
    check(problem, name, problem.results(graph))


@each_library(library="torch")
@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
def test_compiled_for_any_size(target, storage):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    frames, counts = CompileCounterWithBackend("aot_eager"), set()

    def function(x, weight):
        x = cupyflash.group_norm(x, 4, weight, weight, activation="gelu")
        return cupyflash.rms_norm(x.movedim(1, -1).contiguous(), weight)

    graph = torch.compile(function, fullgraph=True, dynamic=True, backend=frames)
    weight = stored(target, normal(40, 1), "float32")
    for size in (5, 7, 10):
        x = stored(target, normal((size, 40, size + 1, 4), size), "float32", storage)
        found, right = graph(x, weight), function(x, weight)
        assert (found == right).all() and found.stride() == right.stride()
        counts.add(frames.frame_count)
    assert len(counts) == 1


@each_library(library="torch")
@each_norm
def test_operators_have_the_gradients_of_eager(target, name):
    """A dispatch mode, which sees operators only; also where one output is not used."""
    from torch.utils.flop_counter import FlopCounterMode

    problem = problem_of(target, name)
    with FlopCounterMode(display=False):
        check(problem, name, problem.results())
    last = dataclasses.replace(
        problem,
        function=lambda *x: problem.function(*x)[-1:],
        named={"x": problem.named["x"]},
        gradients=problem.gradients[-1:],
    )
    rest = [x.detach() for x in problem.inputs[1:]]
    function = lambda x: last.function(x, *rest)
    with FlopCounterMode(display=False):
        found = last.results(function)
    for ours, eager in zip(found, last.results(function), strict=True):
        assert (ours == eager).all()


@each_library(library="torch")
@each_norm
@pytest.mark.parametrize("operator", [False, True], ids=["eager", "operator"])
def test_no_gradient_arrives(target, name, operator):
    """From a function behind the norm: then its inputs get none, or zeros, as torch has it."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    problem = problem_of(target, name)
    with FlopCounterMode(display=False) if operator else contextlib.nullcontext():
        outputs = without_gradient(*problem.function(*problem.inputs))
    found = torch.autograd.grad(outputs, problem.inputs, problem.gradients, allow_unused=True)
    assert all(dx is None or not dx.any() for dx in found)


@each_library(library="torch")
@each_norm
@pytest.mark.parametrize("operator", [False, True], ids=["eager", "operator"])
def test_no_second_derivative(target, name, operator):
    """An error, not gradients that look like constants."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    problem = problem_of(target, name)
    x = problem.inputs[0]
    with FlopCounterMode(display=False) if operator else contextlib.nullcontext():
        outputs = problem.function(*problem.inputs)
    (dx,) = torch.autograd.grad(outputs, x, problem.gradients, create_graph=True)
    with pytest.raises(NotImplementedError, match="norms have no second derivative"):
        (dx.sum() + x.sum()).backward()


@each_library(library="torch")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_promotes_the_residual(target, compiled):
    """x from a linear layer in half precision, the stream of residuals in float32."""
    import torch

    x, residual = (stored(target, normal((4, 24), i), "float32") for i in (0, 1))
    half, weight = x.bfloat16(), stored(target, normal(24, 2), "float32")
    function = functools.partial(cupyflash.rms_norm, eps=EPS)
    if compiled:
        function = one_graph(function)
    with torch.autocast(target.device, torch.bfloat16):
        out, h = function(half, weight, residual=residual)
    dout = torch.zeros_like(x)
    expected_norm(True, dout, half.float(), weight, None, residual, eps=EPS).check(out=out, h=h)
    out, h = function(half, weight, residual=residual)
    expected_norm(True, dout, half, weight, None, residual, eps=EPS).check(out=out, h=h)


@each_library(library="torch")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_takes_weights_of_the_narrower_dtype(target, compiled):
    """Of a whole model in half precision, beside a stream of residuals in float32."""
    import torch

    x, residual = (stored(target, normal((4, 24), i), "float32") for i in (0, 1))
    half, weight, bias = (
        y.bfloat16().requires_grad_() for y in (x, *(x[i].clone() for i in (1, 2)))
    )
    function = functools.partial(cupyflash.layer_norm, eps=EPS)
    if compiled:
        function = one_graph(function)
    with torch.autocast(target.device, torch.bfloat16):
        out, h = function(half, weight, bias, residual=residual)
    dout = torch.zeros_like(x)
    wide = [y.detach().float() for y in (half, weight, bias)]
    expected_norm(False, dout, *wide, residual, eps=EPS).check(out=out, h=h)
    gradients = torch.autograd.grad(out.sum(), (half, weight, bias))
    assert all(y.dtype == torch.bfloat16 for y in gradients)


@each_library(library="torch")
@each_norm
def test_transforms_are_refused(target, name):
    import torch

    problem = problem_of(target, name)
    inputs = [x.detach() for x in problem.inputs]
    loss, dims = lambda *x: problem.function(*x)[0].sum(), (0, *[None] * (len(inputs) - 1))
    for transform in (torch.func.grad(loss), torch.func.vmap(loss, dims)):
        with pytest.raises(NotImplementedError, match="not built for transforms of torch.func"):
            transform(*inputs)


@each_library(library="torch")
@each_norm
def test_shapes_without_data(target, name):
    """Fake and meta tensors: shapes and strides of the results, nothing computed."""
    from torch._subclasses import FakeTensorMode

    problem = problem_of(target, name)
    inputs = [x.detach() for x in problem.inputs]
    right = problem.function(*inputs)
    meta = problem.function(*(x.to("meta") for x in inputs))
    with FakeTensorMode() as mode:
        fake = problem.function(*map(mode.from_tensor, inputs))
    for a, b, c in zip(right, meta, fake, strict=True):
        assert a.shape == b.shape == c.shape and a.dtype == b.dtype == c.dtype
        assert a.stride() == c.stride()


@each_library(library="torch")
def test_compile_breaks_its_graph_at_a_diffusion_step(target):
    import torch

    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 10))
    x = stored(target, normal((2, 12), 0), "float32")
    step = lambda x: sampler.step(x * 1, x, 3, seed=1) * 1
    torch.compiler.reset()
    assert (torch.compile(step, backend="aot_eager")(x) == step(x)).all()
    torch.compiler.reset()
    with pytest.raises(Exception, match="torch.compiler.disable"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x)


@each_library(library="torch", device="cuda")
def test_cuda_graph(target):
    """Captured after one call, replayed on other numbers."""
    import torch

    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 10))
    x, other = (stored(target, normal((6, 40, 5), i), "float32") for i in (0, 1))
    of_rows, of_channels = (stored(target, normal(size, 2), "float32") for size in (5, 40))
    index = torch.tensor([3], device=target.device)

    def run():
        out, h = cupyflash.layer_norm(x, of_rows, residual=x)
        image = cupyflash.group_norm(x, 4, of_channels, of_channels, activation="silu")
        return out, h, image, sampler.step(x, out, index, seed=7)

    run()
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collected(), torch.cuda.graph(graph):
        captured = run()
    x.copy_(other)
    graph.replay()
    for found, right in zip(captured, run(), strict=True):
        assert (found == right).all()
