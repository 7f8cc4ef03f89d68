"""Arrays of one GPU while another is the current one: everything is made and runs where they are.

Of each call three runs are compared: with the device of the arrays current, with another one
current, and on the other device in between, so that no plan, seed or workspace is mixed up.
"""

import numpy
import pytest
from matrix import each_library
from targets import has

import cupyflash
from cupyflash import environment
from cupyflash.ops.decode.cache_append import cache_append
from cupyflash.ops.decode.embedding import embedding
from cupyflash.ops.decode.sampling import sample
from cupyflash.testing import to_numpy64


@pytest.fixture(autouse=True)
def two_gpus():
    if not has("cupy"):
        pytest.skip("needs two GPUs, CuPy is not installed")
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


def on(target, device):
    """Makes a device the current one, for the library of the target."""
    if target.library == "torch":
        import torch

        return torch.cuda.device(device)
    import cupy

    return cupy.cuda.Device(device)


def device_of(x):
    return x.device.index if type(x).__module__.startswith("torch") else x.device.id


class Arrays:
    """Arrays of a call, the same numbers on every device."""

    def __init__(self, target):
        self.target, self.rng = target, numpy.random.default_rng(0)
        self.dtype = target.dtypes[0]

    def normal(self, *shape, dtype=None):
        return self.target.array(self.rng.standard_normal(shape), dtype or self.dtype)

    def integers(self, values, dtype="int32"):
        return self.target.array(numpy.array(values, dtype))


def attention(arrays, **options):
    shape = (2, 150, 4, 64)
    q, k, v, dout = (arrays.normal(*shape) for _ in range(4))
    options = {name: make(arrays) if callable(make) else make for name, make in options.items()}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        return (lse,)  # out is another one each time
    gradients = cupyflash.attention_backward(
        dout, q, k, v, out, lse, bias_grad="bias" in options, deterministic=True, **options
    )
    return (out, lse, *(x for x in gradients if x is not None))


def varlen(arrays):
    q, k, v = (arrays.normal(200, 4, 64) for _ in range(3))
    lengths = arrays.integers([0, 20, 200])
    return (cupyflash.flash_attn_varlen_func(q, k, v, lengths, lengths, 180, 180, causal=True),)


def few_queries(arrays):
    """Keys that several blocks share, with a workspace."""
    q, k, v = (
        arrays.normal(1, 1, 4, 64),
        arrays.normal(1, 8192, 4, 64),
        arrays.normal(1, 8192, 4, 64),
    )
    return (cupyflash.attention(q, k, v),)


def sdpa(arrays):
    """Axes that CuPy has to copy to fold them."""
    q, k, v = (arrays.normal(3, 2, 20, 4, 64).swapaxes(2, 3) for _ in range(3))
    mask = arrays.normal(2, 1, 20, 20)
    return (cupyflash.scaled_dot_product_attention(q, k, v, mask),)


def layer_norm(arrays):
    x, weight, bias = arrays.normal(50, 96), arrays.normal(96), arrays.normal(96)
    dout = arrays.normal(50, 96)
    out, h, stats = cupyflash.layer_norm(x, weight, bias, residual=dout, return_stats=True)
    return (out, h, stats, *cupyflash.layer_norm_backward(dout, h, weight, stats))


def group_norm(arrays):
    x, weight, dout = arrays.normal(2, 32, 49), arrays.normal(32), arrays.normal(2, 32, 49)
    out, stats = cupyflash.group_norm(x, 4, weight, weight, activation="silu", return_stats=True)
    gradients = cupyflash.group_norm_backward(dout, x, weight, weight, stats, activation="silu")
    return (out, stats, *gradients)


def mlp(arrays):
    x, up, down = arrays.normal(3, 96), arrays.normal(192, 96), arrays.normal(96, 192)
    return (cupyflash.mlp(x, up, down, activation="gelu", residual=x),)


