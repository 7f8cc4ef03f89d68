"""LayerNorm and RMSNorm, forward and backward, on every library."""

import dataclasses
import gc

import numpy
import pytest
from arrays import assert_same_oracle, broadcast, normal, spread_out, stored, to_numpy
from fakes import fake_facts, fresh_plans, without_detour
from matrix import covering, each_case, each_library

import cupyflash
from cupyflash.ops.norm import dispatch, kernels, plan, reference
from cupyflash.ops.norm.configs import NormBwd, NormBwdCluster, NormFwd, NormFwdCluster, NormFwdLong
from cupyflash.runtime.gpu import architecture
from cupyflash.runtime.launch import clusters_at_once
from cupyflash.runtime.libraries import NumpyLibrary
from cupyflash.runtime.lookup import library_of
from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.testing import expected_norm, poison_free_memory, to_float64
from cupyflash.testing.tolerance import assert_close_to_float64

EPS = {False: 1e-5, True: 1e-6}  # by whether it is an RMSNorm
COLUMNS = [1, 3, 8, 33, 64, 200, 256, 768, 1000, 1024, 1536, 4096, 5000]
LONG = [8192, 9001, 16384, 16392, 20008, 65536, 65544]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    dtype: str
    columns: int
    rows: tuple[int, ...]
    rms: bool
    wide_weight: bool
    bias: bool
    residual: bool
    storage: str

    def arrays(self, target, seed=0):
        """(dout, x, weight, bias, residual, dresidual); None where there is none."""
        shape, kind = (*self.rows, self.columns), self.dtype
        of_weight = "float32" if self.wide_weight else kind
        make = lambda i, mean=0.0: stored(
            target, normal(shape, (seed, i), mean=mean), kind, self.storage
        )
        weights = [normal(self.columns, (seed, i)) for i in (6, 7)]
        weight, bias = (stored(target, y, of_weight) for y in weights)
        return (
            make(0),
            make(1, mean=2.0),
            weight,
            bias if self.bias and not self.rms else None,
            make(2) if self.residual else None,
            make(3) if self.residual else None,
        )


def cases(target):
    values = {
        "dtype": list(target.dtypes),
        "columns": COLUMNS + (LONG if target.gpu else LONG[1:2]),
        "rows": [(1,), (5,), (2, 3), (3, 2, 7), *([(300,), (4099,)] if target.gpu else [])],
        "rms": [False, True],
        "wide_weight": [False, True],
        "bias": [False, True],
        "residual": [False, True],
        "storage": ["contiguous", "padded", "unaligned", "transposed"],
    }
    # The oracle is float64 on the CPU: many rows, or long ones.
    short = lambda case: case.columns < 2000 or case.rows != (4099,)
    fewer = lambda case: dataclasses.replace(case, rows=(67,))
    return [case if short(case) else fewer(case) for case in covering(Case, values)]


def forward(case_rms, x, weight, bias, residual, **options):
    if case_rms:
        return cupyflash.rms_norm(x, weight, residual=residual, **options)
    return cupyflash.layer_norm(x, weight, bias, residual=residual, **options)


def backward(rms, dout, h, weight, stats, dresidual):
    function = cupyflash.rms_norm_backward if rms else cupyflash.layer_norm_backward
    names = ("dx", "dweight", "dbias")
    return dict(zip(names, function(dout, h, weight, stats, dresidual=dresidual)))


@each_case(cases)
def test_norm(target, case):
    dout, x, weight, bias, residual, dresidual = case.arrays(target)
    size = numpy.prod(x.shape) * (4 if case.dtype == "float32" else 2)
    poison_free_memory(target.library, target.device, [int(size)] * 2)
    out, *h, stats = forward(case.rms, x, weight, bias, residual, return_stats=True)
    values = h[0] if h else x
    gradients = backward(case.rms, dout, values, weight, stats, dresidual)
    exact = expected_norm(case.rms, dout, x, weight, bias, residual, dresidual, eps=EPS[case.rms])
    exact.check(out=out, stats=stats, **({"h": h[0]} if h else {}), **gradients)


