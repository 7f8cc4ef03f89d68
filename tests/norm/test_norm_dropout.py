"""Dropout before LayerNorm and RMSNorm: what it keeps, and results with that very mask."""

import dataclasses

import numpy
import pytest
from arrays import normal, seed_generator, spread_out, stored, to_numpy
from fakes import without_detour
from matrix import covering, each_case, each_library
from passes import one_graph, without_gradient

import cupyflash
from cupyflash.ops.norm import dispatch, dropout, kernels
from cupyflash.runtime.array import View
from cupyflash.runtime.libraries import NumpyLibrary
from cupyflash.runtime.lookup import library_of
from cupyflash.runtime.operation import Plan
from cupyflash.runtime.philox import dropout_threshold, keep_mask, keep_rows, philox
from cupyflash.runtime.rows import result_strides, rows_to_copy
from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.testing import expected_norm, poison_free_memory, to_float64

EPS = {False: 1e-5, True: 1e-6}  # by whether it is an RMSNorm
SEED = 2**41 + 12345
SIGMAS = 6  # one in 500 million fails by chance, and the seeds are fixed


def threshold(p):
    return round(p * 65536)


def factors(p, shape, seed=SEED):
    """What dropout multiplies by, float64."""
    rows = int(numpy.prod(shape[:-1]))
    kept = keep_rows(seed, threshold(p), range(rows), shape[-1]).reshape(shape)
    return kept / (1 - threshold(p) / 65536)


def forward(rms, x, weight, bias, residual, **options):
    options = {"dropout_p": 0.3, "dropout_seed": SEED, "eps": EPS[rms], **options}
    if rms:
        return cupyflash.rms_norm(x, weight, residual=residual, **options)
    return cupyflash.layer_norm(x, weight, bias, residual=residual, **options)


def backward(rms, *arrays, dresidual=None, **options):
    options = {"dropout_p": 0.3, "dropout_seed": SEED, **options}
    function = cupyflash.rms_norm_backward if rms else cupyflash.layer_norm_backward
    names = ("dx", "dweight", "dh") if rms else ("dx", "dweight", "dbias", "dh")
    return dict(zip(names, function(*arrays, dresidual=dresidual, **options), strict=True))


# Which elements --------------------------------------------------------------------------------


