"""Equal calls give equal bits, again and again (GPU only): what differs from run to run is a race.

The shapes fill the GPU with blocks that begin at once, so that producers and consumers of shared
memory meet at every distance. What is added by atomics, dq and the gradient of a broadcast bias,
is compared with ``deterministic=True`` or not at all.
"""

import pytest
from targets import HALF, backends

import cupyflash
from cupyflash import environment

REPEATS = 50
BIASES = (None, "broadcast", "full", "float32", "bool")

pytestmark = pytest.mark.skipif(not backends(), reason="needs a GPU")


def arrays(dtype, shapes):
    import cupy

    rng = cupy.random.default_rng(1)
    return [rng.random(shape, dtype="float32").astype(dtype) for shape in shapes]


def bias_of(kind, dtype, batch, heads, rows, keys):
    import cupy

    shape = (batch, heads, rows, keys) if kind == "full" else (rows, keys)
    if kind is None:
        return None
    if kind == "bool":
        return cupy.random.default_rng(2).random(shape) < 0.9
    return arrays(dtype, [shape])[0].astype("float32" if kind == "float32" else dtype)


def assert_repeats(call, repeats=REPEATS):
    """That all results of equal calls have the bits of the first."""
    first = call()
    for number in range(repeats):
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), first, call(), strict=False):
            if not (x.view("uint8") == y.view("uint8")).all():
                difference = abs(x.astype("float32") - y.astype("float32")).max()
                pytest.fail(f"{name} of call {number} differs by {difference}")


@pytest.mark.no_backend
@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("backend", backends())
def test_attention(backend, dtype, head_dim, bias):
    """Batch 8, 4 heads and 408 keys: a block for each tile of keys on an H200."""
    batch, heads, rows, keys = 8, 4, 2048, 408
    if backend == "simt":
        rows = 256
    of_q, of_k = (batch, rows, heads, head_dim), (batch, keys, heads, head_dim)
    q, k, v, dout = arrays(dtype, [of_q, of_k, of_k, of_q])
    options = {"bias": bias_of(bias, dtype, batch, heads, rows, keys)}
    with environment.override(backend=backend):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)

        def backward(deterministic):
            return cupyflash.attention_backward(
                dout, q, k, v, out, lse, deterministic=deterministic, **options
            )

        assert_repeats(lambda: cupyflash.attention(q, k, v, return_lse=True, **options))
        assert_repeats(lambda: (out, lse, out, *backward(False)[1:3]))
        assert_repeats(lambda: (out, lse, *backward(True)[:3]), repeats=10)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "softcap": 30.0},
        {"window": (100, 50)},
        {"dropout_p": 0.1, "dropout_seed": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backend", backends()[:2])
def test_options(backend, head_dim, options):
    shapes = [(8, 1000, 8, head_dim), (8, 1000, 2, head_dim)] * 2
    q, k, dout, v = arrays("bfloat16", shapes)
    with environment.override(backend=backend):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        assert_repeats(
            lambda: (
                *cupyflash.attention(q, k, v, return_lse=True, **options),
                out,
                *cupyflash.attention_backward(dout, q, k, v, out, lse, **options)[1:3],
            ),
            repeats=20,
        )


@pytest.mark.no_backend
@pytest.mark.parametrize("dtype", [*HALF, "float32"])
@pytest.mark.parametrize("nhwc", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(
    "shape",
    [(2048, 256, 16), (64, 320, 32, 32), (16, 640, 16, 16), (8, 128, 128, 128), (2, 128, 256, 256)],
    ids=str,
)
def test_group_norm(shape, nhwc, dtype):
    import cupy

    rng = cupy.random.default_rng(3)
    x, dout = (rng.random(shape, dtype="float32").astype(dtype) for _ in range(2))
    if nhwc:
        x, dout = (
            cupy.moveaxis(cupy.ascontiguousarray(cupy.moveaxis(y, 1, -1)), -1, 1) for y in (x, dout)
        )
    weight, bias = rng.random((2, shape[1]), dtype="float32")

    def call():
        out, stats = cupyflash.group_norm(x, 32, weight, bias, activation="silu", return_stats=True)
        dx, *_ = cupyflash.group_norm_backward(dout, x, weight, bias, stats, activation="silu")
        return tuple(cupy.ascontiguousarray(y) for y in (out, stats, dx))

    assert_repeats(call, repeats=20)
