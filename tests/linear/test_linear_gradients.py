"""Gradients of the projections for torch tensors, with autocast and torch.compile."""

import contextlib
import dataclasses

import pytest
from arrays import normal, stored
from linear_steps import FIXED, HEAD_DIM, HEADS, joined, largest_sum, leaves, problem_of, results
from matrix import covering, each_case, each_library, libraries
from passes import one_graph

import cupyflash
from cupyflash import environment
from cupyflash.testing import assert_close_to_float64, dtype_name

QKV_COLUMNS = (HEADS[0] + 2 * HEADS[1]) * HEAD_DIM
FUNCTIONS = ["linear", "mlp", "qkv_projection"]
each_function = pytest.mark.parametrize("function", FUNCTIONS)
torch_only = each_library(library="torch")


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; see `linear_steps.problem_of`."""

    function: str
    dtype: str
    rows: tuple[int, ...]
    depth: int
    columns: int
    activation: str | None
    gated: bool
    norm: str
    bias: bool
    residual: bool
    weights: str | None
    turned: float
    positions: str
    interleaved: bool
    storage: str
    backend: str | None

    def problem(self, target):
        options = dataclasses.asdict(self)
        function, dtype, depth = (options.pop(name) for name in ("function", "dtype", "depth"))
        del options["backend"]
        if function == "qkv_projection":
            options |= {"residual": False, "activation": None}
            packed = len(self.rows) == 1 and self.positions
            options["rows"] = self.rows if packed else (1, 1, *self.rows)[-2:]
        else:
            options["turned"] = 0.0
        columns = options.pop("columns")
        if function == "qkv_projection":
            columns = QKV_COLUMNS
        return problem_of(target, function, dtype, sizes=(depth, columns, 56), **options)


def cases(target):
    values = {
        "function": FUNCTIONS,
        "dtype": list(target.dtypes),
        "rows": [(), (1,), (9,), (2, 8), (3, 2, 7), *([(2, 65)] if target.gpu else [])],
        "depth": [8, 40, 99, *([512, 2056] if target.gpu else [])],
        "columns": [96, 65],
        "activation": [None, "gelu", "gelu_tanh", "silu", "relu"],
        "gated": [False, True],
        "norm": ["", "layer", "rms"],
        "bias": [False, True],
        "residual": [False, True],
        "weights": [None, "float32"],
        "turned": [0.0, 0.5, 1.0],
        "positions": ["", "int32", "int64"],
        "interleaved": [False, True],
        "storage": ["contiguous", "padded", "unaligned", "transposed"],
        "backend": target.forced_backends,
    }
    return covering(Case, values)


def check(problem, dout, found):
    """Results beside float64; the yardstick are torch's operations in the dtype of x."""
    import torch

    exact = results(problem.theirs, leaves(problem.tensors, torch.float64), dout)
    yardstick = results(problem.theirs, leaves(problem.tensors), dout)
    dtype, terms = dtype_name(problem.tensors["x"]), largest_sum(problem, dout)
    for name, result in found.items():
        like = problem.tensors["x" if name == "out" else name[1:]]
        assert result.dtype == like.dtype, f"{name}: {result.dtype}"
        assert_close_to_float64(result, exact[name], yardstick[name], dtype, name, terms=terms)


def gradient_of_out(target, problem):
    """A random gradient in the dtype of out."""
    import torch

    with torch.no_grad():
        out = problem.ours(**problem.tensors)
    return stored(target, normal(tuple(out.shape), 20), dtype_name(out))


@each_case(cases, libraries("torch"))
def test_gradients(target, case):
    problem = case.problem(target)
    with environment.override(backend=case.backend):
        dout = gradient_of_out(target, problem)
        found = results(problem.ours, leaves(problem.tensors), dout)
    check(problem, dout, found)


def whole(target, function, dtype="float32", **options):
    """A problem with everything that the function has."""
    columns = QKV_COLUMNS if function == "qkv_projection" else 64
    if function == "qkv_projection":
        options = {"turned": 1.0, "norm": "rms"} | options
    else:
        gated = {"gated": function == "mlp", "activation": "silu", "residual": True}
        options = gated | {"norm": "layer"} | options
    return problem_of(target, function, dtype, sizes=(40, columns, 24), **options)


