"""GroupNorm whose blocks share a sample that stays in shared memory: which samples, and races."""

import random
import re

import pytest
from arrays import normal, stored
from backends import compute_capability
from matrix import each_library

import cupyflash
from cupyflash.jit import sources
from cupyflash.norm import group_norm_dispatch, group_norm_ring
from cupyflash.norm.group_norm_ring import CAPABILITY, RING_BYTES, ring_shape
from cupyflash.testing import expected_group_norm, poison_free_memory

HAS_RING = divmod(compute_capability()[0], 10) == CAPABILITY


def test_constants():
    text = (sources.root() / "norm/group_ring.cuh").read_text(encoding="utf-8")
    found = dict(re.findall(r"constexpr int (\w+) = (\d+(?: << \d+)?);", text))
    names = ("CONSUMERS", "SLOT_PACKS", "MAX_SLOTS", "MAX_FLIGHT", "RING_BYTES")
    assert {name: eval(found[name]) for name in names} == {
        name: getattr(group_norm_ring, name) for name in names
    }
    assert int(found["MAX_RING_GROUPS"]) == group_norm_ring.MAX_GROUPS
    assert int(found["SENDERS"]) + 128 == group_norm_ring.OTHERS  # RING_THREADS


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_shapes(seed, tensors):
    """What group_ring.cuh relies on: all positions, the memory, the order of events."""
    draw = random.Random(seed)
    found = 0
    for _ in range(100):
        item, processors = draw.choice([2, 4]), draw.choice([4, 20, 78, 132, 148])
        width = 16 // item * draw.randint(1, 256)
        groups = draw.choice([g for g in range(1, 65) if width % g == 0])
        batch, positions = draw.randint(1, 300), draw.randint(1, 2 ** draw.randint(0, 20))
        ring = ring_shape(batch, groups, width // groups, positions, item, tensors, processors)
        if ring is None:
            continue
        found += 1
        assert 1 <= ring.teams <= batch and ring.teams * ring.blocks <= processors
        assert (ring.blocks - 1) * ring.span < positions <= ring.blocks * ring.span
        rows = group_norm_ring.CONSUMERS // (width * item // 16)
        slot = rows * group_norm_ring.SLOT_PACKS // tensors
        assert (ring.sample_slots - 1) * slot < ring.span <= ring.sample_slots * slot
        assert ring.sample_slots < ring.slots < (ring.flight + 1) * ring.sample_slots
        in_flight = ring.runs * group_norm_ring.CONSUMERS * 8 + groups * (16 + 8)
        assert ring.slots * slot * width * item * tensors + ring.flight * in_flight <= RING_BYTES
        assert ring.slots <= group_norm_ring.MAX_SLOTS
        assert ring.flight <= group_norm_ring.MAX_FLIGHT
        vector, size = 16 // item, width // groups
        packs = [{c // size for c in range(p, p + vector)} for p in range(0, width, vector)]
        assert ring.runs == max(map(len, packs))
    assert found


def test_what_does_not_fit():
    assert ring_shape(1, 32, 10, 4096, 2, 1, 132)
    assert ring_shape(1, 32, 10, 4096 * 8, 2, 1, 132)
    assert ring_shape(1, 32, 10, 4096 * 8, 2, 2, 132) is None  # the memory
    assert ring_shape(1, 32, 65, 64, 2, 1, 132) is None  # a row of threads
    assert ring_shape(1, 65, 8, 64, 2, 1, 132) is None  # groups
    assert ring_shape(1000, 3, 16, 16, 2, 1, 132) is None  # too many rounds


def arrays(backend, batch, channels, positions, dtype, seed=0):
    """(dout, x, weight, bias)."""
    shape = (batch, channels, positions)
    values = normal(shape, (seed, 0)), normal(shape, (seed, 1), mean=2.0)
    dout, x = (stored(backend, v, dtype, "channels_last") for v in values)
    return dout, x, *(stored(backend, normal(channels, (seed, i)), dtype) for i in (2, 3))


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
    plans = {"_forward_plans": {}, "_backward_plans": {}}
    for name, found in plans.items():
        monkeypatch.setattr(group_norm_dispatch, name, found)
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
def test_samples(backend, sizes, monkeypatch):
    batch, channels, groups, positions = sizes
    for dtype in ("float16", "float32"):
        if dtype == "float32" and channels > 1024:
            continue
        tensors = arrays(backend, batch, channels, positions, dtype)
        size = batch * channels * positions * (2 if dtype == "float16" else 4)
        poison_free_memory(backend.library, backend.device, [size] * 2)
        results, found = rings(monkeypatch, lambda: run(groups, *tensors))  # noqa: B023
        assert found == [HAS_RING] * 2
        check(groups, *tensors, results)


@each_library(device="cuda")
@pytest.mark.parametrize("tensors", [1, 2])
def test_just_fits(backend, tensors, monkeypatch):
    """The largest sample, and one with a position more, with little shared memory."""
    import cupy

    monkeypatch.setattr(group_norm_ring, "RING_BYTES", 40 << 10)
    processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    fits = lambda positions: ring_shape(2, 32, 10, positions, 2, tensors, processors)  # noqa: E731
    positions = next(n for n in range(512, 1 << 20) if not fits(n + 1))
    for extra in (0, 1):
        problem = arrays(backend, 2, 320, positions + extra, "float16")
        results, found = rings(monkeypatch, lambda: run(32, *problem))  # noqa: B023
        assert found[tensors - 1] == (HAS_RING and not extra)
        check(32, *problem, results)


@each_library(device="cuda")
def test_repeatable(backend):
    """Bit by bit, whatever the blocks of the launch before have left."""
    problems = [arrays(backend, n, 320, p, "float16", n) for n, p in ((40, 641), (3, 4096))]
    first = [run(32, *problem) for problem in problems]
    for _ in range(50):
        for problem, right in zip(problems, first):
            again = run(32, *problem)
            assert all((again[name] == right[name]).all() for name in right)


@each_library(library="torch", device="cuda")
def test_two_streams(backend):
    """The same signature on both, many launches that may run at once."""
    import torch

    problems = [arrays(backend, 12, 320, 700, "float16", seed) for seed in (0, 1)]
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
def test_graph(backend):
    """Replays, with launches outside the graph between them and with new numbers."""
    import torch

    problem = arrays(backend, 12, 320, 701, "float16")
    other = arrays(backend, 12, 320, 701, "float16", 5)
    first, second = run(32, *problem), run(32, *other[:2], *problem[2:])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [run(32, *problem) for _ in range(3)]
    original = [y.clone() for y in problem[:2]]
    for source, right in ((original, first), (other, second)) * 3:
        for y, new in zip(problem[:2], source):
            y.copy_(new)
        run(32, *problem)
        graph.replay()
        for results in captured:
            assert all((results[name] == right[name]).all() for name in right)
