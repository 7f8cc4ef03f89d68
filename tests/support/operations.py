"""Every operation as a function of arrays, for tests that run all of them in some other way.

``OPERATIONS[name](target, seed)`` gives (arrays, call): ``call(*arrays)`` returns a tuple of new
arrays, the same bits each time for the same values.
"""

import functools
import math

import numpy
from arrays import normal, stored

import cupyflash

PERIOD = 2**20 - 3  # a prime: the values of longer arrays repeat, which no two rows or heads show


class Maker:
    """Seeded arrays of a target; ``odd`` makes shapes that no other test has."""

    def __init__(self, target, seed, odd=0):
        self.target, self.seed, self.odd = target, seed, odd
        self.dtype = target.dtypes[0]
        self.count = 0

    def normal(self, *shape, scale=1.0, mean=0.0, storage="contiguous"):
        self.count += 1
        values = normal(min(math.prod(shape), PERIOD), (self.seed, self.count))
        values = numpy.resize(scale * values + mean, shape)
        return stored(self.target, values, self.dtype, storage)

    def integers(self, *values):
        return self.target.array(numpy.asarray(values, "int32"))


def attention(m):
    tensors = [m.normal(2, 200 + m.odd, heads, 64) for heads in (4, 2, 2, 4)]

    def call(q, k, v, dout):
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        options = {"causal": True, "deterministic": True}
        return out, lse, *cupyflash.attention_backward(dout, q, k, v, out, lse, **options)

    return tensors, call


def few_queries(m):
    """Their keys are shared out over blocks, which need scratch memory."""
    q, k, v = m.normal(1, 64, 2, 64), *(m.normal(1, 6000 + m.odd, 2, 64) for _ in "kv")
    return [q, k, v], lambda *qkv: cupyflash.attention(*qkv, return_lse=True)


def packed(m):
    lengths = [100, 3, 150 + m.odd]
    ends = m.integers(0, *numpy.cumsum(lengths))
    tensors = [m.normal(sum(lengths), 4, 64) for _ in range(3)]
    longest = max(lengths)

    def call(q, k, v, ends):
        out = cupyflash.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)
        return (out,)

    return [*tensors, ends], call


def layer_norm(m, columns=768, rms=False):
    dout, x, residual = (m.normal(300 + m.odd, columns) for _ in range(3))
    weight, bias = m.normal(columns, scale=0.2, mean=1), m.normal(columns)

    def call(dout, x, residual, weight, bias):
        if rms:
            out, h, stats = cupyflash.rms_norm(x, weight, residual=residual, return_stats=True)
            return out, h, *cupyflash.rms_norm_backward(dout, h, weight, stats)
        out, stats = cupyflash.layer_norm(x, weight, bias, return_stats=True)
        return out, *cupyflash.layer_norm_backward(dout, x, weight, stats)

    return [dout, x, residual, weight, bias], call


def group_norm(m, storage="contiguous"):
    dout, x = (m.normal(8, 64, 16, 16 + m.odd, storage=storage) for _ in range(2))
    weight, bias = m.normal(64, scale=0.2, mean=1), m.normal(64)

    def call(dout, x, weight, bias):
        options = {"activation": "silu"}
        out, stats = cupyflash.group_norm(x, 8, weight, bias, return_stats=True, **options)
        return out, stats, *cupyflash.group_norm_backward(dout, x, weight, bias, stats, **options)

    return [dout, x, weight, bias], call


def linear(m, rows=4):
    x, weight = m.normal(rows + m.odd, 256), m.normal(512, 256, scale=1 / 16)
    residual = m.normal(rows + m.odd, 512)

    def call(x, weight, residual):
        return (cupyflash.linear(x, weight, activation="gelu", residual=residual),)

    return [x, weight, residual], call


def mlp(m, rows=4):
    x, up = m.normal(rows + m.odd, 256), m.normal(512, 256, scale=1 / 16)
    gate, down = m.normal(512, 256, scale=1 / 16), m.normal(256, 512, scale=1 / 16)

    def call(x, up, gate, down):
        norm = cupyflash.Norm(x[0], rms=True)
        return (cupyflash.mlp(x, up, down, gate_weight=gate, activation="silu", norm=norm),)

    return [x, up, gate, down], call


