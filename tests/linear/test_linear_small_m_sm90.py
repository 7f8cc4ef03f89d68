"""Projections of small M on Hopper: which kernel, its argument, and its results."""

import dataclasses

import numpy
import pytest
from arrays import normal, stored
from fakes import fake_facts, fake_launches
from matrix import covering, each_case, each_library, libraries, pairwise
from targets import is_hopper

from cupyflash.ops.linear import launches, small_m_sm90_kernels
from cupyflash.ops.linear.launches import LinearSmallMLaunch
from cupyflash.ops.linear.options import Arrays, Options
from cupyflash.ops.linear.sm90_kernels import Rotary
from cupyflash.ops.linear.small_m_sm90_kernels import CLUSTERS, ROWS, LinearSmallMSm90, choose
from cupyflash.runtime.lookup import library_of
from cupyflash.runtime.structs import header
from cupyflash.testing import expected_projection, to_library, to_numpy64

structs = header("linear/params.cuh")

DEPTHS = [64, 72, 200, 768, 1000, 4096]


def chosen(rows, columns, depth, *, norm=False, gated=False, rotary=False, **changes):
    problem = {"dtype": "float16", "capability": (9, 0), "strides": (depth, depth)} | changes
    return choose(
        **problem,
        epilogue=("none", gated, rotary),
        norm=norm,
        sizes=(rows, columns, depth),
        multiprocessors=132,
    )


# Configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("depth", [8, *DEPTHS, 14336])
@pytest.mark.parametrize("rows", [1, 9, 32])
def test_shared_memory(rows, depth, norm):
    """All blocks find room on the GPU at once, each with a stage at least."""
    for columns in (1, 768, 6144, 50257):
        config = chosen(rows, columns, depth, norm=norm)
        if config is None:
            assert norm and depth >= 4096
            continue
        blocks = -(-config.grid(rows, columns, 132) // 132)
        stages = config.stages(columns, depth, norm, 132)
        assert 1 <= stages <= 12
        memory = config.smem_bytes(stages, depth, norm)
        assert memory <= config.shared_memory == 231424
        assert blocks * (memory + 2048) <= 233472
        assert config.steps(depth) * config.cluster * 64 >= depth
        assert config.cluster <= -(-depth // 64)  # every block has a step


@pytest.mark.parametrize(
    ("columns", "depth", "cluster"),
    [
        (768, 768, 8),
        (2304, 768, 4),
        (4096, 14336, 2),
        (6144, 4096, 2),
        (50257, 768, 1),
        (133 * 64, 768, 2),  # two rounds of a cluster of 1
        (768, 64, 1),
    ],
)
def test_cluster(columns, depth, cluster):
    """The smallest one that has all multiprocessors at work."""
    config = chosen(4, columns, depth)
    assert config.cluster == cluster
    assert config.grid(4, columns, 132) >= 119 or cluster in (8, depth // 64)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "long"),
    [
        (4, 28672, 4096, True),
        (5, 28672, 4096, False),
        (4, 6144, 4096, False),
        (1, 6144, 4096, True),
        (1, 50257, 768, False),
        (1, 768, 3072, False),
    ],
)
def test_long(rows, columns, depth, long):
    assert small_m_sm90_kernels.is_long(rows, columns, depth) == long


@pytest.mark.parametrize(
    ("rows", "depth", "apart"), [(8, 4096, False), (9, 4096, True), (32, 768, False)]
)
def test_norm_and_rotary_are_apart(rows, depth, apart):
    assert small_m_sm90_kernels.is_apart(rows, depth) == apart


@pytest.mark.parametrize("rows", [1, 8, 17])
@pytest.mark.parametrize("kind", [{}, {"gated": True}, {"rotary": True}])
def test_every_choice_is_listed(rows, kind):
    listed = set(small_m_sm90_kernels.configurations((9, 0)))
    for columns, depth in ((768, 768), (2304, 768), (6144, 4096), (40, 8)):
        assert chosen(rows, columns, depth, **kind) in listed
    assert list(small_m_sm90_kernels.configurations((8, 0))) == []


def test_tiles_fill_a_stage():
    for config in small_m_sm90_kernels.configurations((9, 0)):
        rows = config.map_rows
        assert rows["x"] == config.rows and rows["weight"] == rows["gate_weight"]
        assert rows["weight"] == 64 // (1 + config.gated + config.rotary)
        assert config.grid(5, 130, 132) == (5 if config.gated else 3) * config.cluster
        assert config.grid(5, 130, 2) == (2 if config.cluster == 1 else config.grid(5, 130, 132))


@pytest.mark.parametrize(
    ("rotary", "expected"),
    [((64, 64), True), ((128, 128), True), ((192, 192), True)]
    + [((32, 32), False), ((96, 96), False), ((128, 64), False), ((64, 64, True), False)],
)
def test_turns(rotary, expected):
    assert small_m_sm90_kernels.turns(Rotary(*rotary)) is expected


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"rows": 33},
        {"depth": 12},
        {"strides": (68, 64)},
        {"strides": (0, 64)},
    ],
)
def test_what_it_takes(changes):
    sizes = {"rows": 3, "columns": 67, "depth": 64}
    assert chosen(**sizes) and chosen(**(sizes | {"rows": 32}))
    assert chosen(**(sizes | changes)) is None


