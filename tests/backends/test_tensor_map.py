"""Tensor maps and the argument they are a part of. Needs no GPU: the driver is a fake."""

import ctypes
import dataclasses
import types
from ctypes import POINTER, c_int, c_uint32, c_uint64, c_void_p

import pytest
from fakes import fake_cupy, fake_facts, fake_kernels
from problems import HOPPER

from cupyflash.ops.attention.checks import check
from cupyflash.ops.attention.options import Options
from cupyflash.ops.attention.problem import Access, Features
from cupyflash.ops.attention.sm80 import forward as sm80
from cupyflash.ops.attention.sm90 import launch
from cupyflash.ops.attention.sm90.backward import backward_kernels, storing_dbias
from cupyflash.ops.attention.sm90.forward import forward, forward_kernel, forward_kernels
from cupyflash.runtime import driver
from cupyflash.runtime import launch as kernel_launch
from cupyflash.runtime.array import View, dense_strides
from cupyflash.runtime.structs import header
from cupyflash.runtime.tensor_map import TensorMaps, TensorMapSpec

structs = header("attention/params.cuh")

SPEC = TensorMapSpec("bfloat16", (64, 5, 4, 2), (512, 128, 2560), box_rows=128)


def view(*shape, strides=None, dtype="float16"):
    return View(shape, strides or dense_strides(shape, range(len(shape))), dtype, 0)


def problem(q, k=None, v=None, layout="bshd", **more):
    tensors = {"q": q, "k": k or q, "v": v or k or q, **more}
    return check("f", tensors, Options(causal=True, layout=layout))


def biased(bias, *, scale=None, softcap=0.0, dtype="float16"):
    """Two batches of four heads, 40 queries and 72 keys; the bias begins at a multiple of 16."""
    q, k = view(2, 40, 4, 64, dtype=dtype), view(2, 72, 4, 64, dtype=dtype)
    options = Options(scale=scale, softcap=softcap)
    found = check("f", {"q": q, "k": k, "v": k}, options, {"bias": bias})
    return dataclasses.replace(found, bias_aligned=True)