def test_the_mask_is_what_its_definition_says():
    """Element by element, also in rows beyond 2^32."""
    for first in (0, 2**32 - 2):
        rows = range(first, first + 4)
        kept = keep_rows(SEED, 30000, rows, 21)
        for i, row in enumerate(rows):
            for column in range(21):
                counter = (column // 8, row % 2**32, row // 2**32, 2)
                words = philox(SEED, tuple(numpy.array([x], "uint64") for x in counter))
                word = int(words[column % 8 // 2][0])
                bits = word >> 16 if column % 2 else word & 0xFFFF
                assert kept[i, column] == (bits >= 30000), (row, column)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_kept_fraction(p):
    kept = keep_rows(SEED, threshold(p), range(1024), 1000)
    p = threshold(p) / 65536
    for axes in ((0, 1), (0,), (1,)):
        count = numpy.prod([kept.shape[axis] for axis in axes])
        sigma = (p * (1 - p) / count) ** 0.5
        assert abs(kept.mean(axis=axes) - (1 - p)).max() < SIGMAS * sigma


def same(first, second):
    """How far the fraction of equal masks is from chance, in standard deviations."""
    return abs((first == second).mean() - 0.5) / (0.5 / first.size**0.5)


def test_neighbours_seeds_and_users_are_independent():
    kept = keep_rows(SEED, 32768, range(512), 512)
    for shift in ((0, 1), (0, 2), (0, 4), (0, 8), (1, 0), (8, 8)):
        assert same(kept, numpy.roll(kept, shift, axis=(0, 1))) < SIGMAS
    for seed in (SEED + 1, SEED + 2**32, SEED ^ 2**62):
        assert same(kept, keep_rows(seed, 32768, range(512), 512)) < SIGMAS
    head = numpy.zeros(1, "uint64")
    of_attention = keep_mask(SEED, 32768, head, range(512), range(512))[0]
    assert same(kept, of_attention) < SIGMAS
    for place in range(8):  # of the numbers of an attention's counter, whatever their order
        assert same(kept[:, place::8], of_attention[:, :64]) < SIGMAS


@each_library()
@pytest.mark.parametrize("storage", ["contiguous", "padded", "unaligned", "transposed"])
@pytest.mark.parametrize("columns", [1, 3, 8, 20, 64, 1000, 4097])
def test_every_library_drops_the_same(target, columns, storage):
    """Whatever the dtype, the strides and the kernel that they lead to."""
    shape = (5, 37, columns)
    right = factors(0.3, shape) > 0
    for dtype in target.dtypes:
        x = stored(target, numpy.ones(shape), dtype, storage)
        for kind in dict.fromkeys((dtype, "float32")):
            residual = stored(target, numpy.zeros(shape), kind)
            _, h = forward(False, x, None, None, residual)
            assert ((to_numpy(to_float64(h)) > 0) == right).all(), (dtype, kind)


@each_library()
def test_kinds_of_seeds(target):
    """An integer of Python or NumPy, an array of one element or of no dimensions."""
    x = stored(target, normal((9, 40), 0), "float16")
    right = forward(True, x, None, None, None)
    array = target.array(numpy.array([SEED]))
    for seed in (numpy.int64(SEED), array, array.reshape(())):
        assert (forward(True, x, None, None, None, dropout_seed=seed) == right).all()
    assert not (forward(True, x, None, None, None, dropout_seed=SEED + 1) == right).all()


@each_library()
def test_without_a_seed_it_follows_the_generator(target):
    x = stored(target, normal((9, 40), 0), "float16")
    call = lambda: cupyflash.layer_norm(x, dropout_p=0.5)
    seed_generator(target, 1)
    first, second = call(), call()
    seed_generator(target, 1)
    assert (call() == first).all() and not (first == second).all()


@each_library()
def test_nothing_is_dropped_where_p_is_an_integer_0(target):
    x = stored(target, normal((9, 40), 0), "float16")
    assert (cupyflash.layer_norm(x, dropout_p=0) == cupyflash.layer_norm(x)).all()


# Results ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    dtype: str
    columns: int
    rows: tuple[int, ...]
    rms: bool
    weight: str
    bias: bool
    residual: str
    storage: str
    p: float


def cases(target):
    values = {
        "dtype": list(target.dtypes),
        "columns": [1, 3, 8, 33, 200, 768, 1000, 4096, 9001, *([16384, 65544] * target.gpu)],
        "rows": [(1,), (5,), (3, 2, 7), *([(300,)] * target.gpu)],
        "rms": [False, True],
        "weight": ["same", "float32", "no"],
        "bias": [False, True],
        "residual": ["same", "float32", "no"],
        "storage": ["contiguous", "padded", "unaligned", "transposed"],
        "p": [1e-6, 0.1, 0.5, 0.99],
    }
    return covering(Case, values)


@each_case(cases)
def test_results(target, case):
    shape, kind = (*case.rows, case.columns), case.dtype
    wide = {"same": kind, "float32": "float32"}
    make = lambda i, dtype: stored(target, normal(shape, i), dtype, case.storage)
    dout, x = make(0, kind), make(1, kind)
    residual = dresidual = weight = bias = None
    if case.residual in wide:
        residual, dresidual = (make(i, wide[case.residual]) for i in (2, 3))
    if case.weight in wide:
        weight = stored(target, normal(case.columns, 4), wide[case.weight])
        if case.bias and not case.rms:
            bias = stored(target, normal(case.columns, 5), wide[case.weight])
    options = {"dropout_p": case.p, "dropout_seed": SEED}
    size = int(numpy.prod(shape)) * (4 if kind == "float32" else 2)
    poison_free_memory(target.library, target.device, [size] * 3)
    out, h, stats = forward(case.rms, x, weight, bias, residual, return_stats=True, **options)
    found = backward(case.rms, dout, h, weight, stats, dresidual=dresidual, **options)
    exact = expected_norm(
        case.rms, dout, x, weight, bias, residual, dresidual,
        eps=EPS[case.rms], factors=factors(case.p, shape),
    )  # fmt: skip
    given = {name: y for name, y in found.items() if y is not None}
    assert weight is not None or set(given) == {"dx", "dh"}
    exact.check(out=out, h=h, **given)
    # The statistics are those of h as it was rounded, which two roundings of it need not share.
    expected_norm(case.rms, h, h, eps=EPS[case.rms]).check(stats=stats)


@each_library()
@pytest.mark.parametrize("shape", [(2, 3, 2, 3, 2, 3, 24), (5, 40)], ids=str)
@pytest.mark.parametrize("which", ["x", "residual", "dout", "all"])
def test_axes_that_do_not_collapse(target, shape, which):
    """Copies come before the kernel; the mask is that of the index, not of the memory."""
    names = ("dout", "x", "residual", "dresidual")
    dout, x, residual, dresidual = (
        (spread_out if which in (name, "all") else stored)(target, normal(shape, i), "float32")
        for i, name in enumerate(names)
    )
    weight, bias = (stored(target, normal(shape[-1], i), "float32") for i in (8, 9))
    out, h, stats = forward(False, x, weight, bias, residual, return_stats=True)
    found = backward(False, dout, h, weight, stats, dresidual=dresidual)
    arrays = (dout, x, weight, bias, residual, dresidual)
    exact = expected_norm(False, *arrays, eps=EPS[False], factors=factors(0.3, shape))
    exact.check(out=out, h=h, stats=stats, **found)


@each_library()
def test_what_is_returned(target):
    """h stands beside out with a residual, and with statistics, as the backward needs it."""
    x = stored(target, normal((4, 24), 0), "float32")
    for residual, count in ((None, 1), (x, 2)):
        for options in ({}, {"dropout_p": 0.0, "dropout_seed": 1}, {"dropout_p": 0.25}):
            found = cupyflash.rms_norm(x, residual=residual, **options)
            assert (len(found) if isinstance(found, tuple) else 1) == count
            found = cupyflash.rms_norm(x, residual=residual, return_stats=True, **options)
            with_h = residual is not None or bool(options.get("dropout_p"))
            assert len(found) == 2 + with_h


@each_library()
def test_nothing_is_dropped(target):
    """p = 0 is the plain norm, and a p that rounds to it gives the same to the last bit."""
    x, residual = (stored(target, normal((7, 40), i), "float16") for i in range(2))
    plain = cupyflash.layer_norm(x, residual=residual)
    for p in (0.0, 0, 1e-6):
        found = cupyflash.layer_norm(x, residual=residual, dropout_p=p, dropout_seed=SEED)
        assert all((a == b).all() for a, b in zip(found, plain, strict=True))


@each_library()
def test_almost_everything_is_dropped(target):
    x = stored(target, normal((70, 400), 0), "float16")
    out, h, stats = forward(False, x, None, None, None, dropout_p=1 - 1e-9, return_stats=True)
    assert (to_numpy(to_float64(h)) == 0).mean() > 0.99
    assert all(numpy.isfinite(to_numpy(to_float64(y))).all() for y in (out, stats))


@each_library()
def test_what_is_dropped_counts_nothing(target):
    """Not even NaN and infinity, forward and backward."""
    values = normal((6, 64), 0)
    gone = factors(0.3, values.shape) == 0
    values[gone] = numpy.where(numpy.arange(gone.sum()) % 2, numpy.nan, numpy.inf)
    x = stored(target, values, "float32")
    out, h, stats = forward(False, x, None, None, None, return_stats=True)
    assert numpy.isfinite(to_numpy(out)).all() and (to_numpy(h)[gone] == 0).all()
    dh = numpy.zeros(values.shape)
    dh[gone] = numpy.inf
    dout = stored(target, normal(values.shape, 1), "float32")
    found = backward(False, dout, h, None, stats, dresidual=stored(target, dh, "float32"))
    assert numpy.isfinite(to_numpy(found["dx"])).all() and (to_numpy(found["dx"])[gone] == 0).all()


@each_library()
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_empty(target, rms):
    x = stored(target, numpy.zeros((0, 3, 24)), "float16")
    residual = stored(target, numpy.zeros((0, 3, 24)), "float32")
    weight = stored(target, normal(24, 1), "float16")
    out, h, stats = forward(rms, x, weight, None, residual, return_stats=True)
    assert tuple(out.shape) == tuple(h.shape) == (0, 3, 24) and h.dtype == residual.dtype
    found = backward(rms, x, h, weight, stats)
    assert found["dx"].dtype == x.dtype and found["dh"].dtype == h.dtype
    assert tuple(found["dx"].shape) == (0, 3, 24)
    assert (to_float64(found["dweight"]) == 0).all()


@each_library()
def test_backward_needs_the_seed(target):
    x = stored(target, normal((4, 24), 0), "float32")
    _, h, stats = forward(False, x, None, None, None, return_stats=True)
    with pytest.raises(ValueError, match="^layer_norm_backward: .*dropout_seed of the forward"):
        backward(False, x, h, None, stats, dropout_seed=None)


# torch -----------------------------------------------------------------------------------------


def leaves_of(target, residual="float32"):
    """x, weight, bias and residual that want gradients, and gradients of out and h."""
    shape = (5, 3, 40)
    x = stored(target, normal(shape, 0), "float16", "transposed")
    weight, bias = (stored(target, normal(40, i), "float32") for i in (1, 2))
    stream = stored(target, normal(shape, 3), residual, "padded")
    leaves = [y.detach().requires_grad_() for y in (x, weight, bias, stream)]
    return leaves, (stored(target, normal(shape, 4), "float16"),
                    stored(target, normal(shape, 5), residual))  # fmt: skip


def check_torch(leaves, gradients, results, seed=SEED):
    out, h, dx, dweight, dbias, dresidual = results
    arrays = [y.detach() for y in leaves]
    p = factors(0.3, tuple(out.shape), seed)
    exact = expected_norm(False, gradients[0], *arrays, gradients[1], eps=EPS[False], factors=p)
    exact.check(out=out, h=h, dx=dx, dh=dresidual, dweight=dweight, dbias=dbias)


def norm_of(x, weight, bias, residual, seed=SEED):
    options = {"residual": residual, "dropout_p": 0.3, "dropout_seed": seed, "eps": EPS[False]}
    return cupyflash.layer_norm(x, weight, bias, **options)


def with_gradients(function, leaves, gradients, *rest):
    import torch

    outputs = function(*leaves, *rest)
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


@each_library(library="torch")
@pytest.mark.parametrize("residual", ["float16", "float32"])
def test_autograd(target, residual):
    leaves, gradients = leaves_of(target, residual)
    check_torch(leaves, gradients, with_gradients(norm_of, leaves, gradients))


@each_library(library="torch")
def test_autograd_without_residual(target):
    """x alone has a gradient, which is dropped likewise; h is returned with the statistics."""
    import torch

    (x, weight, *_), (dout, _) = leaves_of(target)
    out = forward(True, x, weight, None, None)
    h, _ = forward(True, x, weight, None, None, return_stats=True)[1:]
    dx, dweight = torch.autograd.grad(out, (x, weight), dout)
    p = factors(0.3, tuple(x.shape))
    exact = expected_norm(True, dout, x.detach(), weight.detach(), eps=EPS[True], factors=p)
    exact.check(out=out, h=h, dx=dx, dweight=dweight)


@each_library(library="torch")
def test_autograd_of_h_alone(target):
    """Where out is not used, and where h is not."""
    import torch

    leaves, (dout, dh) = leaves_of(target)
    x, _, _, residual = leaves
    found = torch.autograd.grad(norm_of(*leaves)[1], (x, residual), dh)
    right = (dh.double().cpu() * torch.from_numpy(factors(0.3, tuple(x.shape)))).to(x.dtype)
    # `right` is exact but for its last rounding, so one last place of float16 is the bound.
    torch.testing.assert_close(found[0].cpu(), right, rtol=2**-10, atol=0)
    assert (found[1] == dh).all()
    (of_sum,) = torch.autograd.grad(norm_of(*leaves)[1].sum(), x)  # an expanded gradient
    assert ((of_sum.cpu() > 0).numpy() == (factors(0.3, tuple(x.shape)) > 0)).all()
    dx, dresidual = torch.autograd.grad(norm_of(*leaves)[0], (x, residual), dout)
    assert ((dx == 0).cpu().numpy() == (factors(0.3, tuple(x.shape)) == 0)).all()
    assert dresidual.dtype == residual.dtype


@each_library(library="torch")
def test_no_gradient_arrives(target):
    """Neither of out nor of h, from a function behind them."""
    import torch

    leaves, gradients = leaves_of(target)
    outputs = without_gradient(*norm_of(*leaves))
    found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    assert all(dx is None or not dx.any() for dx in found)


@each_library(library="torch")
def test_backward_of_a_drawn_seed(target):
    """Autograd keeps the seed that the forward drew: the gradient is that of the same mask."""
    import torch

    leaves, gradients = leaves_of(target)
    torch.manual_seed(3)
    results = with_gradients(norm_of, leaves, gradients, None)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, (1,), device=leaves[0].device))
    check_torch(leaves, gradients, results, seed)


@each_library(library="torch")
def test_second_derivatives(target):
    """Of h there are some, which is linear in x; of the norm there are none."""
    import torch

    leaves, (dout, dh) = leaves_of(target)
    x, dh = leaves[0], dh.requires_grad_()
    (dx,) = torch.autograd.grad(norm_of(*leaves)[1], x, dh, create_graph=True)
    (found,) = torch.autograd.grad(dx.double().sum(), dh)
    torch.testing.assert_close(
        found.double().cpu(), torch.from_numpy(factors(0.3, tuple(x.shape))), rtol=1e-6, atol=0
    )
    dout.requires_grad_()
    (dx,) = torch.autograd.grad(norm_of(*leaves)[0], x, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.float().sum().backward()


@each_library(library="torch")
@pytest.mark.parametrize("residual", ["float16", "float32"])
def test_compiled(target, residual):
    """One graph with gradients, for a seed that is a number, a tensor, and drawn."""
    import torch

    leaves, gradients = leaves_of(target, residual)
    graph = one_graph(norm_of)
    tensor = torch.tensor([SEED], device=leaves[0].device)
    for seed in (SEED, tensor):
        check_torch(leaves, gradients, with_gradients(graph, leaves, gradients, seed))
    torch.manual_seed(5)
    results = with_gradients(graph, leaves, gradients, None)
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, (1,), device=leaves[0].device))
    check_torch(leaves, gradients, results, seed)
    again = with_gradients(graph, leaves, gradients, None)
    assert not (again[0] == results[0]).all()