def qkv_projection(m):
    x, weight = m.normal(2, 40 + m.odd, 256), m.normal(768, 256, scale=1 / 16)
    cos, sin = (m.normal(40 + m.odd, 32) for _ in range(2))

    def call(x, weight, cos, sin):
        return cupyflash.qkv_projection(x, weight, heads_q=4, rotary=cupyflash.Rotary(cos, sin))

    return [x, weight, cos, sin], call


def decode(m, length=300):
    new = [m.normal(2, 1, 4, 64) for _ in "qkv"]
    caches = [m.normal(2, length + m.odd, 4, 64) for _ in "kv"]
    places = m.integers(7, length - 1)

    def call(q, k, v, k_cache, v_cache, places):
        return cupyflash.attention_with_cache(q, k, v, k_cache, v_cache, places), k_cache, v_cache

    return [*new, *caches, places], call


def diffusion(m):
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 20))
    x, predicted = (m.normal(4, 16, 40 + m.odd) for _ in range(2))
    return [x, predicted], lambda x, model: (sampler.step(x, model, 7, seed=3, clip=1.0),)


def block_weights(m, width, hidden):
    of = lambda rows, columns: m.normal(rows, columns, scale=columns**-0.5)
    row = functools.partial(m.normal, scale=0.2)
    return cupyflash.BlockWeights(
        row(width), row(width), of(3 * width, width), row(3 * width), of(width, width),
        row(width), row(width), row(width), of(hidden, width), row(hidden), of(width, hidden),
        row(width),
    )  # fmt: skip


def block(m):
    """Weights of its own at each call, as a model that is made anew has."""
    weights = block_weights(m, 256, 512)
    caches = [m.normal(3, 100 + m.odd, 4, 64) for _ in "kv"]
    places = m.integers(5, 80, 0)

    def call(x, k_cache, v_cache, places):
        out = cupyflash.transformer_block(x, weights, k_cache, v_cache, places, heads=4)
        return out, k_cache, v_cache

    return [m.normal(3, 256), *caches, places], call


def stack(m):
    layers = cupyflash.BlockStack([block_weights(m, 256, 512) for _ in range(2)], heads=4)
    caches = [m.normal(2, 3, 100 + m.odd, 4, 64) for _ in "kv"]
    places = m.integers(5, 80, 0)

    def call(x, k_cache, v_cache, places):
        return layers(x, k_cache, v_cache, places), k_cache, v_cache

    return [m.normal(3, 256), *caches, places], call


_MAKERS = {
    "attention": attention,
    "few queries": few_queries,
    "packed": packed,
    "layer_norm": layer_norm,
    "rms_norm": functools.partial(layer_norm, columns=4096, rms=True),
    "long rms_norm": functools.partial(layer_norm, columns=40000, rms=True),
    "group_norm": group_norm,
    "group_norm nhwc": functools.partial(group_norm, storage="channels_last"),
    "linear": linear,
    "linear of many rows": functools.partial(linear, rows=600),
    "mlp": mlp,
    "mlp of many rows": functools.partial(mlp, rows=600),
    "qkv_projection": qkv_projection,
    "decode": decode,
    "long decode": functools.partial(decode, length=20000),
    "diffusion": diffusion,
    "transformer_block": block,
    "BlockStack": stack,
}


def _make(maker, target, seed, odd=0):
    return maker(Maker(target, seed, odd))


OPERATIONS = {name: functools.partial(_make, maker) for name, maker in _MAKERS.items()}
# Those whose kernels come in no backends.
NO_BACKEND = {
    *("layer_norm", "rms_norm", "long rms_norm", "group_norm", "group_norm nhwc"),
    *("diffusion", "transformer_block", "BlockStack"),
}


def copies(arrays):
    """Arrays of equal values, in memory of their own with equal strides."""
    found = []
    for x in arrays:
        if type(x).__module__ == "torch":
            found.append(x.clone())
        else:
            found.append(x.copy(order="K"))
    return found


def equal(first, second):
    """Bit by bit, up to the sign of zero."""
    return all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
