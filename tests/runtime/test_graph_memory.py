"""CUDA graphs of CuPy: replays leave the memory of others alone, and what they held comes back."""

import contextlib
import gc
import time

import pytest
from targets import backends, is_hopper

import cupyflash
from cupyflash.ops.decode.kernels import DECODE_COUNTERS
from cupyflash.runtime import scratch
from cupyflash.runtime.scratch import no_garbage_collected, tile_counters

pytestmark = pytest.mark.skipif(not backends(), reason="needs a GPU")


@contextlib.contextmanager
def captured(graphs):
    """What is launched within becomes a graph, appended to ``graphs``."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, no_garbage_collected():
        stream.begin_capture()
        try:
            yield stream
        finally:
            graphs.append(stream.end_capture())


def normal(*shape, dtype="float16"):
    import cupy

    return cupy.random.standard_normal(shape, "float32").astype(dtype)


def packed():
    import cupy

    cu = cupy.asarray([0, 100, 300, 512], dtype="int32")
    q, k, v = (normal(512, 4, 64) for _ in range(3))
    return lambda: cupyflash.flash_attn_varlen_func(q, k, v, cu, cu, 212, 212, causal=True)


def split_keys():
    q, k, v = normal(1, 1, 2, 64), normal(1, 8192, 2, 64), normal(1, 8192, 2, 64)
    return lambda: cupyflash.attention(q, k, v)


def sinks_of_16_bits():
    q, k, v = (normal(2, 300, 4, 64) for _ in range(3))
    sinks = normal(4)
    return lambda: cupyflash.attention(q, k, v, sinks=sinks)


def dropout():
    q, k, v = (normal(2, 300, 4, 64) for _ in range(3))
    return lambda: cupyflash.attention(q, k, v, dropout_p=0.3, dropout_seed=7)


def backward():
    q, k, v, dout = (normal(2, 700, 4, 64) for _ in range(4))
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    return lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True)


def odd_head_dim():
    q, k, v = (normal(2, 300, 4, 37) for _ in range(3))
    return lambda: cupyflash.attention(q, k, v, causal=True)


def group_norm():
    import cupy

    x = cupy.moveaxis(normal(8, 32, 32, 320), -1, 1)
    weight = normal(320, dtype="float32")
    return lambda: cupyflash.group_norm(x, 32, weight, weight, activation="silu")


def long_rows():
    x, weight = normal(4, 262144), normal(262144, dtype="float32")
    return lambda: cupyflash.layer_norm(x, weight)


def combined():
    out, lse = normal(3, 2, 300, 4, 64), normal(3, 2, 300, 4, dtype="float32")
    return lambda: cupyflash.flash_attn_combine(out, lse)


CALLS = [packed, split_keys, sinks_of_16_bits, dropout, backward, odd_head_dim]
CALLS += [group_norm, long_rows, combined]


def collect_all():
    """The driver says some time later, on a thread of its own, that a graph is gone."""
    gc.collect()
    end = time.monotonic() + 10
    while scratch._graphs.waiting and time.monotonic() < end:
        scratch._graphs.collect()
        time.sleep(0.001)
    assert not scratch._graphs.waiting and not scratch._graphs.of_graph
    scratch.unused_memory.clear()  # as the next launch that is not captured does


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("make", CALLS, ids=lambda x: x.__name__)
def test_replays_leave_other_memory_alone(make):
    import cupy

    cupy.random.seed(3)
    call = make()
    wanted = [x.copy() for x in as_tuple(call())]
    graphs = []
    with captured(graphs) as stream:
        results = as_tuple(call())
    # Whatever the call has given back to the pool is somebody else's now.
    others = [cupy.full(size, 77, "uint8") for size in (512, 4096, 65536, 2**20, 2**22) * 40]
    for _ in range(3):
        for x in results:
            x.fill(float("nan"))
        cupy.cuda.Device().synchronize()
        graphs[0].launch(stream)
        stream.synchronize()
        for x, right in zip(results, wanted, strict=True):
            # Both are results of these kernels: the question is whether they are overwritten.
            assert cupy.allclose(x.astype("float32"), right.astype("float32"), atol=2.0**-7)
        assert all((x == 77).all() for x in others)


def test_memory_and_counters_come_back():
    import cupy

    counters, pool = tile_counters(0), cupy.get_default_memory_pool()
    q, k, v = (normal(8, 2048, 16, 64) for _ in range(3))
    few, many = normal(1, 1, 2, 64), normal(1, 8192, 2, 64)

    def capture_and_drop():
        graphs = []
        with captured(graphs):
            for _ in range(20):
                cupyflash.attention(q, k, v, causal=True)
                cupyflash.attention(few, many, many)
        del graphs
        collect_all()

    cupyflash.attention(q, k, v, causal=True)
    cupyflash.attention(few, many, many)
    capture_and_drop()
    free, used = len(counters.numbers), pool.used_bytes()
    for _ in range(100):
        capture_and_drop()
    assert len(counters.numbers) == free
    assert pool.used_bytes() == used
    assert not scratch._graphs.waiting and not scratch._graphs.of_graph


def test_an_instantiated_graph_holds_what_it_needs():
    """The memory stays while the graph can be launched, and longer than the stream."""
    graphs = []
    few, many = normal(1, 1, 2, 64), normal(1, 8192, 2, 64)
    cupyflash.attention(few, many, many)
    with captured(graphs):
        cupyflash.attention(few, many, many)
    gc.collect()
    scratch._graphs.collect()
    assert len(scratch._graphs.waiting) == 1
    graphs[0].launch()
    graphs.clear()
    collect_all()


def test_no_capture_frees_memory():
    """cudaFree, where a pool is gone, would end a capture of torch, as another thread's would."""
    import cupy

    torch = pytest.importorskip("torch")
    graphs, pool, call = [], cupy.cuda.MemoryPool(), split_keys()
    call()
    with cupy.cuda.using_allocator(pool.malloc), captured(graphs):
        call()
    del pool
    graphs.clear()
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with no_garbage_collected(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
        end = time.monotonic() + 10
        while scratch._graphs.waiting and time.monotonic() < end:
            scratch._graphs.collect()
            time.sleep(0.001)
    assert scratch.unused_memory
    call()
    assert not scratch.unused_memory


def many_tiles():
    q = normal(1, 1024, 64, 64)
    return lambda: cupyflash.attention(q, q, q, causal=True)


def norm_backward():
    x, weight = normal(50, 96), normal(96)
    _, stats = cupyflash.layer_norm(x, weight, return_stats=True)
    return lambda: cupyflash.layer_norm_backward(x, x, weight, stats)


def split_cache():
    import cupy

    q, k, v = (normal(1, 1, heads, 64) for heads in (4, 2, 2))
    caches, positions = [normal(1, 8192, 2, 64) for _ in range(2)], cupy.asarray([8000], "int32")
    return lambda: cupyflash.attention_with_cache(q, k, v, *caches, positions)


WIDTHS = {many_tiles: (), norm_backward: (), split_cache: (DECODE_COUNTERS,)}  # tile_counters()


@pytest.mark.parametrize("make", WIDTHS, ids=lambda x: x.__name__)
def test_more_captured_launches_than_counters(make, monkeypatch):
    """Those that get none have other ways: tiles in a fixed order, or counters of their own."""
    import cupy

    counters, graphs = tile_counters(0, *WIDTHS[make]), []
    call = make()
    wanted = as_tuple(call())
    cupy.cuda.Device().synchronize()
    monkeypatch.setattr(counters, "numbers", counters.numbers[-3:])
    with captured(graphs) as stream:
        results = [as_tuple(call()) for _ in range(7)]
    if counters.numbers and not is_hopper():
        pytest.skip("takes no counters on this GPU")
    assert not counters.numbers
    for _ in range(2):
        graphs[0].launch(stream)
        stream.synchronize()
        for found in results:
            for x, right in zip(found, wanted, strict=True):
                if right is not None:
                    # Both are results of these kernels, which may add up in another order.
                    assert cupy.allclose(x.astype("f4"), right.astype("f4"), atol=2.0**-7)
    graphs.clear()
    collect_all()
    assert len(counters.numbers) == 3