@each_library(library="torch")
def test_compiled_backward(target):
    """The explicit backward runs as it is between two graphs."""
    import torch

    torch.compiler.reset()
    (x, weight, *_), (dout, _) = leaves_of(target)
    x, weight = x.detach(), weight.detach()
    _, h, stats = forward(True, x, weight, None, None, return_stats=True)
    call = lambda dout: tuple(backward(True, dout * 2, h, weight, stats).values())
    compiled = torch.compile(call, backend="aot_eager")
    for ours, right in zip(compiled(dout), call(dout), strict=True):
        assert (ours == right).all()


@each_library(library="torch")
@pytest.mark.parametrize("residual", ["", "float16", "float32"])
def test_opcheck(target, residual):
    import torch

    from cupyflash.ops.norm import torch_ops  # noqa: F401, defines the operators

    (x, weight, bias, stream), _ = leaves_of(target, residual or "float16")
    stream = stream if residual else None
    seed = torch.tensor([SEED], device=x.device)
    options = ("layer_norm", False, EPS[False], seed, 0.3)
    operators = torch.ops.cupyflash
    torch.library.opcheck(operators.norm.default, (x, weight, bias, stream, *options))
    torch.library.opcheck(operators.dropout_add.default, (x, stream, seed, "layer_norm", 0.3))


