"""Projections of many rows on Hopper: which kernel, its argument, and its results at tile edges."""

import ctypes
import dataclasses

import numpy
import pytest
from arrays import normal, stored
from fakes import fake_facts, fake_launches
from matrix import each_library
from targets import is_hopper

from cupyflash.ops.linear import launches, sm90_kernels
from cupyflash.ops.linear.launches import LinearLaunch
from cupyflash.ops.linear.options import Arrays, Options
from cupyflash.ops.linear.reference import project
from cupyflash.ops.linear.sm90_kernels import TILES, Epilogue, Rotary, choose, configuration
from cupyflash.runtime.gpu import HALF
from cupyflash.runtime.lookup import library_of
from cupyflash.runtime.structs import header
from cupyflash.testing import assert_close_to_float64, cast, to_float64

structs = header("linear/params.cuh")

SHARED_MEMORY = 232448  # of a block on sm_90
GELU, GATED, RESIDUAL = Epilogue("gelu"), Epilogue("silu", gated=True), Epilogue(residual=True)
EPILOGUES = {
    "plain": Epilogue(),
    "gelu": GELU,
    "gated": GATED,
    "gated-residual": Epilogue("gelu_tanh", gated=True, residual=True),
    "residual": RESIDUAL,
    "relu-residual": Epilogue("relu", residual=True),
    "rotary-64": Epilogue(rotary=Rotary(64, 64)),
    "rotary-128": Epilogue(rotary=Rotary(128, 128)),
    "rotary-96": Epilogue(rotary=Rotary(96, 96)),
    "rotary-partial": Epilogue(rotary=Rotary(64, 32)),
    "rotary-interleaved": Epilogue(rotary=Rotary(64, 40, True)),
}


# Configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES)
def test_shared_memory(tile):
    """Barriers and bias are static and take whole kilobytes, so that the tiles are aligned."""
    barriers = 2 * 8 * tile.stages
    static = -(-(barriers + 2 * 2 * tile.block_n * 2) // 1024) * 1024
    assert tile.smem_bytes + static <= SHARED_MEMORY


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
def test_tiles_fill_a_stage(epilogue):
    """A block and its cluster load each row of x and of the weights once."""
    for tile in TILES:
        if not tile.fits(epilogue):
            continue
        config = configuration("float16", tile, epilogue)
        rows = config.map_rows
        assert max(rows.values()) <= 256 and rows["x"] == rows["residual"] == tile.block_m
        loads = 2 if tile.cluster == 2 or epilogue.gated else 1
        assert rows["weight"] == rows["gate_weight"] == tile.block_n // loads
        assert config.tile == tile and config.epilogue == epilogue


@pytest.mark.parametrize(
    "problem, tile",
    [
        ((4096, 3072, 768, GELU), (128, 192)),  # a short depth: the epilogue must be hidden
        ((4096, 768, 3072, RESIDUAL), (128, 192)),  # 128 tiles
        ((8192, 14336, 4096, GATED), (128, 256)),
        ((8192, 4096, 14336, RESIDUAL), (128, 256)),
        ((64, 4096, 4096, Epilogue()), (64, 64)),
        ((128, 14336, 4096, Epilogue()), (128, 128)),
    ],
)
def test_choice(problem, tile):
    *sizes, epilogue = problem
    config = choose("bfloat16", *sizes, 132, epilogue)
    assert (config.block_m, config.block_n) == tile


@pytest.mark.parametrize("rows", [1, 63, 129, 5000])
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
def test_every_choice_is_listed(rows, epilogue):
    """What is compiled ahead of time is what runs, but for unusual rotary embeddings."""
    listed = set(sm90_kernels.configurations((9, 0)))
    config = choose("float16", rows, 768, 768, 132, epilogue)
    assert epilogue.rotary not in (Rotary(), *sm90_kernels.LISTED_ROTARY) or config in listed
    assert list(sm90_kernels.configurations((8, 0))) == []


@pytest.mark.parametrize(
    "tile, rows, columns, blocks",
    [
        (TILES[0], 4096, 3072, 132),
        (TILES[0], 256, 257, 4),  # two clusters
        (TILES[0], 1, 1, 2),
        (TILES[-1], 65, 64, 2),
    ],
)
def test_grid(tile, rows, columns, blocks):
    config = configuration("float16", tile, Epilogue())
    assert config.grid(rows, columns, 132) == blocks


def test_grid_of_a_small_gpu():
    """A cluster runs on neighbouring multiprocessors, so their number is rounded down."""
    config = configuration("float16", TILES[0], Epilogue())
    assert config.grid(2**20, 2**20, 7) == 6 and config.grid(2**20, 2**20, 1) == 2


def supports(**changes):
    problem = {"dtype": "float16", "capability": (9, 0), "rows": 5, "columns": 64, "depth": 64}
    return sm90_kernels.supports(**{**problem, "strides": (64, 64, 64), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"capability": (10, 0)},
        {"rows": 0},
        {"rows": 2**31 - 1},
        {"columns": 68},
        {"depth": 0},
        {"depth": 12},
        {"strides": (64, 68)},
        {"strides": (64, 0)},  # expanded
        {"strides": (64, -64)},  # reversed
        {"strides": (2**39, 64)},  # 2^40 bytes
    ],
)
def test_supports(changes):
    assert supports() and supports(rows=2**30, strides=(8, 2**39 - 8))
    assert not supports(**changes)