@torch_only
@each_function
def test_gradient_of_one_argument(target, function):
    """The same bits as among all, and no other argument gets one."""
    problem = whole(target, function)
    dout = gradient_of_out(target, problem)
    right = results(problem.ours, leaves(problem.tensors), dout)
    for name in (x for x in problem.tensors if x not in FIXED):
        tensors = {
            key: x.detach().requires_grad_(key == name) for key, x in problem.tensors.items()
        }
        problem.ours(**tensors).backward(dout)
        for key, x in tensors.items():
            assert (x.grad is not None) == (key == name)
        assert (tensors[name].grad == right[f"d{name}"]).all()


@torch_only
@each_function
def test_nothing_is_recorded_without_gradients(target, function, monkeypatch):
    import torch

    from cupyflash.ops.linear import autograd

    problem = whole(target, function)
    right = problem.ours(**problem.tensors)
    monkeypatch.setattr(autograd, "called", None)
    with torch.no_grad():
        out = problem.ours(**leaves(problem.tensors))
    assert not out.requires_grad and (out == right).all()


@torch_only
def test_an_expanded_gradient(target):
    """That of a sum is one number in memory."""
    problem = whole(target, "linear")
    tensors = leaves(problem.tensors)
    problem.ours(**tensors).sum().backward()
    dout = gradient_of_out(target, problem).fill_(1)
    check(problem, dout, {f"d{name}": x.grad for name, x in tensors.items()})


@torch_only
def test_no_rows(target):
    problem = whole(target, "mlp", rows=(0, 3))
    tensors = leaves(problem.tensors)
    problem.ours(**tensors).sum().backward()
    assert tensors["x"].grad.shape == (0, 3, 40)
    assert all((x.grad == 0).all() for name, x in tensors.items() if name != "x")


@torch_only
def test_rows_that_do_not_collapse(target):
    """Four axes of rows before a norm, of which no two have one stride."""
    make = lambda shape, seed: stored(target, normal(shape, seed), "float32")
    x = make((4, 4, 6, 4, 40), 0)[::2, ::2, ::2, ::2]
    problem = whole(target, "linear", rows=x.shape[:-1])
    problem.tensors["x"] = x
    dout = gradient_of_out(target, problem)
    check(problem, dout, results(problem.ours, leaves(problem.tensors), dout))


@each_library(library="torch", device="cuda")
@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("size", [1, 4096, 4104, 99999])
def test_gate(target, activation, size):
    """activation(gate) * up in one pass, and its gradients, from any address."""
    import torch

    from cupyflash.ops.linear import autograd, elementwise

    for dtype in target.dtypes:
        for storage in ("contiguous", "unaligned"):
            z, up, dout = (
                stored(target, (3 if i == 0 else 1) * normal((1, size), i), dtype, storage)[0]
                for i in range(3)
            )
            found = (
                *elementwise.gate(autograd.LIBRARY, activation, z, up),
                *elementwise.gate(autograd.LIBRARY, activation, z, up, dout),
            )

            def right(wide, z=z, up=up, dout=dout):
                leaves = [y.to(wide).requires_grad_() for y in (z, up)]
                out = autograd.ACTIVATIONS[activation](leaves[0]) * leaves[1]
                return out, *torch.autograd.grad(out, leaves, dout.to(wide))

            exact, theirs = right(torch.float64), right(getattr(torch, dtype))
            for name, *three in zip(("out", "dgate", "dup"), found, exact, theirs):
                assert three[0].dtype == z.dtype
                assert_close_to_float64(*three, dtype, name, terms=float(exact[0].abs().max()))


@torch_only
@each_function
def test_compiled(target, function):
    """Forward and backward in one graph each."""
    problem = whole(target, function)
    dout = gradient_of_out(target, problem)
    graph = one_graph(problem.ours)
    check(problem, dout, results(graph, leaves(problem.tensors), dout))