@each_library(library="torch")
def test_operators_check_the_seed(target):
    import torch

    from cupyflash.ops.norm import torch_ops  # noqa: F401, defines the operators

    operators, x = torch.ops.cupyflash, stored(target, normal((3, 24), 0), "float32")
    right = torch.tensor([SEED], device=x.device)
    calls = (
        lambda seed: operators.dropout_add(x, None, seed, "layer_norm", 0.3),
        lambda seed: operators.norm(x, None, None, None, "layer_norm", False, 1e-5, seed, 0.3),
    )
    for call in calls:
        call(right)
        for wrong in (right.float(), right.repeat(2)):
            with pytest.raises((TypeError, ValueError), match="^layer_norm: dropout_seed must"):
                call(wrong)


@each_library(library="torch")
def test_operators_have_the_results_of_eager(target):
    """A dispatch mode, which sees operators only."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    leaves, gradients = leaves_of(target)
    right = with_gradients(norm_of, leaves, gradients)
    detached = [y.detach() for y in leaves]
    explicit = lambda: forward(False, *detached, return_stats=True)
    _, h, stats = explicit()
    call = lambda: backward(False, gradients[0], h, detached[1], stats, dresidual=gradients[1])
    plain = call()
    with FlopCounterMode(display=False):
        found = with_gradients(norm_of, leaves, gradients)
        seen = call()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert all(torch.equal(seen[name], plain[name]) for name in plain)


@each_library(library="torch")
def test_transforms_are_refused(target):
    import torch

    x = stored(target, normal((3, 4, 24), 0), "float32")
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.vmap(lambda y: forward(True, y, None, None, None))(x)


@each_library(library="torch", device="cuda")
def test_captured(target):
    """A drawn seed is drawn anew by each replay, a given one stays; the backward has the same."""
    import torch

    x, residual = (stored(target, normal((300, 768), i), "float16") for i in range(2))
    x.requires_grad_()
    dout = stored(target, normal((300, 768), 2), "float16")

    def step(seed):
        out, h = cupyflash.layer_norm(x, residual=residual, dropout_p=0.5, dropout_seed=seed)
        (dx,) = torch.autograd.grad(out, x, dout)
        return out, h, dx

    for seed in (None, SEED):
        # Without its graph, which would tie the gradient of x to the stream of this call.
        right = [y.detach() for y in step(seed)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collected(), torch.cuda.graph(graph):
            captured = step(seed)
        replays = []
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            replays.append([y.detach().clone() for y in captured])
            out, h, dx = replays[-1]
            kept = h != residual  # of x, where it is not lost in the rounding
            assert (dx[kept] != 0).float().mean() > 0.99 and 0.4 < kept.float().mean() < 0.6
        if seed is None:
            assert not torch.equal(replays[0][0], replays[1][0])
        else:
            assert all(torch.equal(a, b) for a, b in zip(replays[0], right, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(*replays, strict=True))


@each_library(library="cupy", device="cuda")
def test_captured_by_cupy(target):
    import cupy

    x = stored(target, normal((300, 768), 0), "float16")
    right = forward(True, x, None, None, None)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, no_garbage_collected():
        forward(True, x, None, None, None)
        stream.synchronize()
        stream.begin_capture()
        captured = forward(True, x, None, None, None)
        graph = stream.end_capture()
        for _ in range(2):
            captured[...] = 0
            graph.launch(stream)
            stream.synchronize()
            assert (captured == right).all()


# Without a GPU: what a GPU goes through --------------------------------------------------------


def test_the_detour_of_a_gpu(monkeypatch):
    """With the operations of a CPU behind it: casts of a float32 residual, strides, dtypes."""
    torch = pytest.importorskip("torch")
    without_detour(monkeypatch, dispatch, dropout)
    shape, seed = (2, 3, 2, 3, 2, 40), torch.tensor([SEED])
    for kind in (torch.float16, torch.float32):
        for permuted in (False, True):
            x, residual = (torch.from_numpy(normal(shape, i)) for i in range(2))
            x, residual = x.half(), residual.to(kind)
            if permuted:
                x = x.permute(4, 2, 0, 3, 1, 5).contiguous().permute(2, 4, 1, 3, 0, 5)
            weight, bias = (torch.from_numpy(normal(40, i)).half() for i in (8, 9))
            library = library_of(x)
            arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
            views = {name: library.view(y) for name, y in arrays.items()}
            call = dispatch._forward_detour("f", library, views, False, 1e-5, 0.3)
            found = call((*arrays.values(), seed), [], True)
            given, options = (x, weight, bias, residual, seed), (False, 1e-5, True, 0.3, None)
            right = dispatch.forward("f", library, given, options)
            for ours, wanted in zip(found, right, strict=True):
                assert ours.dtype == wanted.dtype and ours.stride() == wanted.stride()
                # Both are the reference; what a detour copies and pads may round a sum otherwise.
                torch.testing.assert_close(ours, wanted, rtol=2**-10, atol=1e-5)
            copying = dropout._copying("f", library, views, 0.3)
            assert (copying is not None) == permuted
            if permuted:
                assert (copying((x, residual, seed), []) == right[1]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_plan_of_a_gpu(monkeypatch, dtype):
    """Grids cover all elements, also of more than 2^31, and packs stay within rows."""
    pytest.importorskip("cupy")
    made = {}
    monkeypatch.setattr(
        dropout, "Launch", lambda config, device, grid, params: made.update(locals())
    )
    monkeypatch.setattr(Plan, "__init__", lambda self, device: None)
    for shape, aligned in (((2**22, 1024), True), ((3, 2**29 + 1), True), ((7, 5, 33), False)):
        strides = tuple(int(numpy.prod(shape[i + 1 :])) for i in range(len(shape)))
        views = {"x": View(shape, strides, dtype, 0)}
        views["residual"] = views["x"]._replace(dtype="float32")
        dropout.DropoutAddPlan("f", NumpyLibrary(), views, 0.25, aligned)
        config, params = made["config"], made["params"]
        divides = shape[-1] % (4 if dtype == "float32" else 8) == 0
        assert (config.vector > 1) == (aligned and divides) and config.out == "float32"
        packs = -(-shape[-1] // config.vector)
        rows = int(numpy.prod(shape[:-1]))
        assert made["grid"] * config.threads >= rows * packs > (made["grid"] - 1) * config.threads
        assert params.shape.rows == rows and params.shape.columns == shape[-1]
        assert params.threshold == dropout_threshold(0.25) and params.scale == numpy.float32(4 / 3)
        assert config in set(kernels.configurations((9, 0)))


def test_strides_that_need_copies():
    """Of the gradient of h as a sum leaves it."""
    torch = pytest.importorskip("torch")
    dh = torch.ones(1).expand(4, 24)
    views = {"x": library_of(dh).view(dh)}
    strides = result_strides(library_of(dh), views["x"])
    assert rows_to_copy(strides, views, ("x", "residual")) == {"x"}