# The kernel's argument ------------------------------------------------------------------------


def test_launch(monkeypatch):
    machine = fake_launches(monkeypatch, structs.LinearSmallMSm90Params)
    config = LinearSmallMSm90("bfloat16", "silu", True, False, 16, 4)
    params = structs.LinearParams(
        rows=9, columns=650, depth=768, x_stride=2304, weight_stride=768, gate_stride=776
    )
    launch = LinearSmallMLaunch(config, 0, params, norm=False)
    launch.start(None, launch.argument(*range(16, 16 * 13, 16)))
    ((grid, threads, memory, found),) = machine.launched
    stage = (16 + 64) * 128
    assert (grid, threads) == (84, 160) and found.stages == 3
    assert memory == 3 * stage + 64 * 18 * 4 + 4 * 16 * 8
    maps = [found.x_map, found.weight_map, found.gate_weight_map]
    assert [bytes(x) for x in maps] == [bytes([i]) * 128 for i in range(1, 4)]
    assert (found.base.x, found.base.out, found.base.columns) == (16, 192, 650)
    assert [(x, spec.dims[:2], spec.strides[0], spec.box_rows) for x, spec in machine.encoded] == [
        (16, (768, 9), 4608, 16),
        (32, (768, 650), 1536, 32),
        (48, (768, 650), 1552, 32),
    ]


# Results --------------------------------------------------------------------------------------

on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs the backend sm90")


@dataclasses.dataclass(frozen=True)
class Case:
    """A projection with random inputs and NaN around each of them.

    Attributes:
        few_stages: the ring is shorter than the depth of a block.
        head_dim: of five heads, of which three are turned; 0 without a rotary embedding.
    """

    dtype: str
    rows: int
    columns: int
    depth: int
    activation: str
    gated: bool
    residual: bool
    norm: str
    bias: bool
    cluster: int
    few_stages: bool
    head_dim: int = 0

    def arrays(self, target):
        seeds = iter(numpy.random.SeedSequence().generate_state(9))
        make = lambda *shape, mean=0.0, scale=1.0, dtype=self.dtype: stored(
            target,
            scale * normal(shape, next(seeds), mean=mean),
            dtype,
            "padded" if len(shape) == 2 else "contiguous",
        )
        wide = "float32" if self.bias else self.dtype  # of the norm's weight
        columns, depth, half = self.columns, self.depth, self.head_dim // 2
        angles = 10 * normal((50, half), next(seeds))
        turn = lambda function: stored(target, function(angles), wide) if half else None
        positions = numpy.random.default_rng().integers(0, 50, self.rows, "int32")
        positions = to_library(positions, target.library, target.device)
        return Arrays(
            x=make(self.rows, depth, mean=3.0 if self.norm else 0.0),
            weight=make(columns, depth, scale=depth**-0.5),
            gate_weight=make(columns, depth, scale=depth**-0.5) if self.gated else None,
            bias=make(columns) if self.bias else None,
            gate_bias=make(columns) if self.bias and self.gated else None,
            residual=make(self.rows, columns) if self.residual else None,
            norm_weight=make(depth, dtype=wide) if self.norm else None,
            norm_bias=make(depth, dtype=wide) if self.norm == "layer" else None,
            cos=turn(numpy.cos),
            sin=turn(numpy.sin),
            positions=positions if half else None,
        )

    @property
    def config(self):
        tile = next(tile for tile in ROWS if self.rows <= tile)
        kind = self.activation, self.gated, bool(self.head_dim)
        return LinearSmallMSm90(self.dtype, *kind, tile, self.cluster)