def linear(arrays):
    return tuple(
        cupyflash.linear(arrays.normal(rows, 96), arrays.normal(64, 96), arrays.normal(64))
        for rows in (1, 7, 300)
    )


def decode(arrays):
    q, new = arrays.normal(2, 1, 4, 64), [arrays.normal(2, 1, 2, 64) for _ in range(2)]
    caches = [arrays.normal(2, 600, 2, 64) for _ in range(2)]
    positions = arrays.integers([550, 7])
    out = cupyflash.attention_with_cache(q, *new, *caches, positions)
    rows = [x.reshape(2, 2, 64) for x in new]
    cache_append(*rows, *caches, arrays.integers([3, 4]))
    table, tokens = arrays.normal(40, 96), arrays.integers([3, 4])
    embedded = embedding(tokens, table)
    found = arrays.integers([0, 0])
    sample(arrays.normal(2, 40), out=found)
    return (out, *caches, embedded, found)


def decode_many(arrays):
    """More tokens than one launch takes: array operations on positions come before it."""
    q, new = arrays.normal(2, 20, 4, 64), [arrays.normal(2, 20, 2, 64) for _ in range(2)]
    caches = [arrays.normal(2, 600, 2, 64) for _ in range(2)]
    out = cupyflash.attention_with_cache(q, *new, *caches, arrays.integers([550, 7]))
    return (out, *caches)


def triangle(arrays):
    """Two pair representations, whose results are joined, and a mask of numbers."""
    q, k, v = (arrays.normal(2, 3, 2, 40, 32) for _ in range(3))
    bias, mask = arrays.normal(2, 1, 2, 40, 40), arrays.integers(numpy.arange(240) % 5)
    mask = mask.reshape(2, 3, 1, 1, 40)
    return cupyflash.triangle_attention(q, k, v, bias, mask, return_aux=True)[:2]


def combine(arrays):
    parts = arrays.normal(3, 2, 20, 4, 64), arrays.normal(3, 2, 20, 4, dtype="float32")
    return cupyflash.flash_attn_combine(*parts)


def thresholding(arrays):
    table = cupyflash.beta_schedule("cosine", 20)
    options = {"thresholding": True, "dynamic_thresholding_ratio": 0.9, "sample_max_value": 2.0}
    sampler = cupyflash.DiffusionSampler.ddpm(table, **options)
    x, predicted = (arrays.normal(4, 16, 40) for _ in range(2))
    return sampler.step(x, predicted, 7, seed=3), sampler.step(
        x, predicted, arrays.integers([7, 3, 1, 0]), seed=3
    )


CALLS = {
    "attention": attention,
    "dropout": lambda x: attention(x, dropout_p=0.3, dropout_seed=5, causal=True),
    "drawn seed": lambda x: attention(x, dropout_p=0.3),
    "16-bit sinks": lambda x: attention(x, sinks=lambda a: a.normal(4)),
    "16-bit bias": lambda x: attention(x, bias=lambda a: a.normal(2, 4, 150, 150)),
    "float32 bias": lambda x: attention(
        x, bias=lambda a: a.normal(2, 4, 150, 150, dtype="float32")
    ),
    "lengths": lambda x: attention(x, seqused_k=lambda a: a.integers([150, 3])),
    "varlen": varlen,
    "few queries": few_queries,
    "sdpa": sdpa,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "linear": linear,
    "mlp": mlp,
    "decode": decode,
    "decode, many tokens": decode_many,
    "triangle": triangle,
    "combine": combine,
    "thresholding": thresholding,
}


def run(target, call, device, current):
    """Results as NumPy arrays, of arrays on one device while the other is current."""
    with on(target, device):
        arrays = Prepared(target, call)
        target.synchronize()
    with on(target, current):
        results = arrays()
        assert current_device() == current
    with on(target, device):
        target.synchronize()
        assert {device_of(x) for x in results} == {device}
        return [to_numpy64(x) for x in results]  # on the host: streams of two GPUs do not wait