@torch_only
def test_compiled_calls_that_are_refused(target):
    """What eager calls refuse is not left out where each step is an operator."""
    import torch

    make = lambda *shape: torch.zeros(shape, device=target.device, requires_grad=True)
    x, weight, bias = make(3, 8), make(8, 8), make(8)
    wrong = {
        "down_weight must be an? .*None": lambda: cupyflash.mlp(x, weight, None),
        "gate_bias must come with": lambda: cupyflash.mlp(x, weight, weight, gate_bias=bias),
        " weight must (have|be)": lambda: cupyflash.linear(x, bias),
    }
    for match, call in wrong.items():
        torch.compiler.reset()
        for function in (call, torch.compile(call, backend="eager", fullgraph=True)):
            with pytest.raises(Exception, match=match):
                function()


@torch_only
@each_function
def test_compiled_for_any_size(target, function):
    """One graph for batches of several sizes."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    frames, counts = CompileCounterWithBackend("aot_eager"), set()
    ours = whole(target, function).ours
    graph = torch.compile(ours, fullgraph=True, dynamic=True, backend=frames)
    for batch in (2, 3, 6):
        problem = whole(target, function, rows=(batch, 5))
        dout = gradient_of_out(target, problem)
        check(problem, dout, results(graph, leaves(problem.tensors), dout))
        counts.add(frames.frame_count)
    assert len(counts) == 1


@torch_only
@each_function
def test_checkpoint(target, function):
    """The forward runs again in the backward, in the thread of that."""
    from torch.utils.checkpoint import checkpoint

    problem = whole(target, function)
    names, tensors = list(problem.tensors), leaves(problem.tensors)
    dout = gradient_of_out(target, problem)
    again = lambda *given: problem.ours(**dict(zip(names, given)))
    repeated = lambda **tensors: checkpoint(again, *tensors.values(), use_reentrant=False)
    right, found = (results(each, tensors, dout) for each in (problem.ours, repeated))
    assert all((found[name] == right[name]).all() for name in right)


@torch_only
@each_function
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_autocast(target, function, compiled, stream):
    """float32 weights, the residuals in float32 or not: as torch's own operations, in bfloat16."""
    import torch

    problem = whole(target, function, "bfloat16", weights="float32")
    if stream == "float32":
        for name in ("x", "residual"):
            if name in problem.tensors:
                problem.tensors[name] = problem.tensors[name].float() + 1e-3
    names = [name for name in problem.tensors if name not in FIXED]
    ours, dout = problem.ours, torch.ones(())
    if compiled:
        ours = one_graph(ours)

    def run(function, dtype=None):
        tensors = leaves(problem.tensors, dtype)
        on = dtype is None
        with torch.autocast(target.device, torch.bfloat16) if on else contextlib.nullcontext():
            out = function(**tensors)
        gradients = torch.autograd.grad(
            out, [tensors[name] for name in names], dout.to(out).expand(out.shape)
        )
        return dict(zip(("out", *names), (out, *gradients), strict=True))

    found, theirs = run(ours), run(problem.theirs)
    exact = run(problem.theirs, torch.float64)
    for name, x in found.items():
        assert x.dtype == theirs[name].dtype, f"{name}: {x.dtype} and {theirs[name].dtype}"
        assert_close_to_float64(x, exact[name], theirs[name], "bfloat16", name)


@torch_only
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_between_dtypes_of_16_bits(target, compiled):
    """A model in float16 under autocast to bfloat16: its norms and angles are no obstacle."""
    import torch

    torch.compiler.reset()
    make = lambda shape, seed: stored(target, normal(shape, seed), "float16")
    x, weight = make((2, 5, 16), 0), make((24, 16), 1).requires_grad_()
    scale, bias = (make(16, seed).requires_grad_() for seed in (2, 3))
    cos, sin, residual = make((8, 2), 4), make((8, 2), 5), make((2, 5, 24), 6)

    def ours(norm, rotary):
        out = cupyflash.qkv_projection(x, weight, heads_q=2, heads_kv=2, norm=norm, rotary=rotary)
        added = cupyflash.linear(x, weight, residual=residual, norm=norm)
        return torch.cat([*(y.flatten(2) for y in out), (added - residual).bfloat16()], -1)

    function = torch.compile(ours, backend="aot_eager") if compiled else ours
    with torch.autocast(target.device, torch.bfloat16):
        narrow = function(cupyflash.Norm(scale, bias), cupyflash.Rotary(cos, sin))
        wide = ours(
            cupyflash.Norm(scale.float(), bias.float()), cupyflash.Rotary(cos.float(), sin.float())
        )
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide)
    gradients = torch.autograd.grad(narrow.sum(), (weight, scale, bias))
    assert all(y.dtype == torch.float16 for y in gradients)


