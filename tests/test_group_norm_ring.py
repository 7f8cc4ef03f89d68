"""GroupNorm whose blocks share a sample that stays in shared memory: which samples, and races."""

import gc
import os
import random
import shutil
from types import SimpleNamespace

import pytest
from arrays import normal, stored
from fakes import Stream, fake_cupy
from matrix import each_library
from targets import compute_capability

import cupyflash
from cupyflash.group_norm import group_norm as topic
from cupyflash.group_norm import ring as ring_module
from cupyflash.group_norm.groups import Groups
from cupyflash.group_norm.kernels import GroupNormBwdRing
from cupyflash.group_norm.ring import Samples, workspace_bytes
from cupyflash.runtime import driver
from cupyflash.runtime.array import View
from cupyflash.runtime.operation import Plans
from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.runtime.tensor_map import TensorMapSpec
from cupyflash.testing import expected_group_norm, poison_free_memory

HAS_RING = compute_capability()[0] == 90


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_shapes(seed, tensors):
    """nhwc_ring.cuh relies on all of this: positions, memory, the order of events."""
    draw = random.Random(seed)
    found = {1: 0}
    for _ in range(100):
        item, processors = draw.choice([2, 4]), draw.choice([4, 20, 78, 132, 148])
        width = 16 // item * draw.choice([draw.randint(1, 256), 16 * draw.randint(1, 16)])
        groups = draw.choice([g for g in range(1, 65) if width % g == 0])
        batch, positions = draw.randint(1, 300), draw.randint(1, 2 ** draw.randint(0, 20))
        samples = Samples(batch, groups, width // groups, positions, item, tensors)
        ring = ring_module.ring_shape(samples, processors, draw.random() < 0.9)
        if ring is None:
            continue
        found[ring.slices] = found.get(ring.slices, 0) + 1
        assert groups % ring.slices == 0
        width, groups = width // ring.slices, groups // ring.slices
        assert ring.teams <= ring_module.MAX_TEAMS and ring.flight <= ring_module.MAX_FLIGHT
        assert 1 <= ring.teams <= batch and ring.teams * ring.blocks <= processors
        assert (ring.blocks - 1) * ring.span < positions <= ring.blocks * ring.span
        of_stream = workspace_bytes(
            ring_module.MAX_GROUPS, ring_module.MAX_FLIGHT, ring_module.MAX_TEAMS, processors
        )
        own = workspace_bytes(groups, ring.flight, ring.teams, ring.teams * ring.blocks)
        assert own <= of_stream
        assert width * item % 16 == 0
        rows = ring_module.CONSUMERS // (width * item // 16)
        slot = rows * ring_module.SLOT_PACKS // tensors
        if ring.slices > 1:  # what a tensor map can
            assert width <= 256 and slot <= 256 and slot * width * item % 128 == 0
        assert (ring.sample_slots - 1) * slot < ring.span <= ring.sample_slots * slot
        assert ring.sample_slots < ring.slots < (ring.flight + 1) * ring.sample_slots
        in_flight = ring.runs * ring_module.CONSUMERS * 8 + groups * 16
        shares = 2 * ring_module.CONSUMERS * 8 if tensors == 2 else 0
        memory = ring_module.RING_BYTES - shares
        assert ring.slots * slot * width * item * tensors + ring.flight * in_flight <= memory
        assert ring.slots <= ring_module.MAX_SLOTS
        assert ring.flight <= ring_module.MAX_FLIGHT
        vector, size = 16 // item, width // groups
        packs = [{c // size for c in range(p, p + vector)} for p in range(0, width, vector)]
        assert ring.runs == max(map(len, packs))
    assert found[1] and len(found) > 1


def slices_of(*samples, mappable=True):
    """On an H200; 0 where there is no ring."""
    ring = ring_module.ring_shape(Samples(*samples), 132, mappable)
    return ring.slices if ring else 0


def test_what_fits():
    assert slices_of(1, 32, 10, 4096, 2, 1) == 1
    assert slices_of(1, 32, 10, 4096 * 8, 2, 1) == 2  # fits as a whole
    assert slices_of(1, 32, 10, 4096 * 8, 2, 1, mappable=False) == 1
    assert slices_of(1, 32, 10, 4096 * 8, 2, 2) == 2
    assert slices_of(1, 32, 10, 4096 * 8, 2, 2, mappable=False) == 0  # the memory
    assert slices_of(1, 32, 4, 65536 * 2, 2, 1) == 2  # more than a round, of 128 bytes a position
    assert slices_of(1, 32, 4, 65536 * 4, 2, 1) == 0
    assert slices_of(1, 1, 320, 4096 * 16, 2, 2) == 0  # one group
    assert slices_of(1, 32, 256, 8192, 2, 1) == 32  # a row of threads, then of a box
    assert slices_of(1, 128, 8, 16384, 2, 1) == 4  # groups, then bytes
    assert slices_of(1, 128, 8, 64, 2, 1) == 0  # so small only as a whole
    assert slices_of(1000, 3, 16, 16, 2, 1) == 0  # too many rounds


def test_workspaces_of_streams(monkeypatch):
    """One for each stream, whatever the shapes; captured launches have their own."""
    made, capturing, numbers = [], set(), {}

    def memory(size):
        made.append(size)
        return Stream(4096 * len(made))

    fake_cupy(monkeypatch, Memory=memory).current = Stream(0)
    monkeypatch.setattr(ring_module, "is_capturing", lambda stream: stream in capturing)
    monkeypatch.setattr(ring_module, "stream_number", lambda stream: numbers.get(stream, stream))
    monkeypatch.setattr(ring_module, "all_multiprocessors", lambda device: 132)
    workspaces = ring_module.RingWorkspaces(0)
    library = SimpleNamespace(zeros_int32=lambda n, like: n, pointer=lambda x: -x)
    address = lambda stream, size: workspaces.address(stream, library, None, size)[0]
    one, other = Stream(55), Stream(56)
    first = address(one, 100)
    assert address(one, 1000) == first != address(None, 100)
    capturing.add(55)
    assert address(one, 100) == -25 and address(other, 100) > 0
    capturing.clear()
    assert address(one, 100) == first and len(made) == 3
    numbers[55] = 1055  # the next stream of this handle
    assert address(one, 100) not in (first, address(other, 100)) and len(made) == 4
    for i in range(100, 200):
        address(Stream(i), 100)
    assert len(made) == ring_module.MAX_WORKSPACES and address(Stream(9), 4) == -1


def test_the_workspace_is_for_the_whole_gpu(monkeypatch):
    """Also where the first plan is for a part of it: all plans of a stream share it."""
    fake_cupy(monkeypatch, Memory=None)
    for name in ("multiprocessors", "all_multiprocessors"):
        count = driver.multiprocessor_limit if name == "multiprocessors" else lambda: 132
        monkeypatch.setattr(ring_module, name, lambda device, count=count: count(), raising=False)
    with driver.limit_multiprocessors(8):
        workspaces = ring_module.RingWorkspaces(0)
    assert workspaces.bytes == workspace_bytes(64, 8, 8, 132)


def arrays(target, batch, channels, positions, dtype, seed=0):
    """(dout, x, weight, bias)."""
    shape = (batch, channels, positions)
    values = normal(shape, (seed, 0)), normal(shape, (seed, 1), mean=2.0)
    dout, x = (stored(target, v, dtype, "channels_last") for v in values)
    return dout, x, *(stored(target, normal(channels, (seed, i)), dtype) for i in (2, 3))


def run(groups, dout, x, weight, bias):
    """Forward and backward."""
    options = {"activation": "silu"}
    out, stats = cupyflash.group_norm(x, groups, weight, bias, return_stats=True, **options)
    gradients = cupyflash.group_norm_backward(dout, x, weight, bias, stats, **options)
    return {"out": out, "stats": stats, **dict(zip(("dx", "dweight", "dbias"), gradients))}


def check(groups, dout, x, weight, bias, results):
    expected_group_norm(dout, x, groups, weight, bias, "silu", 1e-5).check(**results)


def rings(monkeypatch, call):
    """What `call` returns, and of forward and backward whether they took the ring."""
    plans = {"_forward_plans": Plans(3), "_backward_plans": Plans(4)}
    for name, found in plans.items():
        monkeypatch.setattr(topic, name, found)
    result = call()
    return result, [bool(plan.ring) for found in plans.values() for plan in found.values()]


# (samples, channels, groups, positions)
SAMPLES = [
    (1, 320, 32, 4096),
    (3, 320, 32, 1000),
    (37, 640, 32, 257),
    (60, 256, 64, 700),
    (9, 24, 8, 30011),
    (5, 2048, 32, 300),
    (11, 72, 24, 9001),
    (4, 8, 1, 100003),
]


@each_library(device="cuda")
@pytest.mark.parametrize("sizes", SAMPLES, ids=str)
def test_samples(target, sizes, monkeypatch):
    batch, channels, groups, positions = sizes
    for dtype in ("float16", "float32"):
        if dtype == "float32" and channels > 1024:
            continue
        tensors = arrays(target, batch, channels, positions, dtype)
        size = batch * channels * positions * (2 if dtype == "float16" else 4)
        poison_free_memory(target.library, target.device, [size] * 2)
        results, found = rings(monkeypatch, lambda: run(groups, *tensors))  # noqa: B023
        assert found == [HAS_RING] * 2
        check(groups, *tensors, results)


@each_library(device="cuda")
@pytest.mark.parametrize("tensors", [1, 2])
def test_just_fits(target, tensors, monkeypatch):
    """The largest sample, and one with a position more, with little shared memory."""
    import cupy

    monkeypatch.setattr(ring_module, "RING_BYTES", 40 << 10)
    processors = cupy.cuda.Device().attributes["MultiProcessorCount"]

    def fits(positions):
        return ring_module.ring_shape(Samples(2, 5, 64, positions, 2, tensors), processors, False)

    positions = next(n for n in range(512, 1 << 20) if not fits(n + 1))
    monkeypatch.setattr(ring_module, "MAX_MAP_STRIDE", 0)  # no slices
    for extra in (0, 1):
        problem = arrays(target, 2, 320, positions + extra, "float16")
        results, found = rings(monkeypatch, lambda: run(5, *problem))  # noqa: B023
        assert found[tensors - 1] == (HAS_RING and not extra)
        check(5, *problem, results)


# (samples, channels, groups, positions), bytes of a round, (slices, teams) of 16-bit types
SLICED = [
    ((3, 128, 32, 4096), 1, (2, 1)),
    ((2, 512, 32, 1000), 1, (8, 1)),
    ((5, 640, 32, 257), 1, (4, 1)),
    ((1, 256, 2, 20011), 1, (2, 1)),
    ((40, 320, 32, 129), 1, (2, 1)),
    ((9, 2560, 32, 150), 1 << 20, (16, 8)),  # no block could take them whole
]


@each_library(device="cuda")
@pytest.mark.parametrize("sizes, round_bytes, expected", SLICED, ids=str)
def test_slices(target, sizes, round_bytes, expected, monkeypatch):
    """Of samples that lie apart, in a batch or alone."""
    batch, channels, groups, positions = sizes
    monkeypatch.setattr(ring_module, "ROUND_BYTES", round_bytes)
    monkeypatch.setattr(ring_module, "MIN_ROUND_BYTES", 0)
    made = []

    class Counted(ring_module.RingLaunch):
        def __init__(self, config, groups, eps, ring, device):
            made.append((ring.slices, ring.teams))
            super().__init__(config, groups, eps, ring, device)

    monkeypatch.setattr(ring_module, "RingLaunch", Counted)
    for dtype in ("float16", "bfloat16", "float32"):
        dout, x, weight, bias = arrays(target, 2 * batch, channels, positions, dtype)
        tensors = dout[::2], x[::2], weight, bias
        size = batch * channels * positions * (4 if dtype == "float32" else 2)
        poison_free_memory(target.library, target.device, [size] * 2)
        made.clear()
        results, found = rings(monkeypatch, lambda: run(groups, *tensors))  # noqa: B023
        assert found == [HAS_RING] * 2
        assert all(slices > 1 for slices, _ in made)
        assert dtype == "float32" or made == [expected] * 2 * HAS_RING
        check(groups, *tensors, results)


@pytest.mark.parametrize("batch, strides, step", [(2, (8000, 1, 40), 16000), (1, (7, 1, 40), 4000)])
def test_slice_maps(batch, strides, step):
    """A box is what a slot has; the stride of a single sample is made up."""
    tensors = {name: View((batch, 40, 50), strides, "float16", 0) for name in ("x", "dout", "dx")}
    config = GroupNormBwdRing("float16", "float16", "silu")
    groups = Groups("f", tensors, 5)
    part = ring_module.samples_of(config, groups).parted(5)
    assert (
        ring_module.slice_maps(config, groups, part)
        == [TensorMapSpec("float16", (40, 50, 1, batch), (80, 80, step), 256, 8, swizzled=False)]
        * 2
    )


@each_library(device="cuda")
def test_repeatable(target):
    """Bit by bit, whatever the blocks of the launch before have left."""
    problems = [arrays(target, n, 320, p, "float16", n) for n, p in ((40, 641), (3, 4096))]
    first = [run(32, *problem) for problem in problems]
    for _ in range(50):
        for problem, right in zip(problems, first):
            again = run(32, *problem)
            assert all((again[name] == right[name]).all() for name in right)


@each_library(library="torch", device="cuda")
def test_two_streams(target):
    """The same signature on both, many launches that may run at once."""
    import torch

    problems = [arrays(target, 12, 320, 700, "float16", seed) for seed in (0, 1)]
    right = [run(32, *problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = []
    for _ in range(30):
        for stream, problem in zip(streams, problems):
            with torch.cuda.stream(stream):
                found.append(run(32, *problem))
    torch.cuda.synchronize()
    for i, results in enumerate(found):
        assert all((results[name] == right[i % 2][name]).all() for name in results)


@each_library(library="torch", device="cuda")
def test_graph(target):
    """Replays, with launches outside the graph between them and with new numbers."""
    import torch

    problem = arrays(target, 12, 320, 701, "float16")
    other = arrays(target, 12, 320, 701, "float16", 5)
    first, second = run(32, *problem), run(32, *other[:2], *problem[2:])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with no_garbage_collected(), torch.cuda.graph(graph):
        captured = [run(32, *problem) for _ in range(3)]
    original = [y.clone() for y in problem[:2]]
    for source, right in ((original, first), (other, second)) * 3:
        for y, new in zip(problem[:2], source):
            y.copy_(new)
        run(32, *problem)
        graph.replay()
        for results in captured:
            assert all((results[name] == right[name]).all() for name in right)


@each_library(device="cuda")
def test_shapes_share_a_workspace(target):
    """One launch of each shape after the other, with more teams and fewer: their tags count on."""
    problems = [
        (32, arrays(target, 3, 320, 4096, "float16", 1)),
        (32, arrays(target, 37, 640, 257, "float16", 2)),
        (8, arrays(target, 9, 24, 30011, "float16", 3)),
        (32, arrays(target, 40, 320, 641, "float16", 4)),
    ]
    first = [run(groups, *problem) for groups, problem in problems]
    for (groups, problem), results in zip(problems, first):
        check(groups, *problem, results)
    draw = random.Random(0)
    for _ in range(200):
        i = draw.randrange(len(problems))
        again = run(problems[i][0], *problems[i][1])
        assert all((again[name] == first[i][name]).all() for name in again)


# The ring's memory lies beside the pools, so the whole GPU is asked.
alone = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="measures the memory of the GPU: run without -n"
)


@alone
@each_library(device="cuda")
def test_memory_of_many_shapes(target):
    """A hundred shapes later there is no more memory in use than after the first."""
    used = []
    for i in range(101):
        run(8, *arrays(target, 2, 64, 20000 + 32 * i, "float16"))
        if i in (0, 100):
            used.append(device_memory(target))
    # Half a megabyte for each shape would be 50.
    assert used[1] < used[0] + 4 * 2**20, f"{used[0]} bytes after the first, {used[1]} at the end"


def device_memory(target):
    """Bytes of the GPU that are in use, without what the pools of the libraries keep."""
    import cupy

    target.synchronize()
    gc.collect()
    if target.library == "torch":
        import torch

        torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


@alone
@each_library(library="torch", device="cuda")
def test_dropped_graphs_leave_no_memory(target):
    import torch

    problem = arrays(target, 2, 64, 20000, "float16")
    run(8, *problem)
    used = []
    for i in range(21):
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collected(), torch.cuda.graph(graph):
            captured = run(8, *problem)
        graph.replay()
        del graph, captured
        if i in (0, 20):
            used.append(device_memory(target))
    # Code of the driver for a graph may stay; a pool of torch would be 2 MB a graph.
    assert used[1] < used[0] + 10 * 2**20, used


@each_library(library="torch", device="cuda")
@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "options", [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}], ids=str
)
def test_compiled_with_cuda_graphs(target, options, training):
    """torch accounts for all memory in the pool of its graph: nothing else may stay there."""
    import torch

    if "mode" in options and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    torch.compiler.reset()
    dout, x, weight, bias = arrays(target, 3, 320, 4096, "float16")
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