def launched(target, case, arrays):
    """``out``, after a look at what is around it."""
    rows, columns = case.rows, case.columns
    nothing = numpy.full((rows + 2, columns + 7), numpy.nan)
    memory = stored(target, nothing, case.dtype)
    out, library = memory[1 : rows + 1, 3 : columns + 3], library_of(memory)
    stride = lambda x: 0 if x is None else library.view(x).strides[0]
    params = structs.LinearParams(
        x_stride=stride(arrays.x),
        weight_stride=stride(arrays.weight),
        gate_stride=stride(arrays.gate_weight),
        residual_stride=stride(arrays.residual),
        out_stride=columns + 7,
        rows=rows,
        columns=columns,
        depth=case.depth,
    )
    if case.norm:
        params.norm = structs.RowNorm(1e-5, 1 / case.depth, case.norm == "rms", case.bias)
    if case.head_dim:
        params.rotary = structs.Rotary(
            seqlen=1,
            num_positions=50,
            columns=3 * case.head_dim,
            head_dim=case.head_dim,
            rotary_dim=case.head_dim,
            wide=case.bias,
        )
    launch = LinearSmallMLaunch(case.config, 0, params, norm=bool(case.norm))
    used = arrays[: Arrays._fields.index("down_weight")]
    pointers = (0 if x is None else library.pointer(x) for x in (*used, out))
    launch.start(None, launch.argument(*pointers))
    target.synchronize()
    around = to_numpy64(memory).copy()
    around[1 : rows + 1, 3 : columns + 3] = numpy.nan
    assert numpy.isnan(around).all()
    return out


def cases(target):
    """With each activation, then with a rotary embedding."""
    plain = {
        "dtype": ["float16", "bfloat16"],
        "rows": [1, 3, 8, 9, 16, 17, 32],
        "columns": [1, 40, 64, 65, 777],
        "depth": DEPTHS,
        "activation": ["none", "gelu", "gelu_tanh", "silu", "relu"],
        "gated": [False, True],
        "residual": [False, True],
        "norm": ["", "layer", "rms"],
        "bias": [False, True],
        "cluster": list(CLUSTERS),
        "few_stages": [False, True],
    }
    turned = {
        "dtype": ["float16", "bfloat16"],
        "rows": [1, 8, 11, 32],
        "depth": [200, 1000, 4096],
        "norm": ["", "layer", "rms"],
        "bias": [False, True],
        "cluster": list(CLUSTERS),
        "few_stages": [False, True],
        "head_dim": [64, 128, 192],
    }
    nothing = {"activation": "none", "gated": False, "residual": False}
    found = covering(Case, plain)
    found += [Case(**point, **nothing, columns=5 * point["head_dim"]) for point in pairwise(turned)]
    found = [case for case in found if case.cluster <= -(-case.depth // 64)]
    fits = lambda x: x.config.smem_bytes(2, x.depth, bool(x.norm)) <= x.config.shared_memory
    return [case for case in found if fits(case)]


@on_hopper
@each_case(cases, libraries("torch", "cuda"))
def test_results(target, case, monkeypatch):
    if case.few_stages:
        monkeypatch.setattr(LinearSmallMSm90, "stages", lambda *_: 2)
    if case.cluster == 1:  # several tiles for each block
        fake_facts(monkeypatch, launches, multiprocessors=3)
    arrays = case.arrays(target)
    out = launched(target, case, arrays)
    heads = (1, 2) if case.head_dim else (0, 0)
    options = Options(case.activation, rms=case.norm == "rms", heads=heads)
    expected_projection(arrays, options).check(out=out)


@on_hopper
@each_library(device="cuda")
@pytest.mark.parametrize("norm", ["", "layer"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_repeats(target, cluster, norm):
    """All multiprocessors, several blocks or tiles on each; the same bits every time."""
    columns = 10000 // cluster
    case = Case("float16", 30, columns, 1032, "gelu", False, True, norm, True, cluster, False)
    arrays = case.arrays(target)
    first = launched(target, case, arrays)
    expected_projection(arrays, Options("gelu")).check(out=first)
    for _ in range(10):
        assert (launched(target, case, arrays) == first).all()


@on_hopper
@each_library(device="cuda")
@pytest.mark.parametrize("norm", ["", "layer"])
def test_nan_stays_in_its_row(target, norm):
    case = Case("float16", 20, 264, 136, "gelu", False, False, norm, True, 2, False)
    arrays = case.arrays(target)
    arrays.x[[5, 19], 135] = float("nan")
    out = to_numpy64(launched(target, case, arrays))
    broken = ~numpy.isfinite(out).all(1)
    assert numpy.isnan(out[[5, 19]]).all() and set(numpy.flatnonzero(broken)) == {5, 19}