@pytest.mark.parametrize(
    "rotary, expected",
    [
        (Rotary(64, 64), True),
        (Rotary(128, 96), True),
        (Rotary(96, 96), True),
        (Rotary(80, 80), False),  # tiles would cut heads
        (Rotary(64, 24), False),  # half of it is no multiple of 8
        (Rotary(64, 24, True), True),
        (Rotary(64, 20, True), False),
        (Rotary(24, 8, True), True),
        (Rotary(12, 8, True), False),  # a block of eight columns would be of two heads
        (Rotary(512, 512), False),
    ],
)
def test_turns(rotary, expected):
    assert sm90_kernels.turns(rotary) is expected


# The kernel's argument ------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Records what was encoded, and what was launched."""
    return fake_launches(monkeypatch, structs.LinearSm90Params)


def params_of(rows, columns, depth, **more):
    strides = {"x_stride": depth, "weight_stride": depth, "gate_stride": depth}
    strides |= {"residual_stride": columns, "out_stride": columns}
    return structs.LinearParams(rows=rows, columns=columns, depth=depth, **{**strides, **more})


def test_launch(machine):
    config = configuration("bfloat16", TILES[0], Epilogue("silu", gated=True))
    params = params_of(1000, 640, 768, x_stride=2304, out_stride=648)
    launch = LinearLaunch(config, 0, params)
    pointers = tuple(range(16, 16 * 13, 16))
    launch.start(None, launch.argument(*pointers))
    ((grid, threads, memory, found),) = machine.launched
    assert (grid, threads, memory) == (40, 384, config.smem_bytes)
    maps = [found.x_map, found.weight_map, found.gate_weight_map, found.residual_map, found.out_map]
    assert [bytes(x) for x in maps] == [bytes([i]) * 128 for i in range(1, 6)]
    assert (found.base.x, found.base.bias, found.base.out) == (16, 64, 192)
    assert (found.base.columns, found.base.rows) == (640, 1000)
    assert ctypes.sizeof(found) % 64 == 0
    dims_of = {pointer: (spec.dims[:2], spec.strides[0]) for pointer, spec in machine.encoded}
    assert dims_of == {
        16: ((768, 1000), 4608),
        32: ((768, 640), 1536),
        48: ((768, 640), 1536),
        96: ((640, 1000), 1280),
        192: ((640, 1000), 1296),
    }
    assert [spec.box_rows for _, spec in machine.encoded] == [128, 128, 128, 128, 16]
    launch.start(None, launch.argument(*pointers))
    assert len(machine.encoded) == 5 and len(machine.launched) == 2  # maps are encoded once


