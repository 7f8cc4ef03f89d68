"""More than 2^31 elements (GPU only): offsets must be 64-bit."""

import fcntl
import tempfile
from pathlib import Path

import pytest
from matrix import each, each_library

import cupyflash
from cupyflash import environment
from cupyflash.testing import expected

pytestmark = pytest.mark.large
BYTES = 40 << 30


@pytest.fixture
def memory_pool(target):
    """Room on the GPU for one test at a time, given back at the end for the other processes."""
    import cupy

    pool = cupy.get_default_memory_pool()
    with open(Path(tempfile.gettempdir()) / "cupyflash-test-large.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pool.free_all_blocks()
        free, _ = cupy.cuda.runtime.memGetInfo()
        if free < BYTES:
            pytest.skip(f"needs {BYTES >> 30} GB of free GPU memory, got {free >> 30}")
        yield pool
        pool.free_all_blocks()


@each(library="cupy")
def test_batch_beyond_2_31_elements(target, memory_pool):
    """The last entries of a batch of 2.15e9 elements, bit for bit as these entries alone."""
    import cupy

    inputs = target.inputs("float16", batch=1, seqlen_q=128, heads_q=32, head_dim=128)
    x = cupy.zeros((4100, 128, 32, 128), "float16")
    x[-1], x[-2], x[-3] = inputs.q[0], inputs.k[0], inputs.v[0]

    def run(x):
        out, lse = cupyflash.attention(x, x, x, causal=True, return_lse=True)
        gradients = cupyflash.attention_backward(
            x, x, x, x, out, lse, causal=True, deterministic=True
        )
        return out, lse, *gradients

    results, alone = run(x), run(x[-3:])
    for name, result, right in zip(("out", "lse", "dq", "dk", "dv"), results, alone):
        assert (result[-3:] == right).all(), name
        assert name == "lse" or not result[:-3].any(), name


@each(library="cupy")
def test_strides_beyond_2_31_elements(target, memory_pool):
    """Rows 2^24 elements apart: one sequence of 140 rows spans 2.3e9 elements."""
    import cupy

    inputs = target.inputs("float16", batch=1, seqlen_q=140, heads_q=2, head_dim=64)
    memory = cupy.full((1, 140, 2**17, 128), cupy.nan, "float16")
    q, k, v, dout = (memory[:, :, i : i + 2, :64] for i in (0, 2, 4, 2**17 - 2))
    q[...], k[...], v[...], dout[...] = inputs.q, inputs.k, inputs.v, inputs.dout
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dq, dk, dv = cupyflash.attention_backward(dout, q, k, v, out, lse)
    expected(inputs).check(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


@each_library(library="cupy")
def test_norms_beyond_2_31_elements(target, memory_pool):
    """The last rows of 2.15e9 elements, bit for bit as these rows alone."""
    import cupy

    x = cupy.zeros((525000, 4096), "float16")
    x[-3:] = cupy.random.standard_normal((3, 4096), dtype="float32")
    weight = cupy.arange(1, 4097, dtype="float32") / 4096

    def run(x):
        out, h, stats = cupyflash.layer_norm(x, weight, residual=x, return_stats=True)
        dx, *_ = cupyflash.layer_norm_backward(x, h, weight, stats)
        return out, h, stats, dx

    for name, result, right in zip(("out", "h", "stats", "dx"), run(x), run(x[-3:])):
        assert (result[-3:] == right).all(), name


@each_library(library="cupy")
@pytest.mark.parametrize("shape", [(525000, 64, 64), (525, 64, 256, 250)], ids=str)
def test_group_norm_beyond_2_31_elements(target, memory_pool, shape):
    """In one pass and in two: the last sample as alone."""
    import cupy

    x = cupy.zeros(shape, "float16")
    x[-1] = cupy.random.standard_normal(shape[1:], dtype="float32")
    weight = cupy.arange(1, 65, dtype="float32") / 64

    def run(x):
        out, stats = cupyflash.group_norm(
            x, 8, weight, weight, activation="silu", return_stats=True
        )
        return out, cupyflash.group_norm_backward(x, x, weight, weight, stats, activation="silu")[0]

    for name, result, right in zip(("out", "dx"), run(x), run(x[-1:])):
        # Alone, more blocks share a group: sums in another order.
        assert float(abs(result[-1] - right[0]).max()) <= 2.0**-8, name


@each_library(library="cupy")
def test_diffusion_step_beyond_2_31_elements(target, memory_pool):
    import cupy

    sampler = cupyflash.DiffusionSampler.ddim(cupyflash.beta_schedule("cosine", 50), 10)
    x = cupy.zeros((33000, 65536), "float16")
    x[-1] = cupy.random.standard_normal(65536, dtype="float32")
    out = sampler.step(x, x, 3)
    assert (out[-1] == sampler.step(x[-1:], x[-1:], 3)[0]).all() and not out[:-1].any()


@each_library(library="cupy")
@pytest.mark.parametrize("backend", [None, "sm80", "simt"])
@pytest.mark.parametrize("sizes", [(4096, 64), (64, 4096)], ids=str)
def test_linear_beyond_2_31_elements(target, memory_pool, backend, sizes):
    """x, or out, of 2.15e9 elements: the last rows as these rows alone."""
    import cupy

    depth, columns = sizes
    x = cupy.zeros((525000, depth), "float16")
    x[-20:] = cupy.random.standard_normal((20, depth), dtype="float32")
    weight = cupy.random.standard_normal((columns, depth), dtype="float32").astype("float16")
    with environment.override(backend=backend):
        out, right = (cupyflash.linear(y, weight) for y in (x, x[-20:]))
    # The tile may be another one, and so the order of the sums.
    assert float(abs(out[-20:] - right).max()) <= 2.0**-9 * float(abs(right).max())
    assert not out[:-20].any()


@each_library(library="cupy")
@pytest.mark.parametrize("rows", [1, 4])
def test_weights_beyond_2_31_elements(target, memory_pool, rows):
    """Few rows: the last columns as these columns alone, which another kernel may do."""
    import cupy

    weight = cupy.zeros((525000, 4096), "float16")
    weight[-20:] = cupy.random.standard_normal((20, 4096), dtype="float32")
    x = cupy.random.standard_normal((rows, 4096), dtype="float32").astype("float16")
    out = cupyflash.linear(x, weight)
    right = cupyflash.linear(x, weight[-20:])
    assert float(abs(out[:, -20:] - right).max()) <= 2.0**-9 * float(abs(right).max())
    assert not out[:, :-20].any()
