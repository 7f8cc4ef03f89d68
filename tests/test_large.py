"""More than 2^31 elements (GPU only): offsets must be 64-bit."""

import fcntl
import tempfile
from pathlib import Path

import pytest
from matrix import each

import cupyflash
from cupyflash.testing import expected

pytestmark = pytest.mark.large
BYTES = 40 << 30


@pytest.fixture
def memory_pool(backend):
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
def test_batch_beyond_2_31_elements(backend, memory_pool):
    """The last entries of a batch of 2.15e9 elements, bit for bit as these entries alone."""
    import cupy

    inputs = backend.inputs("float16", batch=1, seqlen_q=128, heads_q=32, head_dim=128)
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
def test_strides_beyond_2_31_elements(backend, memory_pool):
    """Rows 2^24 elements apart: one sequence of 140 rows spans 2.3e9 elements."""
    import cupy

    inputs = backend.inputs("float16", batch=1, seqlen_q=140, heads_q=2, head_dim=64)
    memory = cupy.full((1, 140, 2**17, 128), cupy.nan, "float16")
    q, k, v, dout = (memory[:, :, i : i + 2, :64] for i in (0, 2, 4, 2**17 - 2))
    q[...], k[...], v[...], dout[...] = inputs.q, inputs.k, inputs.v, inputs.dout
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dq, dk, dv = cupyflash.attention_backward(dout, q, k, v, out, lse)
    expected(inputs).check(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
