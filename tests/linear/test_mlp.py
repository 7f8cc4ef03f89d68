"""The feed-forward network, gated or not: two projections."""

import dataclasses

import numpy
import pytest
from arrays import normal, stored
from fakes import fake_facts, fake_kernels, fresh_plans
from matrix import covering, each_case, each_library

import cupyflash
from cupyflash import environment
from cupyflash.ops.linear import plan
from cupyflash.ops.linear.options import Arrays, Options
from cupyflash.runtime.libraries import NumpyLibrary
from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.testing import expected_projection, poison_free_memory

ROWS = [(1,), (3,), (8,), (2, 8), (17,), (32,), (5, 7)]
SIZES = [(8, 8, 8), (24, 40, 24), (33, 65, 7), (64, 300, 128), (96, 384, 96)]  # in, hidden, out
LARGE_SIZES = [(768, 3072, 768), (1000, 4001, 999), (4096, 2048, 4096)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    dtype: str
    rows: tuple[int, ...]
    sizes: tuple[int, int, int]
    activation: str | None
    gated: bool
    bias: bool
    residual: bool
    norm: str
    storage: str
    backend: str | None

    def arrays(self, target):
        """Of the first projection, and of the second."""
        depth, hidden, columns = self.sizes
        make = lambda shape, seed, scale=1.0: stored(
            target, scale * normal(shape, seed), self.dtype, self.storage
        )
        vector = lambda size, seed: stored(target, normal(size, seed), self.dtype)
        up = Arrays(
            x=make((*self.rows, depth), 0),
            weight=make((hidden, depth), 1, depth**-0.5),
            gate_weight=make((hidden, depth), 2, depth**-0.5) if self.gated else None,
            bias=vector(hidden, 3) if self.bias else None,
            gate_bias=vector(hidden, 4) if self.bias and self.gated else None,
            norm_weight=vector(depth, 5) if self.norm else None,
            norm_bias=vector(depth, 6) if self.norm == "layer" else None,
        )
        down = Arrays(
            x=None,
            weight=make((columns, hidden), 7, hidden**-0.5),
            bias=vector(columns, 8) if self.bias else None,
            residual=make((*self.rows, columns), 9) if self.residual else None,
        )
        return up, down


def cases(target):
    values = {
        "dtype": list(target.dtypes),
        "rows": ROWS + ([(130,), (2, 300)] if target.gpu else []),
        "sizes": SIZES + (LARGE_SIZES if target.gpu else []),
        "activation": ["gelu", "gelu_tanh", "silu", "relu", None],
        "gated": [False, True],
        "bias": [False, True],
        "residual": [False, True],
        "norm": ["", "layer", "rms"],
        "storage": ["contiguous", "padded", "unaligned", "transposed"],
        "backend": target.forced_backends,
    }
    return covering(Case, values)


def mlp(up, down, activation, rms):
    norm = None
    if up.norm_weight is not None:
        norm = cupyflash.Norm(up.norm_weight, up.norm_bias, 1e-5, rms)
    return cupyflash.mlp(
        up.x,
        up.weight,
        down.weight,
        up.bias,
        down.bias,
        gate_weight=up.gate_weight,
        gate_bias=up.gate_bias,
        activation=activation,
        residual=down.residual,
        norm=norm,
    )


@each_case(cases)
def test_mlp(target, case):
    up, down = case.arrays(target)
    rows, item = int(numpy.prod(case.rows)), 4 if case.dtype == "float32" else 2
    poison_free_memory(
        target.library, target.device, [rows * size * item for size in case.sizes[1:]]
    )
    with environment.override(backend=case.backend):
        out = mlp(up, down, case.activation, case.norm == "rms")
    options = Options(case.activation or "none", rms=case.norm == "rms")
    expected_projection(up, options, down).check(out=out)


@each_library()
def test_mlp_is_repeatable(target):
    case = Case("float16", (5,), (96, 1000, 96), "silu", True, True, True, "rms", "", None)
    up, down = case.arrays(target)
    first = mlp(up, down, "silu", True)
    for _ in range(5):
        assert (mlp(up, down, "silu", True) == first).all()


@each_library(library="torch", device="cuda")
def test_mlp_in_a_graph(target):
    """Captured with the memory of the hidden activations, and replayed with other rows."""
    import torch

    case = Case("float16", (4,), (128, 512, 128), "gelu", False, True, True, "", "", None)
    up, down = case.arrays(target)
    expected = mlp(up, down, "gelu", False)
    graph = torch.cuda.CUDAGraph()
    kept = up.x.clone()
    with no_garbage_collected(), torch.cuda.graph(graph):
        out = mlp(up, down, "gelu", False)
    up.x.zero_()
    graph.replay()
    assert not (out == expected).all()
    up.x.copy_(kept)
    for _ in range(3):
        graph.replay()
        assert (out == expected).all()


@each_library()
def test_empty(target):
    x = stored(target, numpy.zeros((0, 24)), "float16")
    up, down = (stored(target, normal(shape, 1), "float16") for shape in ((40, 24), (8, 40)))
    assert tuple(cupyflash.mlp(x, up, down).shape) == (0, 8)


def bad(target, error, match, **changes):
    arguments = {
        "x": stored(target, normal((4, 16), 0), "float16"),
        "up_weight": stored(target, normal((24, 16), 1), "float16"),
        "down_weight": stored(target, normal((8, 24), 2), "float16"),
    } | changes
    with pytest.raises(error, match=f"^mlp: .*{match}"):
        cupyflash.mlp(**arguments)


@each_library()
def test_bad_input(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    bad(target, ValueError, r"up_weight.*\(d_hidden, 16\).*\(24, 15\)", up_weight=make((24, 15)))
    bad(target, ValueError, r"down_weight.*\(d_out, 24\).*\(8, 16\)", down_weight=make((8, 16)))
    bad(target, ValueError, r"gate_weight.*\(24, 16\).*\(8, 16\)", gate_weight=make((8, 16)))
    bad(target, ValueError, "gate_bias must come with gate_weight", gate_bias=make(24))
    bad(target, ValueError, r"up_bias.*\(24,\)", up_bias=make(16))
    bad(target, ValueError, r"down_bias.*\(8,\)", down_bias=make(24))
    bad(target, ValueError, r"residual.*\(4, 8\)", residual=make((4, 16)))
    bad(target, TypeError, "down_weight.*None", down_weight=None)
    bad(target, TypeError, "up_weight.*None", up_weight=None)
    bad(target, TypeError, "down_weight.*float32.*int32", down_weight=make((8, 24), "int32"))
    bad(target, ValueError, "activation", activation="swiglu")


@each_library()
def test_no_second_weight_after_an_equal_linear(target):
    """The same arrays with the same options, but what is missing is an error of one function."""
    x, weight = (
        stored(target, normal(shape, i), "float16") for i, shape in enumerate(((4, 16), (24, 16)))
    )
    cupyflash.linear(x, weight, activation="gelu")
    with pytest.raises(TypeError, match="^mlp: down_weight must be .*None"):
        cupyflash.mlp(x, weight, None)


@pytest.mark.parametrize(
    "capability, kernel",
    [((7, 0), "LinearSimt"), ((7, 5), "LinearSmallM"), ((8, 0), "LinearSmallM")]
    + [((9, 0), "LinearSmallMSm90"), ((12, 0), "LinearSmallM")],
)
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_take_two_launches(monkeypatch, capability, kernel, gated):
    """The first has the gate and no residual, and the second reads what the first stored."""
    from cupyflash.ops.linear import launches
    from cupyflash.runtime import launch as kernel_launch
    from cupyflash.runtime.array import View

    modules = launches, kernel_launch
    fake_facts(monkeypatch, *modules, capability_of=capability, multiprocessors=132)
    loaded = []
    fake_kernels(monkeypatch, loaded.append)
    shapes = {"weight": (2048, 768), "down_weight": (768, 2048)}
    shapes |= {"x": (2, 2, 768), "residual": (2, 2, 768)}
    if gated:
        shapes["gate_weight"] = (2048, 768)
    dense = lambda shape: plan.dense_strides(shape, range(len(shape)))
    views = {name: View(shape, dense(shape), "float16", 0) for name, shape in shapes.items()}
    made = plan.LinearPlan("mlp", None, views, Options("silu"), True, None)
    assert [type(config).__name__ for config in loaded] == [kernel] * 2
    assert [(x.activation, x.gated) for x in loaded] == [("silu", gated), ("none", False)]
    names = (*Arrays._fields, "out", "", "hidden")
    first, second = (picked(names) for _, picked in made.steps)
    assert made.between == {"hidden": (4, 2048)}
    assert first[:2] == ("x", "weight") and "residual" not in first and first[-1] == "hidden"
    assert second[:2] == ("hidden", "down_weight") and "residual" in second and second[-1] == "out"


def test_plans_of_functions_are_apart(monkeypatch):
    """The same without a GPU: arrays of NumPy take its route, and a plan returns its function."""
    monkeypatch.setattr(NumpyLibrary, "on_cpu", lambda library, x: False)
    monkeypatch.setattr(plan, "LinearPlan", lambda function, *_: lambda given, pointers: function)
    fresh_plans(monkeypatch, plan)
    x, weight = (normal(shape, 0).astype("float32") for shape in ((4, 16), (24, 16)))
    for _ in range(2):
        assert cupyflash.linear(x, weight, activation="gelu") == "linear"
        with pytest.raises(TypeError, match="^mlp: down_weight must be .*None"):
            cupyflash.mlp(x, weight, None)
