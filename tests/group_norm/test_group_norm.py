"""GroupNorm with activation, forward and backward, on every library."""

import dataclasses
import shutil

import numpy
import pytest
from arrays import assert_same_oracle, broadcast, normal, stored, to_numpy
from fakes import fake_facts, fresh_plans, without_detour
from matrix import covering, each_case, each_library

import cupyflash
from cupyflash.jit import sources
from cupyflash.ops.group_norm import dispatch as topic
from cupyflash.ops.group_norm import kernels, plan, reference
from cupyflash.ops.group_norm.groups import Groups, dense_like, layout_of
from cupyflash.ops.group_norm.plan import MAX_WAVES, shares_of
from cupyflash.runtime.array import View
from cupyflash.runtime.lookup import library_of
from cupyflash.runtime.scratch import COUNTERS
from cupyflash.testing import expected_group_norm, poison_free_memory, to_float64
from cupyflash.testing.tolerance import assert_close_to_float64

ACTIVATIONS = ["silu", "mish", "gelu", "gelu_tanh", None]
# (channels, num_groups): many channels in a group and few, groups of one channel, one group.
CHANNELS = [(8, 2), (64, 8), (320, 32), (12, 12), (40, 1), (6, 3), (1, 1)]
POSITIONS = [(16,), (7,), (1,), (5, 7), (8, 8), (33, 31)]
LARGE = [(64, 64), (3000,), (128, 130)]  # beyond the registers of a block with most CHANNELS


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    dtype: str
    batch: int
    channels: tuple[int, int]
    positions: tuple[int, ...]
    activation: str | None
    wide_weight: bool
    storage: str

    def arrays(self, target, seed=0):
        """(dout, x, weight, bias)."""
        channels = self.channels[0]
        shape = (self.batch, channels, *self.positions)
        dout = stored(target, normal(shape, (seed, 0)), self.dtype, self.storage)
        x = stored(target, normal(shape, (seed, 1), mean=1.0), self.dtype, self.storage)
        of_weight = "float32" if self.wide_weight else self.dtype
        weights = (stored(target, normal(channels, (seed, i)), of_weight) for i in (2, 3))
        return dout, x, *weights


def cases(target):
    values = {
        "dtype": list(target.dtypes),
        "batch": [1, 3],
        "channels": CHANNELS,
        "positions": POSITIONS + (LARGE if target.gpu else []),
        "activation": ACTIVATIONS,
        "wide_weight": [False, True],
        "storage": ["contiguous", "channels_last"],
    }
    return covering(Case, values)


def run(case, dout, x, weight, bias):
    out, stats = cupyflash.group_norm(
        x, case.channels[1], weight, bias, activation=case.activation, return_stats=True
    )
    gradients = cupyflash.group_norm_backward(
        dout, x, weight, bias, stats, activation=case.activation
    )
    return {"out": out, "stats": stats, **dict(zip(("dx", "dweight", "dbias"), gradients))}


def steps(x):
    """Strides of the axes that have any."""
    strides = x.stride() if hasattr(x, "stride") else x.strides
    return [step for step, size in zip(strides, x.shape) if size > 1]


@each_case(cases)
def test_group_norm(target, case):
    dout, x, weight, bias = case.arrays(target)
    size = int(numpy.prod(x.shape)) * (4 if case.dtype == "float32" else 2)
    poison_free_memory(target.library, target.device, [size] * 2)
    results = run(case, dout, x, weight, bias)
    exact = expected_group_norm(dout, x, case.channels[1], weight, bias, case.activation, 1e-5)
    exact.check(**results)
    assert steps(results["out"]) == steps(results["dx"]) == steps(x)