@each_library()
@pytest.mark.parametrize("columns", [768, 20008, 65536])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_results_are_repeatable(target, rms, columns):
    rows = (3000 if target.gpu else 3,)
    case = Case(target.dtypes[0], columns, rows, rms, True, True, True, "")
    dout, x, weight, bias, residual, dresidual = case.arrays(target)
    outputs = forward(rms, x, weight, bias, residual, return_stats=True)
    again = forward(rms, x, weight, bias, residual, return_stats=True)
    assert all((a == b).all() for a, b in zip(outputs, again, strict=True))
    _, h, stats = outputs
    first = backward(rms, dout, h, weight, stats, dresidual)
    for _ in range(3):
        for name, again in backward(rms, dout, h, weight, stats, dresidual).items():
            assert (again == first[name]).all(), f"{name} differs between two runs"


def assert_sums_are_accurate(found, terms, name):
    """Beside sums over rows that NumPy adds up pairwise: a chain of all rows loses a digit."""
    pairwise = numpy.ascontiguousarray(terms.T.astype("float32")).sum(-1)
    assert_close_to_float64(found, terms.sum(0, dtype="float64"), pairwise, "float32", name)


@each_library()
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("columns, storage", [(64, ""), (1024, ""), (5000, "unaligned")])
def test_sums_over_many_rows(target, rms, columns, storage, monkeypatch):
    """The last in one share, as of rows so long that few shares fill the GPU."""
    if columns == 5000:
        fake_facts(monkeypatch, plan, multiprocessors=1)
        monkeypatch.setattr(plan, "WEIGHT_BLOCKS", 1)
        fresh_plans(monkeypatch, dispatch)
    if not target.gpu and columns > 64:
        pytest.skip("the reference adds up in one way, whatever the length of a row")
    dout, x = (normal((4096, columns), seed) for seed in (1, 2))
    arrays = [stored(target, y, "float32", storage) for y in (dout, x)]
    weight = stored(target, numpy.ones(columns), "float32")
    *_, stats = forward(rms, arrays[1], weight, None, None, return_stats=True)
    found = backward(rms, *arrays, weight, stats, None)
    mean, scale = numpy.split(to_numpy(stats).astype("float64"), 2, -1)
    assert_sums_are_accurate(found["dweight"], dout * ((x - mean) * scale), "dweight")
    if not rms:
        assert_sums_are_accurate(found["dbias"], dout, "dbias")


@pytest.mark.parametrize(
    ("capability", "most"),
    [((7, 5), 1024), ((8, 0), 2048), ((8, 9), 1536), ((9, 0), 2048), ((12, 0), 1536)],
    ids=str,
)
def test_forward_blocks_fit(capability, most):
    """The registers of a kernel are bounded for no more threads than a multiprocessor has."""
    for config in set(kernels.configurations(capability)):
        if isinstance(config, NormFwd | NormFwdCluster):
            assert 1 <= config.blocks <= most // config.threads, config


@pytest.mark.parametrize(
    ("dtype", "columns", "cluster"),
    [
        *(("float16", 16384, None), ("float16", 16392, 4), ("bfloat16", 32768, 4)),
        *(("float16", 32776, 8), ("bfloat16", 65536, 8), ("float16", 65544, 0)),
        *(("float32", 8192, None), ("float32", 8196, 4), ("float32", 32768, 8)),
        ("float32", 32772, 0),
    ],
)
def test_long_rows_take_clusters(dtype, columns, cluster):
    """Of an H100 or H200, where 16-byte loads are possible; 0: rows in pieces."""
    which = lambda aligned, capability: kernels.forward(
        dtype, "float32", False, columns, aligned, capability
    )
    found = which(True, (9, 0))
    assert columns <= getattr(found, "columns", columns)
    if cluster is None:
        assert isinstance(found, NormFwd)
    else:
        assert getattr(found, "cluster", 0) == cluster
        assert not isinstance(found, NormFwd)
        for other in (which(False, (9, 0)), which(True, (8, 0)), which(True, (10, 0))):
            assert isinstance(other, NormFwdLong)


@each_library(library="cupy", device="cuda")
def test_clusters_at_once(target):
    """Not more than have a multiprocessor for each block, which the backward takes as a whole."""
    import cupy

    device = cupy.cuda.Device()
    capability = divmod(int(device.compute_capability), 10)
    for columns in (16384, 32768, 65536):
        config = kernels.backward("float16", "float16", False, columns, True, capability)
        if isinstance(config, NormBwdCluster):
            most = device.attributes["MultiProcessorCount"] // config.cluster
            assert most // 2 < clusters_at_once(config, device.id) <= most


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
def test_backward_memory_fits(capability):
    """Two rows on their way at least, and room for the shares of all rows of a block."""
    for config in set(kernels.configurations(capability)):
        if not isinstance(config, NormBwd | NormBwdCluster):
            continue
        limit = 1024 * architecture(capability).shared_memory - kernels.STATIC_MEMORY
        assert config.shared_memory <= limit and config.threads <= 512, config
        assert config.stages > 1 or config.vector == 1 or capability < (8, 0), config
        assert 4 * config.threads * config.loads * config.vector <= config.shared_memory, config


