"""Random problems in a row, one backend against another: nothing hangs, nothing is lost.

GPU only. Run it under a timeout (``--timeout``): a lost barrier shows as a hang.
"""

import numpy
import pytest
from targets import backends

import cupyflash
from cupyflash import environment

PROBLEMS, PARTS = 1000, 8
HEAD_DIMS = (40, 64, 96, 128, 192, 256)


def random_problem(rng):
    """Shape of q and of k, and options."""
    heads_kv = int(rng.integers(1, 4))
    batch, group = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 5]))
    seqlens = numpy.exp(rng.uniform(0, numpy.log(1500), 2)).astype(int).tolist()
    if rng.random() < 0.5:
        seqlens[1] = seqlens[0]
    head_dim = int(rng.choice(HEAD_DIMS))
    causal = rng.choice([False, True, "top-left"]).item()
    window = None
    if rng.random() < 0.3:
        window = tuple(int(x) if rng.random() < 0.7 else None for x in rng.integers(0, 300, 2))
    q = (batch, seqlens[0], heads_kv * group, head_dim)
    k = (batch, seqlens[1], heads_kv, head_dim)
    return q, k, {"causal": {"False": False, "True": True}.get(causal, causal), "window": window}


def results(backend, q, k, v, dout, options, deterministic):
    with environment.override(backend=backend):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        gradients = cupyflash.attention_backward(
            dout, q, k, v, out, lse, deterministic=deterministic, **options
        )
    return (out, lse, *gradients)


@pytest.mark.skipif(len(backends()) < 3, reason="needs a GPU with two tensor-core backends")
@pytest.mark.parametrize("part", range(PARTS))
def test_backends_agree(part):
    import cupy

    rng = numpy.random.default_rng(part)
    cupy.random.seed(part)
    first, second = backends()[:2]
    for _ in range(PROBLEMS // PARTS):
        q_shape, k_shape, options = random_problem(rng)
        shapes = (q_shape, k_shape, k_shape, q_shape)
        tensors = [cupy.random.standard_normal(x, "float32").astype("float16") for x in shapes]
        deterministic = bool(rng.random() < 0.3)
        found, wanted = (results(x, *tensors, options, deterministic) for x in (first, second))
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
            x, y = x.astype("float32"), y.astype("float32")
            same = cupy.isneginf(x) == cupy.isneginf(y)
            difference = cupy.where(cupy.isneginf(y), 0, x - y)
            error, size = (
                float(cupy.linalg.norm(t)) for t in (difference, cupy.where(cupy.isneginf(y), 0, y))
            )
            fact = f"{name} of {q_shape}, {k_shape}, {options}, deterministic={deterministic}"
            # The second term: gradients that are nothing but rounding, where a query sees one key.
            assert bool(same.all()) and error <= 5e-3 * size + 2e-3 * x.size**0.5, fact