def test_stride_of_a_single_row(machine):
    config = configuration("float16", TILES[-1], Epilogue())
    params = params_of(1, 64, 72, x_stride=3, out_stride=5)
    LinearLaunch(config, 0, params).argument(*range(12))
    strides = {pointer: spec.strides for pointer, spec in machine.encoded}
    assert strides[0] == (144,) * 3 and strides[11] == (128,) * 3


# Results --------------------------------------------------------------------------------------

on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs the backend sm90")


@dataclasses.dataclass
class Call:
    """A projection with random inputs; the GPU sees NaN around each of them."""

    target: object
    dtype: str
    epilogue: Epilogue
    rows: int
    columns: int
    depth: int
    bias: bool = True

    def __post_init__(self):
        gated, residual, rotary = self.epilogue[1:]
        rows, columns, depth = self.rows, self.columns, self.depth
        half = rotary.rotary_dim // 2
        shapes = {
            "x": (rows, depth),
            "weight": (columns, depth),
            "gate_weight": (columns, depth) if gated else None,
            "bias": (columns,) if self.bias else None,
            "gate_bias": (columns,) if gated and self.bias else None,
            "residual": (rows, columns) if residual else None,
            "cos": (rows + 3, half) if half else None,
            "sin": (rows + 3, half) if half else None,
        }
        values = {
            name: normal(shape, (i, rows, columns, depth))
            for i, (name, shape) in enumerate(shapes.items())
            if shape
        }
        if "bias" in values:
            values["bias"] *= 8  # seen beside the sums
        rounded = {name: cast(y, self.dtype, "numpy") for name, y in values.items()}
        self.values = {name: y.astype("float32") for name, y in rounded.items()}
        if half:
            order = numpy.random.default_rng(depth)
            self.values["positions"] = order.integers(0, rows + 3, rows)
        self.heads = columns // rotary.head_dim - 2 if half else 0  # without those of k and v

    def expected(self):
        """(exact, baseline)."""
        activation, _, _, rotary = self.epilogue
        heads = (self.heads, 1) if self.heads else (0, 0)
        options = Options(activation, interleaved=rotary.interleaved, heads=heads)
        wide = Arrays(**{name: self._wide(y) for name, y in self.values.items()})
        narrow = Arrays(**self.values)
        rounded = lambda y: cast(y.astype("float32"), self.dtype, "numpy").astype("float32")
        return project(wide, options), project(narrow, options, rounded)

    def _wide(self, y):
        return y.astype("float64") if y.dtype == numpy.float32 else y

    def run(self, tile):
        """``out``, after a look at what is around it."""
        rows, columns, rotary = self.rows, self.columns, self.epilogue.rotary
        kept = {
            name: stored(self.target, y, self.dtype, "padded" if y.ndim == 2 else "contiguous")
            for name, y in self.values.items()
            if name not in ("positions", "cos", "sin")
        }
        for name in ("positions", "cos", "sin"):
            if name in self.values:
                kept[name] = self.target.array(self.values[name])
        nothing = numpy.full((rows + 2, columns + 16), numpy.nan)
        memory = stored(self.target, nothing, self.dtype)
        kept["out"] = memory[1 : rows + 1, 8 : columns + 8]
        pointer = library_of(memory).pointer
        names = [name for name, _ in structs.LinearParams._fields_[:12]]
        params = params_of(
            rows,
            columns,
            self.depth,
            x_stride=self.depth + 16,
            weight_stride=self.depth + 16,
            gate_stride=self.depth + 16,
            residual_stride=columns + 16,
            out_stride=columns + 16,
            rotary=structs.Rotary(
                seqlen=rows,
                num_positions=rows + 3,
                columns=(self.heads + 1) * rotary.head_dim,
                head_dim=rotary.head_dim,
                rotary_dim=rotary.rotary_dim,
                interleaved=rotary.interleaved,
                wide=True,
                wide_positions=True,
            ),
        )
        launch = LinearLaunch(configuration(self.dtype, tile, self.epilogue), 0, params)
        pointers = (pointer(kept[name]) if name in kept else 0 for name in names)
        launch.start(None, launch.argument(*pointers))
        self.target.synchronize()
        around = to_float64(memory)
        around = around.get() if hasattr(around, "get") else around
        out = around[1 : rows + 1, 8 : columns + 8].copy()
        around[1 : rows + 1, 8 : columns + 8] = numpy.nan
        assert numpy.isnan(around).all()
        return out