@torch_only
def test_autocast_normalises_float32_in_float32(target):
    """Rows far from zero would lose their variance in bfloat16."""
    import torch

    x = stored(target, 300 + normal((6, 40), 0), "float32")
    weight, ones = stored(target, normal((24, 40), 1), "float32"), x.new_ones(40)
    exact = torch.nn.functional.layer_norm(x.double(), (40,)) @ weight.double().t()
    with torch.autocast(target.device, torch.bfloat16):
        theirs = torch.nn.functional.layer_norm(x, (40,)) @ weight.t()
        out = cupyflash.linear(x, weight, norm=cupyflash.Norm(ones))
    assert out.dtype == torch.bfloat16
    assert_close_to_float64(out, exact, theirs, "bfloat16", "out")


@torch_only
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_nothing_is_broadcast(target, traced):
    """What torch itself would stretch is refused by name, also where it sees the call."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def refused(name, cast, dtype="float32"):
        problem = whole(target, "mlp" if name == "gate_weight" else "linear", dtype)
        tensors = leaves(problem.tensors)
        tensors[name] = tensors[name][:1].float() if cast else tensors[name][:1]
        on = torch.autocast(target.device, torch.bfloat16) if cast else contextlib.nullcontext()
        seen = FlopCounterMode(display=False) if traced else contextlib.nullcontext()
        with pytest.raises(ValueError, match=f"^(linear|mlp): {name} must have shape"), on, seen:
            problem.ours(**tensors)

    for name in ("residual", "bias", "gate_weight"):
        refused(name, cast=False)
    refused("residual", cast=True, dtype="bfloat16")


@torch_only
def test_errors_under_autocast(target):
    """They name what the caller wrote, also where a norm or a residual is a step of its own."""
    import torch

    problem = whole(target, "mlp", "bfloat16", weights="float32")
    for name in ("x", "residual"):
        problem.tensors[name] = problem.tensors[name].float()
    wrong = {"norm_weight": "weight of norm", "norm_bias": "bias of norm", "residual": "residual"}
    for name, called in wrong.items():
        tensors = problem.tensors | {name: problem.tensors[name][..., :-1]}
        refused = pytest.raises(ValueError, match=f"^mlp: {called} must have shape")
        with torch.autocast(target.device, torch.bfloat16), refused:
            problem.ours(**tensors)
    tensors = problem.tensors | {"residual": problem.tensors["residual"].double()}
    refused = pytest.raises(TypeError, match="^mlp: residual must be .*got float64")
    with torch.autocast(target.device, torch.bfloat16), refused:
        problem.ours(**tensors)


@torch_only
@each_function
def test_a_backward_under_autocast(target, function):
    """float32 stays float32 where only the backward stands inside."""
    import torch

    problem = whole(target, function, norm="")
    dout, tensors = gradient_of_out(target, problem), leaves(problem.tensors)
    out = problem.ours(**tensors)
    with torch.autocast(target.device, torch.bfloat16):
        out.backward(dout)
    check(problem, dout, {f"d{n}": x.grad for n, x in tensors.items() if n not in FIXED})


@torch_only
@each_function
def test_second_derivatives(target, function):
    """They are torch's, but through a norm they are an error."""
    import torch

    def penalty(problem, function, dtype):
        tensors = leaves(problem.tensors, dtype)
        out = function(**tensors)
        (dx,) = torch.autograd.grad(out.square().sum(), tensors["x"], create_graph=True)
        name = "up_weight" if problem.function == "mlp" else "weight"
        return torch.autograd.grad(dx.square().sum(), tensors[name])[0]

    problem = whole(target, function, norm="")
    exact = penalty(problem, problem.theirs, torch.float64)
    theirs = penalty(problem, problem.theirs, torch.float32)
    found = penalty(problem, problem.ours, torch.float32)
    assert_close_to_float64(found, exact, theirs, "float32", "second derivative")
    problem = whole(target, function)
    with pytest.raises(NotImplementedError, match="norms have no second derivative"):
        penalty(problem, problem.ours, torch.float32)