@each_library(library="torch", device="cuda")
@pytest.mark.parametrize("columns", [768, 8192, 20008])
def test_backward_in_a_cuda_graph(target, columns):
    """Launched twice, beside the same on another stream."""
    import torch

    case = Case("float16", columns, (300,), False, False, False, True, "contiguous")
    dout, x, weight, _, _, dresidual = case.arrays(target)
    _, stats = cupyflash.layer_norm(x, weight, return_stats=True)
    step = lambda: cupyflash.layer_norm_backward(dout, x, weight, stats, dresidual=dresidual)
    right = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collected(), torch.cuda.graph(graph):
        captured = step()
    side = torch.cuda.Stream()
    for _ in range(2):
        graph.replay()
        with torch.cuda.stream(side):
            beside = step()
        torch.cuda.synchronize()
        for found in (captured, beside):
            assert all((a == b).all() for a, b in zip(found, right, strict=True))


@each_library()
@pytest.mark.parametrize("columns", [999, 20000])
@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_a_large_mean_does_not_cancel(target, offset, columns):
    """E[x^2] - E[x]^2 in float32 would leave nothing of the variance."""
    x = stored(target, normal((4, columns), 1, mean=offset), "float32")
    weight = stored(target, numpy.ones(columns), "float32")
    dout = stored(target, normal((4, columns), 2), "float32")
    out, stats = cupyflash.layer_norm(x, weight, return_stats=True)
    expected_norm(False, dout, x, weight, eps=1e-5).check(out=out, stats=stats)


@each_library()
def test_nan_stays_in_its_row(target):
    values = normal((3, 40), 0)
    values[1, 7] = numpy.nan
    x, weight = stored(target, values, "float32"), stored(target, normal(40, 1), "float32")
    for out in (cupyflash.layer_norm(x, weight), cupyflash.rms_norm(x, weight)):
        isnan = to_float64(out) != to_float64(out)
        assert isnan[1].all() and not isnan[::2].any()


@each_library()
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_empty(target, rms):
    x = stored(target, numpy.zeros((0, 3, 24)), "float16")
    weight = stored(target, normal(24, 1), "float16")
    out, h, stats = forward(rms, x, weight, None, x, return_stats=True)
    assert tuple(out.shape) == tuple(h.shape) == (0, 3, 24) and tuple(stats.shape) == (0, 3, 2)
    dx, dweight, *_ = backward(rms, x, h, weight, stats, None).values()
    assert tuple(dx.shape) == (0, 3, 24) and (to_float64(dweight) == 0).all()


@each_library()
def test_many_row_axes(target):
    """Axes that do not collapse: four are allowed, in any order."""
    values = normal((3, 4, 2, 5, 24), 0)
    x = stored(target, values, "float32")
    x = x.permute(3, 0, 2, 1, 4) if target.library == "torch" else x.transpose(3, 0, 2, 1, 4)
    x, weight = x[1::2], stored(target, normal(24, 1), "float32")
    dout = stored(target, normal(tuple(x.shape), 2), "float32")
    out, stats = cupyflash.layer_norm(x, weight, return_stats=True)
    gradients = backward(False, dout, x, weight, stats, None)
    expected_norm(False, dout, x, weight, eps=1e-5).check(out=out, stats=stats, **gradients)


# Arrays that the kernels cannot take as they are --------------------------------------------


SPREAD = [(2, 3, 2, 3, 2, 3, 24), (3, 2, 3, 2, 2, 33), (5, 40)]