@each_library(device="cuda")
@pytest.mark.parametrize("positions", [(64, 64), (100, 100), (200, 200), (256, 256), (300, 301)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_groups_of_many_sizes(target, dtype, positions):
    """One group in a block, in clusters of each size, and beyond those."""
    case = Case(dtype, 3, (8, 1), positions, "silu", False, "contiguous")
    arrays = case.arrays(target)
    expected_group_norm(*arrays[:2], 1, *arrays[2:], "silu", 1e-5).check(**run(case, *arrays))


@each_library()
@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
@pytest.mark.parametrize("batch, positions", [(4096, (1,)), (64, (64,)), (2, (64, 32))], ids=str)
def test_sums_over_many_rows(target, batch, positions, storage):
    """Beside sums that NumPy adds up pairwise: a chain of all rows loses a digit."""
    channels = 32
    dout, x = (normal((batch, channels, *positions), seed) for seed in (1, 2))
    arrays = [stored(target, y, "float32", storage) for y in (dout, x)]
    ones = stored(target, numpy.ones(channels), "float32")
    zeros = stored(target, numpy.zeros(channels), "float32")
    _, stats = cupyflash.group_norm(arrays[1], 8, ones, zeros, return_stats=True)
    _, *found = cupyflash.group_norm_backward(*arrays, ones, zeros, stats)
    stats = to_numpy(stats).astype("float64")[..., None]
    normals = ((x.reshape(batch, 8, -1) - stats[:, :, 0]) * stats[:, :, 1]).reshape(x.shape)
    for name, result, terms in zip(("dweight", "dbias"), found, (dout * normals, dout)):
        rows = numpy.moveaxis(terms, 1, 0).reshape(channels, -1)
        pairwise = numpy.ascontiguousarray(rows.astype("float32")).sum(-1)
        exact = rows.sum(-1, dtype="float64")
        assert_close_to_float64(result, exact, pairwise, "float32", name)


def at_most(clusters, monkeypatch):
    """Lets no more clusters of a kernel run at once."""
    at_once = plan.clusters_at_once
    least = lambda config, device: min(clusters, at_once(config, device))
    monkeypatch.setattr(plan, "clusters_at_once", least)
    fresh_plans(monkeypatch, topic)


@each_library(device="cuda")
@pytest.mark.parametrize(
    "positions", [(72, 72), (100, 100), (128, 160), (128, 250), (200, 200), (256, 256)], ids=str
)
def test_broken_groups(target, positions):
    """What is wrong with a group stays there."""
    case = Case("float16", 4, (16, 2), positions, "silu", False, "contiguous")
    dout, x, weight, bias = case.arrays(target)
    poison_free_memory(target.library, target.device, [2 * int(numpy.prod(x.shape))] * 2)
    forward = lambda x: cupyflash.group_norm(
        x, 2, weight, bias, activation="silu", return_stats=True
    )
    out, stats = forward(x)
    exact = expected_group_norm(dout, x, 2, weight, bias, "silu", 1e-5)
    exact.check(out=out, stats=stats)
    broken = to_numpy(x).copy()
    broken[1, 11, -1, -1] = numpy.nan
    found = to_numpy(forward(stored(target, broken, "float16"))[0])
    assert numpy.isnan(found[1, 8:]).all()
    found[1, 8:] = to_numpy(out)[1, 8:]
    assert (found == to_numpy(out)).all()


# (channels, num_groups), positions: groups of 256, 480, 512, 1024 and 2304 numbers, channels of 8
# bytes, not aligned.
MANY = [
    *(((256, 16), 16), ((320, 16), 24), ((256, 8), 16), ((128, 8), 64), ((48, 3), 144)),
    *(((48, 3), 4), ((640, 10), 4), ((640, 10), 2), ((48, 3), 7)),
]


@each_library(device="cuda")
@pytest.mark.parametrize(("channels", "length"), MANY, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_many_samples(target, dtype, channels, length):
    """More than blocks take at once."""
    case = Case(dtype, 1301, channels, (length,), "mish", False, "contiguous")
    arrays = case.arrays(target)
    exact = expected_group_norm(*arrays[:2], channels[1], *arrays[2:], "mish", 1e-5)
    exact.check(**run(case, *arrays))


@each_library()
@pytest.mark.parametrize("positions", [(16,), (100, 40), (200, 100), (200, 200)], ids=str)
def test_mean_far_from_zero(target, positions):
    case = Case("float32", 2, (8, 2), positions, "silu", False, "contiguous")
    dout, _, weight, bias = case.arrays(target)
    x = stored(target, normal((2, 8, *positions), 5, mean=100.0), "float32")
    exact = expected_group_norm(dout, x, 2, weight, bias, "silu", 1e-5)
    exact.check(**run(case, dout, x, weight, bias))


@each_library(device="cuda")
@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
@pytest.mark.parametrize("positions", [(16,), (40, 40), (100, 100), (300, 301)], ids=str)
def test_gradients_are_repeatable(target, positions, storage):
    """One block a group, a cluster, one read or two."""
    case = Case("float16", 4, (64, 8), positions, "silu", True, storage)
    arrays = case.arrays(target)
    first = run(case, *arrays)
    for _ in range(3):
        for name, again in run(case, *arrays).items():
            assert (again == first[name]).all(), f"{name} differs between two runs"


@each_library(device="cuda")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("clusters", [1, 3, 1000])
@pytest.mark.parametrize(
    ("batch", "channels", "positions"),
    [
        (7, (10, 2), (80, 80)),
        (2, (65, 65), (160, 136)),
        (3, (3, 1), (128, 100)),
        (1, (20, 4), (128, 250)),
        (3, (64, 4), (128, 122)),
    ],
)
def test_gradients_of_groups_in_turn(
    target, monkeypatch, dtype, clusters, batch, channels, positions
):
    """Clusters have some samples of some groups: few or many, and more groups than counters."""
    at_most(clusters, monkeypatch)
    case = Case(dtype, batch, channels, positions, "silu", True, "contiguous")
    arrays = case.arrays(target)
    exact = expected_group_norm(*arrays[:2], channels[1], *arrays[2:], "silu", 1e-5)
    for _ in range(2):  # the first leaves the counters as they were
        exact.check(**run(case, *arrays))


@each_library(device="cuda")
@pytest.mark.parametrize("num_groups", [64, 65, 130, 260])
@pytest.mark.parametrize("positions", [(64,), (63,)], ids=["aligned", "unaligned"])
def test_groups_that_share_a_counter(target, positions, num_groups):
    """More groups than counters, which the first of two launches must leave as they were."""
    case = Case("float16", 7, (2 * num_groups, num_groups), positions, "silu", False, "contiguous")
    arrays = case.arrays(target)
    exact = expected_group_norm(*arrays[:2], num_groups, *arrays[2:], "silu", 1e-5)
    for _ in range(2):
        exact.check(**run(case, *arrays))


def test_counters_of_the_groups():
    source = sources.root() / "group_norm" / "params.cuh"
    assert f"GROUP_COUNTERS = {COUNTERS};" in source.read_text()


@pytest.mark.parametrize("num_groups", [1, 8, 32, 300, 5000])
@pytest.mark.parametrize("turns", [1, 3, 64, 1301])
@pytest.mark.parametrize("at_once", [1, 16, 132, 1056])
def test_shares(turns, num_groups, at_once):
    """No parting of the turns into so many waves is done earlier; each block has a turn."""

    def time(n):
        return -(-n * num_groups // at_once) * (-(-turns // n) + 1)

    found = shares_of(turns, num_groups, at_once)
    possible = [n for n in range(1, turns + 1) if n * num_groups <= MAX_WAVES * at_once]
    assert 1 <= found <= turns and time(found) == min(map(time, possible or [1]))


@pytest.mark.parametrize("size", [2560, 10240, 40960, 65536, 163840])
@pytest.mark.parametrize("spread", [0, 1, 2, 4, 20])
def test_small_batches_are_spread(size, spread):
    """Each of 132 multiprocessors has a block, in clusters that are not too large for a group."""
    kind = ("float16", "float16", "silu")
    alone = kernels.one_step(False, kind, size, True, False, (9, 0))
    found = kernels.one_step(False, kind, size, True, False, (9, 0), spread)
    assert found == alone or (found.cluster <= spread and size <= found.size <= 2 * size)
    if spread == 4 and size <= 40960:
        assert found.cluster == {2560: 1, 10240: 2, 40960: 4}[size]
    for other in (
        (True, kind, size, True, False, (9, 0)),
        (False, kind, size, True, False, (8, 0)),
    ):
        assert kernels.one_step(*other, spread) == kernels.one_step(*other)
    known = set(kernels.configurations((9, 0)))
    assert found in known


# Tiles of all groups, of some of them, of a part of one; more threads than positions.
LAST = [
    ((320, 32), (64, 64)),
    ((640, 32), (32, 33)),
    ((64, 8), (5, 7)),
    ((1280, 32), (1,)),
    ((40, 5), (131,)),
    ((2048, 2), (9, 9)),
    ((512, 512), (10, 10)),
    ((128, 32), (150, 151)),
    ((24, 8), (30011,)),
    ((8, 1), (100003,)),
]


@each_library(device="cuda")
@pytest.mark.parametrize(("channels", "positions"), LAST, ids=str)
def test_channels_last(target, channels, positions):
    """Far from 0, with one value farther still where the sums begin."""
    for dtype in target.dtypes:
        case = Case(dtype, 2, channels, positions, "silu", True, "channels_last")
        dout, _, weight, bias = case.arrays(target)
        values = normal((2, channels[0], *positions), (0, 1), mean=30.0)
        values[:, 0].reshape(2, -1)[:, 0] = 100.0
        x = stored(target, values, dtype, "channels_last")
        exact = expected_group_norm(dout, x, channels[1], weight, bias, "silu", 1e-5)
        exact.check(**run(case, dout, x, weight, bias))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("shape", [(2, 320, 64, 64), (8, 128, 256, 256), (64, 640, 8, 8)], ids=str)
def test_channels_last_in_three_steps(monkeypatch, capability, shape, backward):
    """They read 16 bytes at a time; a warp gathers what belongs to a group."""
    fake_facts(monkeypatch, plan, capability_of=capability, multiprocessors=132)
    batch, channels, height, width = shape
    strides = (channels * height * width, 1, width * channels, channels)
    x = View(shape, strides, "float16", 0)
    groups = Groups("group_norm", {"x": x, "out": x, "dout": x}, 32)
    work = plan.Work("group_norm", backward, x, groups, ("float16", "float16", "silu"), True)
    assert [config.step for config, _ in work.launches] == ["collect", "gather", "apply"]
    assert all(config.nhwc and config.vector == 8 for config, _ in work.launches)
    blocks = work.tiling.blocks * batch
    assert [n for _, n in work.launches] == [blocks, -(-batch * 32 // 8), blocks]


@pytest.mark.parametrize("channels", [2**31 - 2**16, 2**31 - 1, 2**31])
def test_larger_groups_than_32_bits_count(channels):
    """The kernels add to the channels of a group, rounding up to whole warps and segments."""
    x = View((1, channels, 1), (channels, 1, 1), "float16", 0)
    with pytest.raises(ValueError, match="f: elements of a group must be fewer than 2147418112"):
        Groups("f", {"x": x}, 1)
    smaller = View((1, 2**31 - 2**16 - 1, 1), (channels, 1, 1), "float16", 0)
    assert Groups("f", {"x": smaller}, 1).size == 2**31 - 2**16 - 1


@each_library(library="torch", device="cuda")
@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "options", [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}], ids=str
)
def test_channels_last_compiled_with_cuda_graphs(target, options, training):
    """torch accounts for all memory in the pool of its graph: nothing else may stay there."""
    import torch

    if "mode" in options and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    torch.compiler.reset()
    case = Case("float16", 3, (320, 32), (64, 64), "silu", False, "channels_last")
    dout, x, weight, bias = case.arrays(target)
    function = lambda x, weight, bias: cupyflash.group_norm(x, 32, weight, bias, activation="silu")
    compiled = torch.compile(function, fullgraph=True, **options)
    exact = expected_group_norm(dout, x, 32, weight, bias, "silu", 1e-5)
    inputs = [y.requires_grad_(training) for y in (x, weight, bias)]
    for _ in range(4):  # warm-up, capture, replays
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*inputs)
        exact.check(out=out.detach())
        if training:
            gradients = torch.autograd.grad(out, inputs, dout)
            exact.check(**dict(zip(("dx", "dweight", "dbias"), gradients)))


@each_library()
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_large_inputs_of_the_activation(target, activation):
    """No overflow inside: exp(100) is infinite in float32."""
    case = Case("float32", 2, (4, 2), (6,), activation, True, "contiguous")
    dout, x, weight, bias = case.arrays(target)
    bias = stored(target, numpy.array([100.0, -100.0, 20.0, -30.0]), "float32")
    exact = expected_group_norm(dout, x, 2, weight, bias, activation, 1e-5)
    exact.check(**run(case, dout, x, weight, bias))


@each_library()
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("length", [16, 64, 63])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy
def test_nan(target, activation, length):
    """Of x: in all that depends on its group, and nothing else. Of a bias: also in dx."""
    case = Case("float32", 3, (8, 2), (length,), activation, True, "contiguous")
    dout, x, weight, bias = case.arrays(target)
    of_x, of_bias = to_numpy(x).copy(), to_numpy(bias).copy()
    of_x[1, 2, 3] = of_bias[5] = numpy.nan
    found = run(case, dout, stored(target, of_x, "float32"), weight, bias)
    found = {name: numpy.isnan(to_numpy(value)) for name, value in found.items()}
    for name in ("out", "dx"):
        assert found[name][1, :4].all() and not found[name][1, 4:].any()
        assert not found[name][::2].any()
    for name in ("dweight", "dbias") if activation else ("dweight",):
        assert found[name][:4].all() and not found[name][4:].any()
    found = run(case, dout, x, weight, stored(target, of_bias, "float32"))
    found = {name: numpy.isnan(to_numpy(value)) for name, value in found.items()}
    assert found["out"][:, 5].all()
    assert found["dx"][:, 4:].all() == (activation is not None) and not found["dx"][:, :4].any()


@each_library()
@pytest.mark.parametrize("shape", [(0, 8, 4), (2, 8, 0), (0, 8, 3, 0)], ids=str)
def test_empty(target, shape):
    x, weight = (stored(target, numpy.zeros(s), "float32") for s in (shape, 8))
    out, stats = cupyflash.group_norm(x, 2, weight, weight, return_stats=True)
    assert tuple(out.shape) == shape and tuple(stats.shape) == (shape[0], 2, 2)
    dx, dweight, dbias = cupyflash.group_norm_backward(x, x, weight, weight, stats)
    assert tuple(dx.shape) == shape
    assert not to_float64(dweight).any() and not to_float64(dbias).any()


@each_library()
def test_no_positions_at_all(target):
    """(batch, channels)."""
    case = Case("float32", 3, (24, 4), (), "silu", False, "contiguous")
    arrays = case.arrays(target)
    expected_group_norm(*arrays[:2], 4, *arrays[2:], "silu", 1e-5).check(**run(case, *arrays))


@each_library()
def test_samples_side_by_side_or_in_one_place(target):
    """The statistics have an order of their own, as the backward wants them contiguous."""
    case = Case("float32", 3, (24, 4), (1,), "silu", False, "contiguous")
    dout, plain, weight, bias = case.arrays(target)
    side_by_side = stored(target, to_numpy(plain), "float32", "transposed")
    for x in (side_by_side, broadcast(plain[:1], plain.shape)):
        exact = expected_group_norm(dout, x, 4, weight, bias, "silu", 1e-5)
        exact.check(**run(case, dout, x, weight, bias))


@each_library()
def test_slices_of_channels_and_samples(target):
    """Gaps between samples, and between channels or positions; NaN lies in them."""
    values = numpy.full((5, 24, 6, 8), numpy.nan, "float32")
    values[1:4, 8:16] = normal((3, 8, 6, 8), 0)
    weight = stored(target, normal(8, 1), "float32")
    dout = stored(target, normal((3, 8, 6, 8), 2), "float32")
    for storage in ("contiguous", "channels_last"):
        x = stored(target, values, "float32", storage)[1:4, 8:16]
        gradient = stored(target, to_numpy(dout), "float32", storage)
        case = Case("float32", 3, (8, 2), (6, 8), "mish", False, storage)
        exact = expected_group_norm(gradient, x, 2, weight, weight, "mish", 1e-5)
        exact.check(**run(case, gradient, x, weight, weight))


@each_library()
@pytest.mark.parametrize("length", [32, 31])
def test_gaps_between_channels(target, length):
    """The channels of a group are not side by side; NaN lies between them."""
    values = numpy.full((3, 8, 40), numpy.nan, "float32")
    values[..., :length] = normal((3, 8, length), 0)
    x = stored(target, values, "float32")[..., :length]
    weight, dout = (stored(target, normal(s, 1), "float32") for s in (8, (3, 8, length)))
    case = Case("float32", 3, (8, 2), (length,), "silu", True, "contiguous")
    exact = expected_group_norm(dout, x, 2, weight, weight, "silu", 1e-5)
    exact.check(**run(case, dout, x, weight, weight))


@each_library()
@pytest.mark.parametrize("shape", [(3, 8, 1), (3, 8), (3, 1, 6)], ids=str)
def test_one_position_or_one_channel_between_gaps(target, shape):
    """What is neither channels first nor last beside dense results, and yet both."""
    last = len(shape) - 1 if shape[1] == 1 else 1
    wide = [2 * size if axis == last else size for axis, size in enumerate(shape)]
    x = stored(target, normal(wide, 0), "float32")
    x = x[..., ::2] if last == len(shape) - 1 else x[:, ::2]
    weight, dout = (stored(target, normal(s, 1), "float32") for s in (shape[1], shape))
    case = Case("float32", 3, (shape[1], 1), shape[2:], "silu", True, "")
    exact = expected_group_norm(dout, x, 1, weight, weight, "silu", 1e-5)
    exact.check(**run(case, dout, x, weight, weight))


@pytest.mark.parametrize("steps", [(16, 2, 1), (8, 1, 1), (8, 1, 8), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 1), (3, 1, 6), (2, 8, 6), (1, 1, 1)], ids=str)
def test_groups_address_their_elements(shape, steps):
    """Of x, and of a dense result: which offsets belong to which channel and position."""
    offsets = lambda sizes, strides: numpy.einsum("i...,i", numpy.indices(sizes), strides)
    x = View(shape, steps, "float32", 0)
    if layout_of(x) is None:
        assert shape[2] > 1 and shape[1] > 1
        return
    out = x._replace(strides=dense_like(x))
    for name, view in {"x": x, "out": out}.items():
        groups = Groups("f", {"x": x, "out": out}, num_groups=min(2, shape[1]))
        strides = groups.strides[f"{name}_strides"]
        found = offsets(shape, (strides.batch, strides.channel, strides.position))
        assert (found == offsets(shape, view.strides)).all()


@each_library(library="torch")
@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
def test_autograd(target, storage):
    """All gradients; dout in another memory format, or an expanded scalar."""
    import torch

    case = Case("float32", 2, (12, 3), (5, 4), "gelu_tanh", True, storage)
    dout, x, weight, bias = case.arrays(target)
    exact = expected_group_norm(dout, x, 3, weight, bias, "gelu_tanh", 1e-5)
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    out = cupyflash.group_norm(x, 3, weight, bias, activation="gelu_tanh")
    found = torch.autograd.grad(out, inputs, dout.contiguous(), retain_graph=True)
    exact.check(out=out, **dict(zip(("dx", "dweight", "dbias"), found)))
    (dbias,) = torch.autograd.grad(out.sum(), [bias])
    arrays = [y.detach() for y in (x, weight, bias)]
    ones = torch.ones_like(arrays[0])
    exact = expected_group_norm(ones, arrays[0], 3, *arrays[1:], "gelu_tanh", 1e-5)
    exact.check(dbias=dbias)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_reference_is_torch(activation):
    """The float64 oracle beside torch's own, with its own gradients."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    functions = {
        "silu": functional.silu,
        "mish": functional.mish,
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        None: lambda z: z,
    }
    x, dout = (torch.from_numpy(normal((2, 12, 5), i)).double() for i in (0, 1))
    weight, bias = (torch.from_numpy(normal(12, i)).double() for i in (2, 3))
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    out = functions[activation](functional.group_norm(x, 4, weight, bias))
    gradients = torch.autograd.grad(out, inputs, dout)
    arrays = [y.detach().numpy() for y in inputs]
    name = activation or "none"
    found, stats = reference.group_norm(arrays[0], 4, *arrays[1:], 1e-5, name)
    assert_same_oracle(found, out.detach())
    ours = reference.group_norm_backward(dout.numpy(), *arrays, stats, name)
    for mine, theirs in zip(ours, gradients):
        assert_same_oracle(mine, theirs)


def bad(target, error, match, **changes):
    arguments = {
        "x": stored(target, normal((2, 8, 5), 0), "float16"),
        "num_groups": 2,
        "weight": stored(target, normal(8, 1), "float16"),
        "bias": stored(target, normal(8, 2), "float16"),
    } | changes
    with pytest.raises(error, match=f"^group_norm: .*{match}"):
        cupyflash.group_norm(**arguments)


@each_library()
def test_bad_input(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    for groups in (3, 0, -2, 16):
        bad(target, ValueError, f"num_groups.*{groups} and 8", num_groups=groups)
    for groups in (2.0, None, True, make(2), "2"):
        bad(target, ValueError, "num_groups must be an integer.*got", num_groups=groups)
    bad(target, ValueError, "activation.*'relu'", activation="relu")
    bad(target, ValueError, r"x must have shape \(batch, channels, \.\.\.\).*\(8,\)", x=make(8))
    bad(target, ValueError, r"weight.*\(8,\).*\(4,\)", weight=make(4))
    for wrong in (["silu"], "none", "", 0, make(2)):
        bad(target, ValueError, "activation must be 'silu', .* or None", activation=wrong)
    bad(target, TypeError, "bias.*weight.*None", bias=None)
    bad(target, TypeError, "weight.*bias.*None", weight=None)
    bad(target, TypeError, "bias must be float16 like weight, got float32", bias=make(8, "float32"))
    bad(target, ValueError, "eps", eps=float("nan"))


@each_library()
def test_bad_backward_input(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    good = [make((2, 8, 5)), make((2, 8, 5)), make(8), make(8), make((2, 4, 2), "float32")]
    for position, wrong, error, match in [
        (0, make((2, 8, 4)), ValueError, "dout"),
        (4, make((2, 4), "float32"), ValueError, "stats"),
        (4, make((2, 3, 2), "float32"), ValueError, "num_groups"),
        (4, make((2, 4, 2)), TypeError, "stats.*float32"),
    ]:
        arguments = [*good[:position], wrong, *good[position + 1 :]]
        with pytest.raises(error, match=f"^group_norm_backward: .*{match}"):
            cupyflash.group_norm_backward(*arguments)
    with pytest.raises(ValueError, match="^group_norm_backward: activation .*'silu', .*'none'"):
        cupyflash.group_norm_backward(*good, activation="none")


# Arrays that the kernels cannot take as they are --------------------------------------------

CROPS = {
    "height": (slice(None), slice(None), slice(0, 5)),
    "width": (slice(None), slice(None), slice(None), slice(1, 6)),
    "both": (slice(1, None), slice(2, 10), slice(1, 5), slice(2, 7)),
    "steps": (slice(None), slice(None), slice(None, None, 2), slice(1, None, 3)),
    "channels": (slice(None), slice(0, 12, 2)),
}


@each_library()
@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_crops(target, crop, storage, affine):
    """Of x and of dout, in either memory format, with NaN around them."""
    values = [numpy.full((3, 12, 8, 9), numpy.nan, "float32") for _ in range(2)]
    for i, whole in enumerate(values):
        whole[CROPS[crop]] = normal(whole[CROPS[crop]].shape, i)
    x, dout = (stored(target, y, "float32", storage)[CROPS[crop]] for y in values)
    channels = x.shape[1]
    weights = [stored(target, normal(channels, i), "float32") for i in (2, 3)]
    weights = weights if affine else [None, None]
    dense = stored(target, to_numpy(dout).copy(), "float32")
    for gradient in (dout, dense):
        case = Case("float32", 0, (channels, 2), (), "silu", True, "")
        results = run(case, gradient, x, *weights)
        if not affine:
            assert results.pop("dweight") is None and results.pop("dbias") is None
        expected_group_norm(gradient, x, 2, *weights, "silu", 1e-5).check(**results)
        last = storage == "channels_last"
        inner = steps(results["out"])[1 if last else -1]
        assert inner == (results["out"].itemsize if target.library != "torch" else 1)
        assert steps(results["out"]) == steps(results["dx"])


@each_library(device="cuda")
@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
@pytest.mark.parametrize("positions", [(64,), (64, 64), (300, 301)], ids=str)
def test_without_weight(target, positions, storage):
    for dtype in target.dtypes:
        case = Case(dtype, 2, (64, 8), positions, "silu", False, storage)
        dout, x, *_ = case.arrays(target)
        results = run(case, dout, x, None, None)
        assert results.pop("dweight") is None and results.pop("dbias") is None
        expected_group_norm(dout, x, 8, None, None, "silu", 1e-5).check(**results)


@each_library()
@pytest.mark.parametrize("shape", [(2, 8, 5, 4), (2, 8, 1, 6)], ids=str)
def test_dout_of_another_memory_format(target, shape):
    """Also an expanded one."""
    weight, bias = (stored(target, normal(8, i), "float32") for i in (1, 2))
    x = stored(target, normal(shape, 0), "float32")
    values = normal(shape, 3)
    number = stored(target, normal(1, 4), "float32")
    expanded = broadcast(number, shape)
    case = Case("float32", 0, (8, 2), (), "mish", True, "")
    for dout in (stored(target, values, "float32", "channels_last"), expanded):
        exact = expected_group_norm(dout, x, 2, weight, bias, "mish", 1e-5)
        exact.check(**run(case, dout, x, weight, bias))


@pytest.mark.parametrize("name", ["_forward_detour", "_backward_detour"])
@pytest.mark.parametrize("what", ["crop", "dout", "weight"])
def test_detours(monkeypatch, name, what):
    """What a GPU goes through, with the operations of a CPU behind it."""
    torch = pytest.importorskip("torch")
    without_detour(monkeypatch, topic)
    x, dout = (torch.from_numpy(normal((2, 8, 6, 7), i)) for i in range(2))
    if what == "crop":
        x, dout = x.to(memory_format=torch.channels_last)[..., 1:5], dout[..., 1:5]
    elif what == "dout":
        dout = dout.to(memory_format=torch.channels_last)
    weight, bias = (None, None) if what == "weight" else (torch.randn(8), torch.randn(8))
    library, calls = library_of(x), []
    forward = topic.forward
    if name == "_forward_detour":
        arrays = {"x": x, "weight": weight, "bias": bias}
        again = lambda *y: forward("f", library, y[:-1], (2, 1e-5, "silu", y[-1]))
        arguments = (*arrays.values(), True)
    else:
        stats = forward("f", library, (x, weight, bias), (2, 1e-5, "silu", True))[1]
        arrays = {"dout": dout, "x": x, "weight": weight, "bias": bias, "stats": stats}
        again = lambda *y: topic.backward("f", library, y, ("silu",))
        arguments = tuple(arrays.values())

    def seen(*given):
        calls.append(given)
        return again(*given)

    make = lambda given: getattr(topic, name)(library, views_of(given), seen)
    views_of = lambda given: {k: library.view(y) for k, y in given.items() if y is not None}
    call = make(arrays)
    if what == "dout" and name == "_forward_detour":
        assert call is None
        return
    found = call(*arguments)
    assert make(dict(zip(arrays, calls[0]))) is None, "needs no other detour"
    for ours, right in zip(found, again(*arguments), strict=True):
        assert (ours is None) == (right is None)
        if ours is not None:
            assert ours.stride() == right.stride()
            torch.testing.assert_close(ours, right, rtol=0, atol=0)