def packed(q, k, longest):
    """Two sequences of at most ``longest`` (queries, keys)."""
    cu_seqlens = {name: View((3,), (1,), "int32", 0) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    options = Options(causal=True, layout="thd", max_seqlens=longest)
    return check("f", {"q": q, "k": k, "v": k}, options, cu_seqlens)


def spec(problem, name, box_rows=128):
    return launch.tensor_map(problem, name, problem.strides[name], box_rows)


# What a map describes -------------------------------------------------------------------------


def test_dense():
    found = spec(problem(view(2, 5, 4, 40)), "q", 192)
    assert found == TensorMapSpec("float16", (40, 5, 4, 2), (320, 80, 1600), 192)


def test_heads_outside_rows():
    found = spec(problem(view(2, 4, 5, 64), layout="bhsd"), "q")
    assert (found.dims, found.strides) == ((64, 5, 4, 2), (128, 640, 2560))


def test_packed_sequences_are_a_batch_of_one():
    queries, keys = view(30, 4, 64), view(50, 2, 64, strides=(1024, 64, 1))
    q, k = (spec(packed(queries, keys, (20, 35)), name) for name in "qk")
    assert (q.dims, q.strides[:2]) == ((64, 30, 4, 1), (512, 128))
    assert (k.dims, k.strides[:2]) == ((64, 50, 2, 1), (2048, 128))


def test_axes_of_length_one_may_have_any_stride():
    q = view(1, 1, 1, 64, strides=(0, 3, 2**60, 1))
    found = problem(q, view(1, 5, 1, 64, strides=(7, 64, -1, 1)))
    assert found.access == Access.TENSOR_MAP
    assert spec(found, "q").strides == (128, 128, 128)
    one_row = packed(view(1, 1, 64, strides=(9, 9, 1)), view(5, 1, 64), (1, 5))
    found = spec(one_row, "q")
    assert (found.dims, found.strides) == ((64, 1, 1, 1), (128, 128, 128))


def test_no_keys():
    """A valid map of an array without elements; nothing is loaded from it."""
    found = problem(view(2, 5, 4, 64), view(2, 0, 4, 64))
    assert found.access == Access.TENSOR_MAP
    assert spec(found, "k").dims == (64, 1, 4, 2)
    assert SPEC.encode(0) == bytes(128)


@pytest.mark.parametrize(
    "bias, dims, strides",
    [
        (view(2, 4, 40, 72), (72, 40, 4, 2), (144, 5760, 23040)),
        (view(40, 72), (72, 40, 1, 1), (144, 144, 144)),
        (view(2, 1, 40, 72), (72, 40, 1, 2), (144, 144, 5760)),
        (view(2, 4, 40, 72, strides=(0, 2880, 72, 1)), (72, 40, 4, 1), (144, 5760, 144)),
        (view(4, 40, 72, strides=(3200, 80, 1)), (72, 40, 4, 1), (160, 6400, 160)),
    ],
)
def test_bias(bias, dims, strides):
    """The axes that it is broadcast on have length 1."""
    found = launch.bias_map(biased(bias), 64)
    assert found == TensorMapSpec("float16", dims, strides, 64)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("strides", [(325, 65, 65, 1), (-640, -128, -64, 1), (0, 0, 0, 1)])
def test_tensor_without_elements(layout, strides):
    """CuPy gives such a view an address and the strides of its base; the driver checks them."""
    shape = {"bshd": (2, 0, 4, 64), "bhsd": (2, 4, 0, 64), "thd": (0, 4, 64)}[layout]
    k = view(*shape, strides=strides[-len(shape) :])
    if layout == "thd":
        found = packed(view(30, 4, 64), k, (20, 0))
    else:
        found = problem(view(*(5 if n == 0 else n for n in shape)), k, layout=layout)
    assert found.access == Access.TENSOR_MAP
    for name in "kv":
        made = spec(found, name)
        assert min(made.dims) >= 1
        assert all(step > 0 and step % 16 == 0 for step in made.strides)


def test_bias_without_keys():
    """A view of no column has the strides of rows that a map takes."""
    q, k = view(2, 40, 4, 64), view(2, 0, 4, 64)
    bias = view(2, 4, 40, 0, strides=(11520, 2880, 72, 1))
    options = Options()
    found = check("f", {"q": q, "k": k, "v": k}, options, {"bias": bias})
    found = dataclasses.replace(found, bias_aligned=True)
    assert found.features.bias_by_tma and min(launch.bias_map(found, 64).dims) >= 1


# Which problems a map can take ----------------------------------------------------------------


@pytest.mark.parametrize(
    "strides, access",
    [
        ((1280, 256, 64, 1), Access.TENSOR_MAP),
        ((0, 256, 64, 1), Access.VECTOR),  # expanded
        ((1280, -256, 64, 1), Access.VECTOR),  # reversed
        ((2**39, 256, 64, 1), Access.VECTOR),  # 2^40 bytes
        ((2**39 - 8, 256, 64, 1), Access.TENSOR_MAP),
        ((1280, 256, 68, 1), Access.ELEMENT),
    ],
)
def test_access(strides, access):
    dense, special = view(2, 5, 4, 64), view(2, 5, 4, 64, strides=strides)
    assert problem(dense, special, dense).access == access
    assert problem(dense, dense, dense, dout=special, out=dense).access == access
    assert problem(dense, dense, dense, dout=dense, out=special).access == Access.TENSOR_MAP


def test_access_of_pointers():
    found = dataclasses.replace(problem(view(2, 5, 4, 64)), aligned=False)
    assert found.access == Access.ELEMENT


@pytest.mark.parametrize(
    "shape, strides, by_tma",
    [
        ((2, 4, 40, 72), None, True),
        ((40, 72), (80, 1), True),  # padded rows
        ((2, 4, 40, 72), (0, 0, 72, 1), True),  # expanded
        ((2, 1, 1, 72), None, False),  # one row for all queries: few bytes
        ((40, 72), (0, 1), False),
        ((40, 1), None, False),
        ((40, 72), (1, 40), False),  # transposed
        ((40, 72), (76, 1), False),  # rows on no multiple of 16 bytes
        ((4, 40, 72), (2884, 72, 1), False),
        ((40, 72), (-72, 1), False),
        ((2, 1, 40, 72), (2**39, 0, 72, 1), False),  # 2^40 bytes
    ],
)
def test_bias_by_tma(shape, strides, by_tma):
    """Through a map where one can describe it, and only on sm_90."""
    found = biased(view(*shape, strides=strides))
    lengths = dict.fromkeys(("tiny", "fits_128", "few_keys"), True) | {"short": 4}
    assert found.features == Features(bias=1, bias_by_tma=by_tma, **lengths)
    kind = found.kind((9, 0))
    kinds = forward_kernel(kind).bias, backward_kernels(kind)[1].bias
    assert kinds == ((4, 4) if by_tma else (1, 1))
    assert sm80.forward_kernel(found.kind((8, 0))).bias == 1


def test_bias_not_by_tma():
    dense = view(2, 4, 40, 72)
    assert not dataclasses.replace(biased(dense), bias_aligned=False).features.bias_by_tma
    for dtype, kind in {"float32": 3, "bool": 2}.items():
        features = biased(view(2, 4, 40, 72, dtype=dtype)).features
        assert (features.bias, features.bias_by_tma) == (kind, False)
    assert not biased(dense, scale=2.0**21).features.bias_by_tma
    assert not biased(dense, softcap=2.0**21).features.bias_by_tma
    assert biased(dense, softcap=9.0, scale=2.0**21).features.bias_by_tma


@pytest.mark.parametrize(
    "shape, options, stored",
    [
        ((2, 4, 40, 72), {}, True),
        ((4, 40, 72), {}, False),  # sequences share it
        ((2, 1, 40, 72), {}, False),
        ((2, 4, 40, 72), {"softcap": 9.0}, False),  # its slope lies between the two
        ((2, 4, 40, 72), {"scale": 2.0**21}, False),  # not by TMA
    ],
)
def test_stored_gradient(shape, options, stored):
    """sm_90 stores dS where it is the gradient of the bias, in rows of whole 16 bytes."""
    found = biased(view(*shape), **options)
    main = backward_kernels(found.kind((9, 0)))[1]
    storing = storing_dbias(main)
    assert (found.bias_gradient_is_ds and storing.stores_dbias) == stored
    assert not storing.takes_key_mask and storing.bias_box_rows == main.bias_box_rows
    found.shape.seqlen_k = 68
    assert not found.bias_gradient_is_ds


@pytest.mark.parametrize(
    "causal, window, masked",
    [(False, None, False), (True, None, True), (False, (3, None), True), (False, (9, 9), True)],
)
def test_masked(causal, window, masked):
    x = view(2, 5, 4, 64)
    found = check("f", {"q": x, "k": x, "v": x}, Options(causal=causal, window=window))
    names = ("tiny", "fits_128", "few_keys", "one_tile", "one_pass")
    lengths = dict.fromkeys(names, True) | {"short": 4}
    assert found.features == Features(softcap=False, alibi=False, masked=masked, **lengths)


# Encoding -------------------------------------------------------------------------------------


@pytest.fixture
def libcuda(monkeypatch):
    """A fake libcuda: it records its arguments and fills a map with the count of its calls."""
    calls = []

    @ctypes.CFUNCTYPE(
        c_int, c_void_p, c_int, c_uint32, c_uint64, POINTER(c_uint64), POINTER(c_uint64),
        POINTER(c_uint32), POINTER(c_uint32), c_int, c_int, c_int, c_int,
    )  # fmt: skip
    def encode(memory, dtype, rank, address, dims, strides, box, steps, *switches):
        counts = (dims, 4), (strides, 3), (box, 4), (steps, 4)
        calls.append((dtype, rank, address, *(tuple(x[:n]) for x, n in counts), switches))
        ctypes.memset(memory, 0xFF if memory % 64 else len(calls), 128)
        return fake.status

    fake = types.SimpleNamespace(calls=calls, status=0, cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(ctypes, "CDLL", {driver.DRIVER: fake}.get)
    driver.function.cache_clear()
    yield fake
    driver.function.cache_clear()


@pytest.fixture
def devices(monkeypatch):
    """The devices that were made current; stands in for CuPy. They have no dependent launches."""
    fake_facts(monkeypatch, kernel_launch, capability_of=(8, 0))
    return fake_cupy(monkeypatch).made_current


def test_encode(libcuda):
    assert SPEC.encode(4096) == b"\1" * 128
    box = (64, 128, 1, 1)
    switches = (0, 3, 3, 0)  # no interleaving, 128-byte swizzle, 256 bytes to the L2, zeros
    assert libcuda.calls == [
        (9, 4, 4096, SPEC.dims, SPEC.strides, box, (1, 1, 1, 1), switches),
    ]


def test_rejected_by_the_driver(libcuda):
    libcuda.status = 1
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled failed with 1: .*0x1000"):
        SPEC.encode(4096)


def test_maps_are_encoded_once(libcuda, devices, monkeypatch):
    maps = TensorMaps([SPEC, SPEC], 3)
    first = maps[16, 32]
    assert first == b"\1" * 128 + b"\2" * 128 and maps[16, 32] is first
    assert [call[2] for call in libcuda.calls] == [16, 32] and devices == [3]
    monkeypatch.setattr(TensorMaps.__module__ + ".MAX_ENCODED", 2)
    assert maps[16, 48] == b"\1" * 128 + b"\3" * 128 and len(maps) == 2
    assert maps[64, 32] == b"\4" * 128 + b"\2" * 128 and len(maps) == 1  # full: from the beginning


# The kernel's argument ------------------------------------------------------------------------


def launches_go_to(monkeypatch, kernel_of, counter=0):
    """To a function for each configuration, with a counter of tiles at this address."""
    fake_kernels(monkeypatch, kernel_of)
    packed = counter.to_bytes(8, "little")
    monkeypatch.setattr(launch, "tile_counters", lambda device: lambda stream: packed)


def test_launch_puts_maps_in_front(libcuda, devices, monkeypatch):
    arguments = []
    function = lambda *launch: arguments.append(launch[:3])
    launches_go_to(monkeypatch, lambda config: function, counter=5)
    call = problem(view(2, 200, 4, 64))
    config = forward_kernel(call.kind((9, 0))._replace(features=Features()))
    strides = {f"{name}_strides": call.strides["q"] for name in ("q", "k", "v", "out")}
    params = structs.FlashFwdParams(**strides, lse_head_stride=5, shape=call.shape)
    made = launch.PersistentLaunch(config, call, params, HOPPER._replace(multiprocessors=7))
    made.start(None, made.argument(*range(16, 29)))
    grid, threads, argument = arguments[0]
    assert (grid, threads) == (7, 512)
    params = structs.FlashFwdSm90Params.from_buffer_copy(argument)
    assert len(argument) == ctypes.sizeof(params) == 1024
    assert (params.num_splits, params.partial_rows, params.packed_tiles) == (1, 0, None)
    maps = params.q_map, params.k_map, params.v_map, params.out_map
    assert [bytes(x) for x in maps] == [bytes([i]) * 128 for i in (1, 2, 3, 4)]
    assert params.tile_counter == 5
    assert [x[2] for x in libcuda.calls] == [16, 17, 18, 19]
    assert [x[5][1] for x in libcuda.calls] == [64, 128, 128, 64]
    assert bytes(params.bias_map) == bytes(128)
    base = params.base
    assert (base.q, base.seqused_k, base.lse_head_stride) == (16, 28, 5)
    assert base.shape.seqlen_q == 200


def test_map_of_the_bias_is_the_last(libcuda, devices, monkeypatch):
    """Behind all else in the argument, in either pass; keys shared out or not."""
    BIAS = 4096  # its address
    arguments = []
    function = lambda grid, threads, argument, *_: arguments.append(argument)
    launches_go_to(monkeypatch, lambda config: function)
    call = biased(view(2, 1, 40, 72))
    forward, *_, split, combine = forward_kernels(call.kind((9, 0)))
    backward = backward_kernels(call.kind((9, 0)))[1]
    for config, splits, params, argument, box_rows in (
        (forward, 1, structs.FlashFwdParams, structs.FlashFwdSm90Params, 64),
        (split, 3, structs.FlashFwdParams, structs.FlashFwdSm90Params, 64),
        (backward, 1, structs.FlashBwdParams, structs.FlashBwdSm90Params, 128),
    ):
        names = {name: name if name in "kv" else "q" for name in config.boxes}
        strides = {f"{name}_strides": call.strides[like] for name, like in names.items()}
        base = config, call, params(**strides, shape=call.shape), HOPPER
        made = launch.PersistentLaunch(*base)
        if splits > 1:
            made = launch.SplitLaunch(*base, splits, combine)
        pointers = range(1, 1 + len(kernel_launch.call_fields(params())))
        libcuda.calls.clear()
        arguments.clear()
        made.start(None, made.argument(*pointers, workspace=2**20, bias=BIAS))
        assert len(libcuda.calls) == 5 and len(arguments) == (1 if splits == 1 else 2)
        found = argument.from_buffer_copy(arguments[0])
        assert bytes(found.bias_map) == b"\5" * 128 and found.base.shape.seqlen_k == 72
        assert getattr(found, "num_splits", 1) == splits
        dtype, rank, address, dims, steps, box = libcuda.calls[4][:6]
        assert (address, dims, box) == (BIAS, (72, 40, 1, 2), (64, box_rows, 1, 1))


def test_keys_are_shared_out_where_tiles_are_few(libcuda, devices, monkeypatch):
    """(queries, keys, heads), (queries of a tile, blocks, splits) on 132 multiprocessors."""
    launched = []
    kernel_of = lambda config: (
        lambda grid, threads, argument, *_: launched.append((config, grid, argument))
    )
    launches_go_to(monkeypatch, kernel_of)
    for lengths, expected in {
        (1, 2048, 4): (64, 4 * 16, 16),  # a tile of 128 keys each
        (200, 2**17, 4): (64, 4 * 4 * 8, 8),
        (1, 2**17, 1): (64, 32, 32),  # no more than a warp has lanes
        (2048, 2048, 4): (64, 32 * 4, 1),
        (1, 511, 1): (64, 1, 1),
        (1, 0, 1): (128, 1, 1),
    }.items():
        queries, keys, heads = lengths
        call = problem(view(1, queries, heads, 128), view(1, keys, heads, 128))
        call.strides["out"] = call.strides["q"]
        kind = call.kind((9, 0))._replace(features=Features())
        (made,) = forward(call, kind, HOPPER).launches
        launched.clear()
        made.start(None, made.argument(*range(16, 29), workspace=2**20))
        block_m, blocks, splits = expected
        assert launched[0][1] == blocks and len(launched) == (1 if splits == 1 else 2)
        params = structs.FlashFwdSm90Params.from_buffer_copy(launched[0][2])
        main = launched[0][0]
        assert (main.block_m, main.split, params.num_splits) == (block_m, splits > 1, splits)
        if splits > 1:
            rows = queries * heads
            assert launched[1][2] == launched[0][2]
            assert launched[1][0] == forward_kernels(kind)[-1]
            assert params.partial_rows == rows and not params.tile_counter
            assert params.partial_out == 2**20
            assert params.partial_sums == 2**20 + 4 * splits * rows * 128
            assert made.workspace_size == splits * rows * 130