@each_library()
@pytest.mark.parametrize("shape", SPREAD, ids=str)
@pytest.mark.parametrize("which", ["x", "dout", "dresidual", "residual", "all"])
def test_axes_that_do_not_collapse(target, shape, which):
    """Of any of the arrays, also where its last dimension is not the contiguous one."""
    names = ("dout", "x", "residual", "dresidual")
    made = {
        name: (spread_out if which in (name, "all") else stored)(target, normal(shape, i), kind)
        for i, (name, kind) in enumerate(zip(names, ["float32"] * 4))
    }
    weight, bias = (stored(target, normal(shape[-1], i), "float32") for i in (8, 9))
    residual, dresidual = made["residual"], made["dresidual"]
    out, h, stats = forward(
        False, made["x"], weight, bias, residual, return_stats=True, eps=EPS[False]
    )
    values = spread_out(target, to_numpy(h)) if which in ("x", "all") else h
    gradients = backward(False, made["dout"], values, weight, stats, dresidual)
    exact = expected_norm(
        False, made["dout"], made["x"], weight, bias, residual, dresidual, eps=EPS[False]
    )
    exact.check(out=out, h=h, stats=stats, **gradients)


@each_library()
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_expanded_gradients(target, rms):
    """As sums leave them: one number, or one row, for all."""
    shape = (3, 2, 4, 2, 3, 24)
    x, weight = (
        stored(target, normal(shape, 0), "float32"),
        stored(target, normal(24, 1), "float32"),
    )
    _, stats = forward(rms, x, weight, None, None, return_stats=True)
    for size in (1, 24):
        row = stored(target, normal(size, 2), "float32")
        dout = broadcast(row, shape)
        gradients = backward(rms, dout, x, weight, stats, None)
        expected_norm(rms, dout, x, weight, eps=EPS[rms]).check(**gradients)


@each_library()
@pytest.mark.parametrize("columns", [24, 33, 20008])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_without_weight(target, rms, columns):
    for dtype in target.dtypes:
        make = lambda i: stored(target, normal((5, columns), i), dtype)  # noqa: B023
        dout, x, residual, dresidual = map(make, range(4))
        out, h, stats = forward(rms, x, None, None, residual, return_stats=True)
        dx, *others = backward(rms, dout, h, None, stats, dresidual).values()
        exact = expected_norm(rms, dout, x, None, None, residual, dresidual, eps=EPS[rms])
        exact.check(out=out, h=h, stats=stats, dx=dx)
        assert others == [None] * len(others)


@each_library()
@pytest.mark.parametrize("columns", [24, 33, 20008])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("weight", ["same", "float32", "none"])
def test_float32_residual(target, rms, columns, weight):
    """The stream of residuals in float32 beside 16-bit x: h and its gradient are float32."""
    for dtype in {"float16", "bfloat16"} & set(target.dtypes):
        make = lambda i, kind: stored(target, normal((5, columns), i), kind, "padded")
        (dout, x), (residual, dresidual) = (
            [make(i, kind) for i in numbers]
            for numbers, kind in (((0, 1), dtype), ((2, 3), "float32"))
        )
        kind = dtype if weight == "same" else "float32"
        scale = None if weight == "none" else stored(target, normal(columns, 4), kind)
        bias = None if rms or scale is None else stored(target, normal(columns, 5), kind)
        out, h, stats = forward(rms, x, scale, bias, residual, return_stats=True)
        gradients = backward(rms, dout, h, scale, stats, dresidual)
        exact = expected_norm(rms, dout, x, scale, bias, residual, dresidual, eps=EPS[rms])
        found = {name: y for name, y in gradients.items() if y is not None}
        assert set(found) == {"dx"} if scale is None else set(gradients)
        exact.check(out=out, h=h, stats=stats, **found)


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("what", ["axes", "wide", "weight"])
def test_detours(monkeypatch, name, what):
    """What a GPU goes through, with the operations of a CPU behind it."""
    torch = pytest.importorskip("torch")
    without_detour(monkeypatch, dispatch)
    make = lambda i, dtype=torch.float16: torch.from_numpy(normal((2, 3, 2, 3, 2, 40), i)).to(dtype)
    stream = torch.float32 if what == "wide" else torch.float16
    x, residual, dout, h, dresidual = (
        make(i, stream if i in (1, 3, 4) else torch.float16) for i in range(5)
    )
    if what == "axes":
        x, dout, dresidual = (
            y.permute(4, 2, 0, 3, 1, 5).contiguous().permute(2, 4, 1, 3, 0, 5)
            for y in (x, dout, dresidual)
        )
    weight = None if what == "weight" else torch.from_numpy(normal(40, 9)).half()
    library, calls = library_of(x), []
    call, of_forward = getattr(dispatch, name), (False, 1e-5, True, 0.0, None)
    if name == "forward":
        names, options, more = ("x", "residual", "weight", "bias"), of_forward, [True]
        arrays = (x, residual, weight, None, None)
        of_detour = (False, 1e-5, 0.0)
    else:
        given = (h, None, None, None, None)
        stats = dispatch.forward("f", library, given, of_forward)[2]
        names, options, more = ("dout", "x", "weight", "stats", "dresidual"), (False, True), []
        arrays, of_detour = (dout, h, weight, stats, dresidual, None), options
        options = (*options, 0.0, None)

    def run(*arrays):  # of the order of `names`
        if name == "forward":
            arrays = (arrays[0], arrays[2], arrays[3], arrays[1])
        return call("f", library, (*arrays, None), options)

    def seen(function, library, arrays, options):
        calls.append(arrays)
        return call(function, library, arrays, options)

    def detour_of(arrays):
        views = {key: library.view(y) for key, y in zip(names, arrays) if y is not None}
        return getattr(dispatch, f"_{name}_detour")("f", library, views, *of_detour)

    monkeypatch.setattr(dispatch, name, seen)
    found = detour_of(arrays)(arrays, [], *more)
    ((*inner, _),) = calls
    if name == "forward":
        inner = (inner[0], inner[3], inner[1], inner[2])
    assert detour_of(inner) is None, "needs no other detour"
    for ours, right in zip(found, run(*arrays[: len(names)]), strict=True):
        assert (ours is None) == (right is None)
        if ours is not None:
            assert ours.dtype == right.dtype and ours.stride() == right.stride()
            torch.testing.assert_close(ours, right, rtol=0, atol=0)