@torch_only
@pytest.mark.parametrize("function", ["linear", "qkv_projection"])
def test_product_in_float32(target, function):
    """On a GPU it takes the place of the kernel without tensor cores; it is right anywhere."""
    from cupyflash.ops.linear import autograd
    from cupyflash.ops.linear.options import Arrays, Options

    residual = {"residual": True} if function == "linear" else {}
    problem = whole(target, function, norm="", **residual)
    problem = dataclasses.replace(problem, activation=None)
    options = Options(heads=HEADS if function == "qkv_projection" else (0, 0))
    ours = lambda **tensors: autograd._product_in_float32(function, Arrays(**tensors), options)
    dout = gradient_of_out(target, problem)
    check(problem, dout, results(ours, leaves(problem.tensors), dout))


@torch_only
def test_opcheck(target):
    """Both operators, with gradients."""
    import torch

    from cupyflash.ops.linear import torch_ops
    from cupyflash.ops.linear.options import Arrays, Options

    problem = whole(target, "qkv_projection", norm="", positions="int64")
    tensors, options = leaves(problem.tensors), Options(heads=HEADS)
    arguments = torch_ops.flat("qkv_projection", Arrays(**tensors), options)
    torch.library.opcheck(torch.ops.cupyflash.linear.default, arguments)
    x = torch.randn(2, 5, QKV_COLUMNS, device=target.device).requires_grad_()
    arguments = (x, *(tensors[name] for name in FIXED), False, list(HEADS))
    torch.library.opcheck(torch.ops.cupyflash.rotate.default, arguments)


@torch_only
def test_what_has_no_gradient(target):
    """Angles; and the operator by itself, of more than a product."""
    import torch

    problem = whole(target, "qkv_projection")
    for name in ("cos", "sin"):
        tensors = {**problem.tensors, name: problem.tensors[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=f"^qkv_projection: {name} has no gradient"):
            problem.ours(**tensors)
    from cupyflash.ops.linear import torch_ops
    from cupyflash.ops.linear.options import Arrays, Options

    x, weight = (torch.randn(8, 8, device=target.device).requires_grad_() for _ in range(2))
    arguments = torch_ops.flat("linear", Arrays(x, weight), Options("gelu"))
    with pytest.raises(NotImplementedError, match="without norm, gate and activation"):
        torch.ops.cupyflash.linear(*arguments).sum().backward()


@torch_only
def test_errors_name_what_the_caller_wrote(target):
    """Not what a step of an MLP calls it."""
    problem = whole(target, "mlp")
    for name in ("up_weight", "down_weight", "gate_weight", "residual"):
        tensors = leaves(problem.tensors)
        tensors[name] = tensors[name][..., :-1]
        with pytest.raises(ValueError, match=f"^mlp: {name}"):
            problem.ours(**tensors)


@torch_only
@each_function
def test_checks_run_once(target, function, monkeypatch):
    """A second call of the same signature checks nothing again, but for the steps on a CPU."""
    from cupyflash.ops.linear import autograd

    problem = whole(target, function)
    tensors = leaves(problem.tensors)
    first = problem.ours(**tensors)
    monkeypatch.setattr(autograd, "check", None)
    assert (problem.ours(**tensors) == first).all()


@torch_only
def test_split_of_q_k_v(target):
    """Three views of one array, with gradients too."""
    problem = whole(target, "qkv_projection")
    tensors = leaves(problem.tensors)
    rotary = cupyflash.Rotary(tensors["cos"], tensors["sin"])
    heads = {"heads_q": HEADS[0], "heads_kv": HEADS[1]}
    q, k, v = cupyflash.qkv_projection(tensors["x"], tensors["weight"], **heads, rotary=rotary)
    for part, count in ((q, HEADS[0]), (k, HEADS[1]), (v, HEADS[1])):
        assert part.shape == (2, 5, count, HEAD_DIM) and part.requires_grad
        assert part.stride() == (5 * QKV_COLUMNS, QKV_COLUMNS, HEAD_DIM, 1)
    assert joined((q, k, v)).shape == (2, 5, QKV_COLUMNS)
