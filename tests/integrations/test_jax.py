"""JAX arrays outside of jit, through DLPack, wherever JAX put them."""

import dataclasses
import os

import numpy
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


X = numpy.ones((1, 2, 8), "float32")
CALLS = {
    "attention": lambda x: cupyflash.attention(*[x[None]] * 3),
    "scaled_dot_product_attention": lambda x: cupyflash.scaled_dot_product_attention(x, x, x),
    "triangle_attention": lambda x: cupyflash.triangle_attention(
        *[x[None, None]] * 3, jax.numpy.ones((1, 1, 1, 2, 2))
    ),
    "flash_attn_combine": lambda x: cupyflash.flash_attn_combine(x[:, None, None], x[..., None]),
    "layer_norm": lambda x: cupyflash.layer_norm(x, x[0, 0]),
    "linear": lambda x: cupyflash.linear(x, x[0]),
    "group_norm": lambda x: cupyflash.group_norm(x, 1),
    "DiffusionSampler.step": lambda x: SAMPLER.step(x, x, 1),
    "DiffusionSampler.embeddings": lambda x: SAMPLER.embeddings(8, like=x),
    "attention_with_cache": lambda x: cupyflash.attention_with_cache(*[x[None]] * 5, None),
}
SAMPLER = cupyflash.DiffusionSampler.ddim(cupyflash.beta_schedule("linear", 4))
TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "grad": lambda call: jax.grad(lambda x: call(x).sum()),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", CALLS)
def test_transforms_are_refused_by_name(function, transform):
    call = CALLS[function] if transform != "vmap" else lambda x: CALLS[function](x[None])  # one row
    said = f"^{function}: a call within jax.jit, grad, vmap .* allowed is one outside .* tracer"
    with pytest.raises(NotImplementedError, match=said):
        TRANSFORMS[transform](call)(jax.numpy.asarray(X))


def test_a_tracer_beside_plain_arrays_is_refused():
    q = X[None]
    with pytest.raises(
        NotImplementedError, match="^attention: .* jax.jit, grad.* got k as a tracer"
    ):
        jax.grad(lambda k: cupyflash.attention(q, k, q).sum())(jax.numpy.asarray(q))