def test_arrays_that_need_no_detour():
    library = NumpyLibrary()
    x, weight = numpy.ones((4, 3, 8), "float32"), numpy.ones(8, "float32")
    views = {name: library.view(y) for name, y in (("x", x[:, ::2]), ("weight", weight))}
    assert dispatch._forward_detour("f", library, views, False, 1e-5, 0.0) is None


@each_library(library="torch")
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_autograd(target, rms):
    """All gradients, and those of some inputs only; dout may be an expanded scalar."""
    import torch

    case = Case("float32", 48, (3, 7), rms, False, True, True, "contiguous")
    dout, x, weight, bias, residual, dresidual = case.arrays(target)
    inputs = [y for y in (x, weight, bias, residual) if y is not None]
    for y in inputs:
        y.requires_grad_()
    out, h = forward(rms, x, weight, bias, residual)
    names = [n for n in ("dx", "dweight", "dbias") if n != "dbias" or not rms] + ["dx"]
    found = torch.autograd.grad((out, h), inputs, (dout, dresidual), retain_graph=True)
    detached = [None if y is None else y.detach() for y in (x, weight, bias, residual)]
    exact = expected_norm(rms, dout, *detached, dresidual, eps=EPS[rms])
    for name, gradient in zip(names, found):
        exact.check(**{name: gradient})
    (of_h,) = torch.autograd.grad(h, [x], dresidual, retain_graph=True)
    assert (of_h == dresidual).all()
    (dweight,) = torch.autograd.grad(out.sum(), [weight])
    ones = torch.ones_like(dout)
    expected_norm(rms, ones, *detached, eps=EPS[rms]).check(dweight=dweight)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_reference_is_torch(rms):
    """The float64 oracle beside torch's own, with its own gradients."""
    torch = pytest.importorskip("torch")
    x, dout = (torch.from_numpy(normal((4, 30), i)).double() for i in (0, 1))
    weight, bias = (torch.from_numpy(normal(30, i)).double() for i in (2, 3))
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    functional = torch.nn.functional
    if rms:
        out = functional.rms_norm(x, (30,), weight, 1e-6)
    else:
        out = functional.layer_norm(x, (30,), weight, bias, 1e-5)
    gradients = torch.autograd.grad(out, inputs[: 3 - rms], dout)
    arrays = [y.detach().numpy() for y in (x, weight, bias)]
    found, stats = reference.norm(rms, *arrays[:2], None if rms else arrays[2], EPS[rms])
    assert_same_oracle(found, out.detach())
    ours = reference.norm_backward(rms, dout.numpy(), *arrays[:2], stats, None)
    for mine, theirs in zip(ours, gradients):
        assert_same_oracle(mine, theirs)


# Bad input -----------------------------------------------------------------------------------