@pytest.fixture
def few_processors(monkeypatch):
    """A small grid: each block has several tiles, in turn."""
    fake_facts(monkeypatch, launches, multiprocessors=4)


def check(call, tile):
    exact, baseline = call.expected()
    values = {name: numpy.abs(y) for name, y in call.values.items()}
    terms = float(
        (values["x"] @ values["weight"].T).max() + values.get("bias", numpy.zeros(1)).max()
    )
    actual = call.run(tile)
    assert_close_to_float64(actual, exact, baseline, call.dtype, "out", terms=terms)
    return actual


def sizes_of(tile, epilogue):
    """(rows, columns, depth) of one tile and of many, whole and cut."""
    rows, columns = tile.block_m * tile.cluster, tile.out_columns(epilogue)
    head_dim = epilogue.rotary.head_dim
    unit, least = (head_dim, 3 * head_dim) if head_dim else (8, 8)  # a head each of q, k and v
    cut = -(-columns // 2 // unit) * unit
    long = tile.stages * 64 * 2
    return [
        (1, least, 8),
        (rows, max(columns, least), 64),
        (rows + 1, max(columns + cut, least), 200),
        (rows - 1, max(2 * columns, least), long + 8),
        (5 * rows - 7, 2 * columns + cut, 72),
        (4 * rows, 5 * columns, long),
    ]


@on_hopper
@each_library(device="cuda")
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile)))
def test_tiles(target, tile, epilogue, few_processors):
    if not tile.fits(epilogue):
        pytest.skip("the tile does not fit")
    dtypes = [dtype for dtype in target.dtypes if dtype in HALF]
    for i, sizes in enumerate(sizes_of(tile, epilogue)):
        check(Call(target, dtypes[i % len(dtypes)], epilogue, *sizes, bias=i != 3), tile)


@on_hopper
@each_library(device="cuda")
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile)))
def test_whole_gpu_repeats(target, tile):
    """All multiprocessors, many tiles each; the same bits every time."""
    call = Call(target, "float16", RESIDUAL, 2056, 1544, 520)
    first = check(call, tile)
    for _ in range(10):
        numpy.testing.assert_array_equal(call.run(tile), first)


@on_hopper
@each_library(device="cuda")
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile)))
def test_nan_stays_in_its_row(target, tile):
    call = Call(target, "float16", GELU, 300, 264, 136)
    call.values["x"][[5, 200], 135] = numpy.nan, numpy.inf
    out = call.run(tile)
    broken = ~numpy.isfinite(out).all(1)
    assert numpy.isnan(out[5]).all() and set(numpy.flatnonzero(broken)) <= {5, 200}


@on_hopper
@pytest.mark.large
@each_library("cupy", "cuda")
def test_large(target):
    """x and out have more than 2^31 elements; the last rows are looked at."""
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free GPU memory")
    rows, columns, depth, last = 2**20 + 100, 2056, 2056, 300
    weight = cast(normal((columns, depth), 1), "float16", "cupy")
    x = cupy.zeros((rows, depth), "float16")
    x[-last:] = cast(normal((last, depth), 2), "float16", "cupy")
    out = cupy.full((rows, columns), numpy.nan, "float16")
    pointers = (x.data.ptr, weight.data.ptr, *[0] * 9, out.data.ptr)
    for tile in TILES[:2]:
        config = configuration("float16", tile, Epilogue())
        launch = LinearLaunch(config, 0, params_of(rows, columns, depth))
        launch.start(None, launch.argument(*pointers))
        assert not out[:-last].any()
        ends = [y.get().astype("float64") for y in (x[-last:], weight)]
        exact = ends[0] @ ends[1].T
        terms = float((numpy.abs(ends[0]) @ numpy.abs(ends[1]).T).max())
        baseline = exact.astype("float16")
        assert_close_to_float64(out[-last:].get(), exact, baseline, "float16", "out", terms=terms)
