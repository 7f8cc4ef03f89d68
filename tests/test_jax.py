"""JAX arrays outside of jit, through DLPack, wherever JAX put them."""

import dataclasses
import os

import pytest

import cupyflash
from cupyflash.testing import expected, make_inputs

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would take 3/4 of the GPU
jax = pytest.importorskip("jax")


def problem(dtype):
    """The same inputs as NumPy and as JAX arrays."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    inputs = make_inputs("numpy", dtype, seqlen_q=20, seqlen_k=27, heads_q=4, heads_kv=2)
    tensors = {name: jax.numpy.asarray(getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
    return inputs, dataclasses.replace(inputs, **tensors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_forward_and_backward(dtype):
    inputs, x = problem(dtype)
    qkv = x.q, x.k, x.v
    out, lse = cupyflash.attention(*qkv, causal=True, return_lse=True)
    gradients = cupyflash.attention_backward(x.dout, *qkv, out, lse, causal=True)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    assert all(isinstance(x, jax.Array) for x in results.values())
    assert {x.device for x in results.values()} == {x.q.device}
    numpy_results = {name: jax.device_get(x) for name, x in results.items()}
    expected(inputs, causal=True).check(**numpy_results)


def test_optional_arrays():
    inputs, x = problem("float32")
    bias, sinks = inputs.q[:1, :, :1, :27].swapaxes(1, 2), inputs.q[0, 0, :, 0]
    arrays = {"bias": bias, "sinks": sinks}
    out = cupyflash.attention(
        x.q, x.k, x.v, **{name: jax.numpy.asarray(y) for name, y in arrays.items()}
    )
    expected(inputs, **arrays).check(out=jax.device_get(out))


def test_jit_is_refused():
    _, x = problem("float32")
    with pytest.raises(TypeError, match="attention: q must be .* or speak DLPack"):
        jax.jit(cupyflash.attention)(x.q, x.k, x.v)