def bad(target, error, match, **changes):
    arguments = {
        "x": stored(target, normal((4, 16), 0), "float16"),
        "weight": stored(target, normal(16, 1), "float16"),
        "bias": stored(target, normal(16, 2), "float16"),
    } | changes
    with pytest.raises(error, match=f"^layer_norm: .*{match}"):
        cupyflash.layer_norm(**arguments)


@each_library()
def test_bad_input(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    bad(target, ValueError, r"weight.*\(16,\).*\(15,\)", weight=make(15))
    bad(target, ValueError, r"bias.*\(16,\).*\(1, 16\)", bias=make((1, 16)))
    bad(target, TypeError, "weight.*float16 like x or float32.*int32", weight=_int32(target, 16))
    bad(
        target, TypeError, "bias must be float16 like weight, got float32", bias=make(16, "float32")
    )
    bad(target, ValueError, r"residual.*\(4, 16\).*\(4, 15\)", residual=make((4, 15)))
    wide = {"x": make((4, 16), "float32"), "weight": make(16, "float32"), "bias": None}
    bad(target, TypeError, "residual.*float32.*float16", **wide, residual=make((4, 16)))
    bad(target, ValueError, "weight.*contiguous", weight=make(32)[::2])
    bad(target, ValueError, r"columns of x must be from 1 to .*got 0 in .*\(4, 0\)", x=make((4, 0)))
    bad(target, TypeError, "bias.*list", bias=[1.0] * 16)
    bad(target, TypeError, "weight.*bias.*None", weight=None)
    for eps in (-1.0, float("nan"), float("inf")):
        bad(target, ValueError, "eps", eps=eps)
    for eps in (None, "1", True, make((1,), "float32")):
        bad(target, TypeError, "eps", eps=eps)


@each_library()
def test_bad_backward_input(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    good = [make((4, 16)), make((4, 16)), make(16), make((4, 2), "float32")]
    for position, wrong, error, match in [
        (0, make((3, 16)), ValueError, "dout"),
        (0, make((4, 16), "float32"), TypeError, "dout.*float16.*float32"),
        (2, make(17), ValueError, "weight"),
        (3, make((4, 2)), TypeError, "stats.*float32"),
        (3, make((5, 2), "float32"), ValueError, "stats"),
        (3, make((4, 4), "float32")[:, ::2], ValueError, "stats.*contiguous"),
    ]:
        arguments = [*good[:position], wrong, *good[position + 1 :]]
        with pytest.raises(error, match=f"^layer_norm_backward: .*{match}"):
            cupyflash.layer_norm_backward(*arguments)


def _int32(target, size):
    values = stored(target, numpy.ones(size), "float32")
    return values.int() if target.library == "torch" else values.astype("int32")


@each_library(device="cuda")
def test_host_time_is_one_look_up(target, monkeypatch):
    """A second call of the same signature checks nothing again."""
    x = stored(target, normal((4, 24), 0), "float16")
    weight = stored(target, normal(24, 1), "float16")
    first = cupyflash.layer_norm(x, weight)
    monkeypatch.setattr(dispatch, "ForwardPlan", None)
    assert (cupyflash.layer_norm(x, weight) == first).all()


@each_library(device="cuda")
def test_memory_of_many_shapes(target):
    """What a hundred shapes leave behind is no memory of the GPU, with any detour."""
    import cupy

    def allocated():
        target.synchronize()
        gc.collect()
        found = cupy.get_default_memory_pool().used_bytes()
        if target.library == "torch":
            import torch

            found += torch.cuda.memory_allocated()
        return found

    def run(rows):
        make = lambda shape, dtype="float16": stored(target, normal(shape, rows), dtype)
        x, residual = make((rows, 2, 40)), make((rows, 2, 40), "float32")
        weight = make(40)
        _, h, stats = cupyflash.layer_norm(x, weight, residual=residual, return_stats=True)
        cupyflash.layer_norm_backward(x, h, weight, stats)
        out, stats = cupyflash.rms_norm(x[..., ::2], return_stats=True)
        cupyflash.rms_norm_backward(out, x[..., ::2], None, stats)
        image = make((2, 8, rows, 6))
        out, stats = cupyflash.group_norm(image[..., :5], 2, return_stats=True)
        cupyflash.group_norm_backward(out, image[..., :5], None, None, stats)

    run(3)
    before = allocated()
    for rows in range(4, 104):
        run(rows)
    assert allocated() <= before