class Prepared(Arrays):
    """A call whose arrays are made before another device becomes the current one."""

    def __init__(self, target, call):
        super().__init__(target)
        self.call, self.made, self.ready = call, [], False
        call(self)
        self.ready = True

    def __call__(self):
        self.left = iter(self.made)
        return self.call(self)

    def normal(self, *shape, dtype=None):
        return self._array(lambda: super(Prepared, self).normal(*shape, dtype=dtype))

    def integers(self, values, dtype="int32"):
        return self._array(lambda: super(Prepared, self).integers(values, dtype))

    def _array(self, make):
        if self.ready:
            return next(self.left)
        x = make()
        self.made.append(x.clone() if hasattr(x, "clone") else x.copy())
        return x


def current_device():
    import cupy

    return cupy.cuda.runtime.getDevice()


@each_library(device="cuda")
@pytest.mark.parametrize("name", CALLS)
def test_another_device_is_current(target, name):
    call = CALLS[name]
    here = run(target, call, 1, 1)
    for device, current in ((1, 0), (0, 0), (0, 1), (1, 0)):
        found = run(target, call, device, current)
        for a, b in zip(found, here, strict=True):
            assert numpy.array_equal(a, b, equal_nan=True), (device, current)


@each_library(device="cuda")
@pytest.mark.parametrize("backend", ["sm80", "simt"])
def test_other_backends(target, backend):
    from targets import backends

    if backend not in backends():
        pytest.skip(f"{backend} does not run on this GPU")
    with environment.override(backend=backend):
        for call in (attention, CALLS["16-bit sinks"], varlen, decode):
            first, second = run(target, call, 1, 1), run(target, call, 1, 0)
            assert all((a == b).all() for a, b in zip(first, second, strict=True))


@each_library(device="cuda")
def test_a_stream_of_the_other_device(target):
    """Casts and seeds are queued where the kernel is: on the current stream of its device."""
    with on(target, 1):
        arrays = Prepared(target, CALLS["16-bit sinks"])
        wanted = [to_numpy64(x) for x in arrays()]
        target.synchronize()
        if target.library == "torch":
            import torch

            stream = torch.cuda.Stream(1)
            with torch.cuda.stream(stream), on(target, 0):
                found = arrays()
        else:
            import cupy

            stream = cupy.cuda.Stream(non_blocking=True)
            with stream, on(target, 0):
                found = arrays()
        target.synchronize()
        for a, b in zip(found, wanted, strict=True):
            assert (to_numpy64(a) == b).all()


@each_library(device="cuda")
def test_two_devices_in_one_call(target):
    with on(target, 0):
        q, sinks = (
            target.inputs(target.dtypes[0], seqlen_q=20).q,
            target.array(numpy.zeros(4, "f4")),
        )
    with on(target, 1):
        other = target.inputs(target.dtypes[0], seqlen_q=20).q
    with pytest.raises(ValueError, match="^attention: all arrays must be on the same device, got"):
        cupyflash.attention(q, other, other)
    with pytest.raises(
        ValueError, match="^attention: .*same device, got q on device 1 and sinks on device 0"
    ):
        cupyflash.attention(other, other, other, sinks=sinks)
    with pytest.raises(ValueError, match="^layer_norm: all arrays must be on the same device, got"):
        cupyflash.layer_norm(q, other[0, 0, 0])


@each_library(library="torch", device="cuda")
def test_gradients_on_another_device(target):
    import torch

    def gradients(device, current):
        with on(target, device):
            inputs = target.inputs(target.dtypes[0], seqlen_q=150)
            qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        with on(target, current):
            out = cupyflash.attention(*qkv, causal=True, deterministic=True)
            return [x.cpu() for x in torch.autograd.grad(out, qkv, inputs.dout)]

    for a, b, c in zip(gradients(0, 0), gradients(1, 0), gradients(0, 1), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
