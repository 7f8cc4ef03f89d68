"""The projection with all that it fuses, on every library."""

import dataclasses

import numpy
import pytest
from arrays import assert_same_oracle, broadcast, normal, stored
from fakes import fake_facts, fake_kernels
from matrix import covering, each_case, each_library

import cupyflash
from cupyflash import environment
from cupyflash.ops.linear.options import Arrays, Options
from cupyflash.testing import expected_projection, poison_free_memory, to_float64, to_numpy64

ROWS = [(1,), (3,), (8,), (2, 8), (17,), (4, 8), (3, 2, 7)]
MANY_ROWS = [(130,), (2, 300), (1023,)]
SIZES = [(8, 8), (24, 40), (33, 65), (64, 128), (768, 96), (1000, 33)]
LARGE_SIZES = [(768, 2304), (3072, 768), (4096, 512), (1600, 1600), (5000, 129)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; ``sizes`` are d_in and d_out, ``norm`` "layer", "rms" or ""."""

    dtype: str
    rows: tuple[int, ...]
    sizes: tuple[int, int]
    activation: str | None
    bias: bool
    residual: bool
    norm: str
    storage: str
    backend: str | None

    def arrays(self, target):
        depth, columns = self.sizes
        make = lambda shape, seed, scale=1.0: stored(
            target, scale * normal(shape, seed), self.dtype, self.storage
        )
        vector = lambda size, seed: stored(target, normal(size, seed), self.dtype)
        wide = "float32" if self.bias else self.dtype  # of the norm's weight
        return Arrays(
            x=make((*self.rows, depth), 0),
            weight=make((columns, depth), 1, depth**-0.5),
            bias=vector(columns, 2) if self.bias else None,
            residual=make((*self.rows, columns), 3) if self.residual else None,
            norm_weight=stored(target, normal(depth, 4), wide) if self.norm else None,
            norm_bias=stored(target, normal(depth, 5), wide) if self.norm == "layer" else None,
        )


def cases(target):
    values = {
        "dtype": list(target.dtypes),
        "rows": ROWS + (MANY_ROWS if target.gpu else []),
        "sizes": SIZES + (LARGE_SIZES if target.gpu else []),
        "activation": [None, "gelu", "gelu_tanh", "silu", "relu"],
        "bias": [False, True],
        "residual": [False, True],
        "norm": ["", "layer", "rms"],
        "storage": ["contiguous", "padded", "unaligned", "transposed"],
        "backend": target.forced_backends,
    }
    return covering(Case, values)


def linear(arrays, activation=None, rms=False, eps=1e-5):
    norm = None
    if arrays.norm_weight is not None:
        norm = cupyflash.Norm(arrays.norm_weight, arrays.norm_bias, eps, rms)
    return cupyflash.linear(
        arrays.x,
        arrays.weight,
        arrays.bias,
        activation=activation,
        residual=arrays.residual,
        norm=norm,
    )


@each_case(cases)
def test_linear(target, case):
    arrays = case.arrays(target)
    out_bytes = int(numpy.prod(case.rows)) * case.sizes[1] * (4 if case.dtype == "float32" else 2)
    poison_free_memory(target.library, target.device, [out_bytes])
    with environment.override(backend=case.backend):
        out = linear(arrays, case.activation, case.norm == "rms")
    options = Options(case.activation or "none", rms=case.norm == "rms")
    expected_projection(arrays, options).check(out=out)


@each_library()
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("rows", [8, 9])
def test_norm_before_deep_rows(target, rows, rms):
    """In the same launch, and from nine rows on in one of its own."""
    depth = 2056
    arrays = Arrays(
        x=stored(target, normal((rows, depth), 0), "float16"),
        weight=stored(target, normal((72, depth), 1), "float16"),
        norm_weight=stored(target, normal(depth, 2), "float16"),
        norm_bias=None if rms else stored(target, normal(depth, 3), "float16"),
    )
    expected_projection(arrays, Options("silu", rms=rms)).check(out=linear(arrays, "silu", rms))


LONG_ROWS = {  # (columns, dtype, storage of bias): a row of each is none of one block
    "odd": (4097, "float16", "contiguous"),
    "unaligned-bias": (5120, "float16", "unaligned"),
    "float32": (12288, "float32", "contiguous"),
    "cluster": (20480, "float16", "contiguous"),
    "longest": (70000, "float16", "contiguous"),
}


@each_library()
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("name", LONG_ROWS)
def test_norm_of_long_rows(target, name, rows):
    depth, dtype, storage = LONG_ROWS[name]
    make = lambda shape, seed, of="contiguous": stored(target, normal(shape, seed), dtype, of)
    arrays = Arrays(
        x=make((rows, depth), 0),
        weight=make((24, depth), 1),
        bias=make(24, 2, storage),
        norm_weight=make(depth, 3),
        norm_bias=make(depth, 4),
    )
    expected_projection(arrays, Options()).check(out=linear(arrays))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("rows", [4, 40])
def test_plans_of_long_rows(monkeypatch, capability, rows):
    """Every norm that stands alone has as many blocks as its kernel needs, without a GPU."""
    from cupyflash.ops.linear import launches
    from cupyflash.ops.norm import plan as norm_plan
    from cupyflash.ops.norm.configs import NormFwd, NormFwdCluster, NormFwdLong
    from cupyflash.runtime import launch as kernel_launch
    from cupyflash.runtime.array import View

    modules = launches, norm_plan, kernel_launch
    fake_facts(monkeypatch, *modules, capability_of=capability, multiprocessors=132)
    launched = []
    fake_kernels(monkeypatch, launched.append)
    found, kinds = [], set()
    for depth in (768, 4097, 5120, 12288, 20480, 70000):
        for dtype, aligned in (("float16", True), ("float16", False), ("float32", True)):
            views = {
                "x": View((rows, depth), (depth, 1), dtype, 0),
                "weight": View((24, depth), (depth, 1), dtype, 0),
                "norm_weight": View((depth,), (1,), dtype, 0),
            }
            norm, _ = launches.launches_of("linear", views, Options(), aligned, None)
            if norm is None:
                continue
            config = next(
                x for x in launched if isinstance(x, (NormFwd, NormFwdCluster, NormFwdLong))
            )
            blocks = {NormFwdCluster: lambda x: rows * x.cluster, NormFwdLong: lambda x: rows}
            of_rows = blocks.get(type(config), lambda x: -(-rows * x.row_threads // x.threads))
            assert norm.grid == of_rows(config)
            kinds.add(type(config))
            found.append(depth)
            launched.clear()
    assert 70000 in found and (rows == 4 or 4097 in found) and NormFwdLong in kinds
    assert (NormFwdCluster in kinds) == (capability == (9, 0))


@each_library()
@pytest.mark.parametrize("rows", [1, 4, 16, 32, 40])
def test_linear_is_repeatable(target, rows):
    """And with small M a row does not depend on the others."""
    x = stored(target, normal((rows, 320), 0), "float16")
    weight = stored(target, normal((200, 320), 1), "float16")
    first = cupyflash.linear(x, weight)
    for _ in range(3):
        assert (cupyflash.linear(x, weight) == first).all()
    if target.gpu and rows <= 32:
        assert (cupyflash.linear(x[:1], weight) == first[:1]).all()


@each_library()
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_weights(target, rows, dtype):
    """Beside an x of 16 bits; the values are such as rounding does not change."""
    if dtype not in target.dtypes:
        pytest.skip(f"{target.name} has no {dtype}")
    half = lambda shape, seed: stored(target, normal(shape, seed), dtype)
    wide = lambda shape, seed: stored(target, to_numpy64(half(shape, seed)), "float32")
    x, residual = half((rows, 40), 0), half((rows, 24), 1)
    arrays = Arrays(x, wide((24, 40), 2), bias=wide(24, 3), residual=residual)
    expected_projection(arrays, Options("gelu")).check(out=linear(arrays, "gelu"))
    down = Arrays(None, wide((8, 24), 4), bias=wide(8, 5))
    up = arrays._replace(gate_weight=wide((24, 40), 6), residual=None)
    names = {"gate_weight": up.gate_weight, "activation": "silu"}
    out = cupyflash.mlp(x, up.weight, down.weight, up.bias, down.bias, **names)
    expected_projection(up, Options("silu"), down).check(out=out)


@each_library()
@pytest.mark.parametrize("rows", [3, 40])
def test_nan_stays_in_its_row(target, rows):
    values = normal((rows, 40), 0)
    values[1, 7] = numpy.nan
    x, weight = stored(target, values, "float32"), stored(target, normal((30, 40), 1), "float32")
    for activation in (None, "relu", "gelu"):
        out = to_float64(cupyflash.linear(x, weight, activation=activation))
        isnan = out != out
        assert isnan[1].all() and not isnan[0].any() and not isnan[2:].any()


@each_library()
def test_empty(target):
    x = stored(target, numpy.zeros((0, 3, 24)), "float16")
    weight = stored(target, normal((16, 24), 1), "float16")
    out = cupyflash.linear(x, weight, stored(target, normal(16, 2), "float16"))
    assert tuple(out.shape) == (0, 3, 16)


@each_library()
def test_one_row_without_axes(target):
    x, weight = (stored(target, normal(shape, 1), "float32") for shape in (24, (5, 24)))
    out = cupyflash.linear(x, weight)
    assert tuple(out.shape) == (5,)
    expected_projection(Arrays(x, weight), Options()).check(out=out)


@each_library()
@pytest.mark.parametrize("rows", [2, 30])
def test_rows_that_do_not_collapse(target, rows):
    """They are copied; an expanded row is not."""
    weight = stored(target, normal((40, 24), 1), "float32")
    values = stored(target, normal((4, 3, 2 * rows, 24), 0), "float32")
    x = values[::2, :, ::2]
    residual = stored(target, normal((4, 3, 2 * rows, 40), 2), "float32")[::2, :, ::2]
    out = cupyflash.linear(x, weight, residual=residual)
    expected_projection(Arrays(x, weight, residual=residual), Options()).check(out=out)
    one = stored(target, normal((1, 24), 0), "float32")
    same = broadcast(one, (rows, 24))
    expected_projection(Arrays(same, weight), Options()).check(out=cupyflash.linear(same, weight))


def test_reference_is_torch():
    """The float64 oracle beside torch's own operations."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    make = lambda *shape: torch.from_numpy(normal(shape, sum(shape))).double()
    x, weight, bias, scale, residual = make(4, 30), make(20, 30), make(20), make(30), make(4, 20)
    activations = {
        "none": lambda z: z,
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "silu": functional.silu,
        "relu": functional.relu,
    }
    arrays = Arrays(
        *(y.numpy() for y in (x, weight)),
        bias=bias.numpy(),
        residual=residual.numpy(),
        norm_weight=scale.numpy(),
    )
    from cupyflash.ops.linear.reference import project

    normed = functional.layer_norm(x, (30,), scale)
    for name, function in activations.items():
        theirs = function(functional.linear(normed, weight, bias)) + residual
        found = project(arrays, Options(name))
        assert_same_oracle(found, theirs)


# Bad input -----------------------------------------------------------------------------------


def bad(target, error, match, **changes):
    arguments = {
        "x": stored(target, normal((4, 16), 0), "float16"),
        "weight": stored(target, normal((8, 16), 1), "float16"),
        "bias": stored(target, normal(8, 2), "float16"),
    } | changes
    with pytest.raises(error, match=f"^linear: .*{match}"):
        cupyflash.linear(**arguments)


@each_library()
def test_bad_input(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    bad(target, ValueError, r"weight.*\(d_out, 16\).*\(8, 15\)", weight=make((8, 15)))
    bad(target, ValueError, r"weight.*\(16,\)", weight=make(16))
    bad(target, ValueError, r"weight.*\(0, 16\)", weight=make((0, 16)))
    bad(
        target, TypeError, "weight.*float16 like x or float32.*int32", weight=make((8, 16), "int32")
    )
    bad(target, ValueError, r"bias.*\(8,\).*\(16,\)", bias=make(16))
    bad(target, TypeError, "residual.*float16 like x.*float32", residual=make((4, 8), "float32"))
    bad(target, ValueError, r"residual.*\(4, 8\).*\(4, 16\)", residual=make((4, 16)))
    bad(target, ValueError, "x must be contiguous", x=make((4, 32))[:, ::2])
    bad(target, ValueError, "weight must be contiguous", weight=make((8, 32))[:, ::2])
    bad(target, ValueError, "bias must be contiguous", bias=make(16)[::2])
    bad(target, ValueError, r"d_in of x must be from 1 to .*got 0 in .*\(4, 0\)", x=make((4, 0)))
    bad(target, TypeError, "bias.*list", bias=[1.0] * 8)
    bad(target, TypeError, "weight.*None", weight=None)
    for activation in ("none", "tanh", 3, "GELU"):
        bad(target, ValueError, "activation.*'gelu'", activation=activation)


@each_library()
def test_bad_norm(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    norm = lambda *arguments: cupyflash.Norm(*arguments)
    bad(target, TypeError, "norm must be a cupyflash.Norm.*str", norm="layer")
    bad(target, TypeError, "weight of norm.*None", norm=norm(None))
    bad(target, ValueError, r"weight of norm.*\(16,\).*\(8,\)", norm=norm(make(8)))
    bad(target, ValueError, r"bias of norm.*\(8,\)", norm=norm(make(16), make(8)))
    bad(target, ValueError, "RMSNorm", norm=norm(make(16), make(16), 1e-5, True))
    bad(target, ValueError, "eps.*-1", norm=norm(make(16), None, -1.0))
    unlike = norm(make(16, "float32"), make(16))
    bad(
        target,
        TypeError,
        "bias of norm must be float32 like weight of norm, got float16",
        norm=unlike,
    )
    other = "bfloat16" if "bfloat16" in target.dtypes else "int32"
    if other == "bfloat16":
        bad(target, TypeError, "weight of norm.*float32", norm=norm(make(16, other)))


@each_library(device="cuda")
def test_host_time_is_one_look_up(target, monkeypatch):
    """A second call of the same signature checks nothing again."""
    from cupyflash.ops.linear import plan

    x, weight = (stored(target, normal(shape, 1), "float16") for shape in ((4, 24), (8, 24)))
    first = cupyflash.linear(x, weight)
    monkeypatch.setattr(plan, "LinearPlan", None)
    assert (cupyflash.linear(x, weight) == first).all()


# Which kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "rows", "sizes", "backend", "kernel"),
    [
        ((9, 0), "bfloat16", 4, (4096, 14336), None, "LinearSmallM"),  # long rows of many weights
        ((9, 0), "bfloat16", 4, (4096, 4096), None, "LinearSmallMSm90"),
        ((9, 0), "bfloat16", 8, (14336, 4096), None, "LinearSmallMSm90"),  # too little room for x
        ((9, 0), "bfloat16", 16, (772, 768), None, "LinearSmallM"),
        ((9, 0), "bfloat16", 16, (4096, 4096), "sm80", "LinearSmallM"),
        ((9, 0), "float32", 16, (768, 2304), None, "LinearSmallM"),
        ((9, 0), "bfloat16", 32, (768, 2301), None, "LinearSmallMSm90"),
        ((9, 0), "bfloat16", 33, (768, 2304), None, "LinearSm90"),
        ((8, 0), "bfloat16", 16, (16384, 4096), None, "LinearMma"),  # x has no room
        ((8, 6), "float16", 32, (1600, 4800), None, "LinearMma"),  # too little for the weights
        ((9, 0), "float16", 4096, (768, 2304), "sm90", "LinearSm90"),
        ((9, 0), "float16", 4096, (768, 2304), "sm80", "LinearMma"),
        ((9, 0), "float16", 4096, (768, 2301), None, "LinearMma"),
        ((9, 0), "float16", 4096, (767, 2304), None, "LinearMma"),
        ((9, 0), "float32", 4096, (768, 2304), None, "LinearSimt"),
        ((9, 0), "float16", 1, (768, 2304), "simt", "LinearSimt"),
        ((10, 0), "bfloat16", 4096, (768, 2304), None, "LinearMma"),
        ((7, 5), "bfloat16", 4096, (768, 2304), None, "LinearSimt"),
        ((7, 5), "bfloat16", 4, (768, 2304), None, "LinearSmallM"),
        ((7, 0), "float16", 4, (768, 2304), None, "LinearSimt"),
    ],
)
def test_choice(monkeypatch, capability, dtype, rows, sizes, backend, kernel):
    from cupyflash.ops.linear import launches
    from cupyflash.runtime.array import View
    from cupyflash.runtime.structs import header

    structs = header("linear/params.cuh")

    fake_facts(monkeypatch, launches, capability_of=capability, multiprocessors=132)
    depth, columns = sizes
    views = {
        "x": View((rows, depth), (depth, 1), dtype, 0),
        "weight": View((columns, depth), (depth, 1), dtype, 0),
    }
    params = structs.LinearParams(rows=rows, columns=columns, depth=depth, x_stride=depth)
    arguments = (True, backend)
    config = launches.small_m_kernel(views, Options(), *arguments)
    config = config or launches.many_kernel(views, Options(), params, *arguments)
    assert type(config).__name__ == kernel
    assert config.grid(rows, columns, 132) >= 1
