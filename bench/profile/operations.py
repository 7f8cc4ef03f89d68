"""Calls for bench profile beside attention: how each is made; bench.profile.cases lists them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import cupyflash
from bench.lib import data

seeds = itertools.count()


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        run: the call, which returns its results.
        inputs: the arrays that it reads; where it does not read all of them, see ``least``.
        flops: operations of the matrix products, 0 where there are none to speak of.
        least: the bytes that it cannot do without; None for inputs and results.
        workspace: the bytes that its kernels hand on to each other through memory, where known.
    """

    run: Callable[[], Any]
    inputs: tuple[Any, ...]
    flops: float = 0.0
    least: float | None = None
    workspace: float = 0.0

    def least_bytes(self, results: Any) -> float:
        """The bytes that the call cannot do without."""
        return _bytes(self.inputs) + _bytes(results) if self.least is None else self.least


def _bytes(arrays: Any) -> int:
    if isinstance(arrays, (tuple, list)):
        return sum(map(_bytes, arrays))
    return arrays.nbytes if hasattr(arrays, "nbytes") else 0


def random(*shape: int, dtype: str = "bfloat16") -> Any:
    """A standard normal tensor, another one with each call; uninitialised where nothing runs."""
    if data.DEVICE == "cpu":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype))
    return data.random(shape, dtype, next(seeds))


def integers(values: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32, device=data.DEVICE)


# Decoding -----------------------------------------------------------------------------------------


def cached(
    batch: int, length: int, heads: int, heads_kv: int, head_dim: int, tokens: int = 1
) -> Case:
    q = random(batch, tokens, heads, head_dim)
    new = [random(batch, tokens, heads_kv, head_dim) for _ in range(2)]
    caches = [random(batch, length, heads_kv, head_dim) for _ in range(2)]
    positions = integers([length - tokens] * batch)
    arrays = q, *new, *caches
    call = functools.partial(cupyflash.attention_with_cache, *arrays, positions)
    return Case(call, arrays, 4.0 * batch * tokens * heads * length * head_dim)


def narrow_cache(batch: int, length: int) -> Case:
    """Keys and values of 8 bits with a scale each, and 32 heads of queries to 8 of theirs."""
    import torch

    q = random(batch, 1, 32, 128)
    caches = [integers([0]).to(torch.int8).repeat(batch, length, 8, 128) for _ in range(2)]
    scales = [random(1, dtype="float32").expand(batch, length, 8) for _ in range(2)]
    call = functools.partial(
        cupyflash.attention_with_cache, q, None, None, *caches, integers([length - 1] * batch),
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    return Case(call, (q, *caches), 4.0 * batch * 32 * length * 128)


def gathered(batch: int, length: int) -> Case:
    """The keys and values of paged sequences, one behind the other, as a prefill reads them."""
    from cupyflash.ops.decode import kv_cache
    from cupyflash.runtime.lookup import library_of

    caches = tuple(random(batch * length // 64, 64, 8, 128) for _ in range(2))
    table = integers(list(range(batch * length // 64))).reshape(batch, -1)
    where = integers([length] * batch), None, table, None, length
    arrays = caches[0], caches, (None, None), *where
    call = functools.partial(kv_cache.gather, "gather", library_of(table), *arrays)
    return Case(call, (), least=2.0 * _bytes(caches))


def heads_of_qwen3(rows: int) -> Case:
    from cupyflash.ops.linear.head_norm import head_norm

    q, k, weight = random(rows, 16, 128), random(rows, 8, 128), random(128)
    cos, sin = (random(rows, 64, dtype="float32") for _ in range(2))
    turned = cupyflash.Rotary(cos, sin, positions=integers(list(range(rows))))
    call = functools.partial(head_norm, q, k, weight, weight, rotary=turned, eps=1e-6)
    return Case(call, (q, k, cos, sin), least=2.0 * _bytes([q, k]))


def embedding() -> Case:
    from cupyflash.ops.decode.embedding import embedding as embed

    weight, rows = random(50257, 768), 8192
    call = functools.partial(embed, integers(list(range(rows))), weight)
    return Case(call, (), least=2.0 * rows * weight[0].nbytes)


def append() -> Case:
    from cupyflash.ops.decode.cache_append import cache_append

    rows = [random(512, 8, 128) for _ in range(2)]
    caches = [random(512, 64, 8, 128) for _ in range(2)]
    call = functools.partial(cache_append, *rows, *caches, integers([63] * 512))
    return Case(call, (), least=2.0 * _bytes(rows))


def sampling() -> Case:
    from cupyflash.ops.decode.sampling import Sampling, sample

    logits, out = random(8, 50257, dtype="float16"), integers([0] * 8)
    how = Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=3)
    return Case(lambda: sample(logits, how, out=out), (logits, out))


def stack() -> Case:
    """Twelve blocks of GPT-2 for one token of four sequences."""
    from bench.decode.transformer import BlockProblem

    shape = BlockProblem("bfloat16", "small", 12, 4)
    arrays = shape.tensors()
    return Case(shape.call("cupyflash", arrays), (), least=float(shape.bytes))


# Norms, linear layers, diffusion ------------------------------------------------------------------


def norm(rows: int, columns: int, back: bool, dropout: bool = False) -> Case:
    x, weight = random(rows, columns), random(columns)
    options = {"dropout_p": 0.1, "dropout_seed": 1} if dropout else {}
    if not back:
        residual = random(rows, columns)
        call = functools.partial(cupyflash.rms_norm, x, weight, residual=residual, **options)
        return Case(call, (x, weight, residual))
    stats = cupyflash.rms_norm(x, weight, return_stats=True)[1]
    dout = random(rows, columns)
    call = functools.partial(cupyflash.rms_norm_backward, dout, x, weight, stats, **options)
    return Case(call, (dout, x, weight, stats))


def group_norm(shape: tuple[int, ...], channels_last: bool, back: bool) -> Case:
    import torch

    order = torch.channels_last if channels_last else torch.contiguous_format
    x, dout = (torch.empty_like(random(*shape), memory_format=order) for _ in range(2))
    for y in (x, dout) if data.DEVICE != "cpu" else ():
        y.normal_()
    weight, bias = (random(shape[1]) for _ in range(2))
    arrays = x, 32, weight, bias
    call = functools.partial(cupyflash.group_norm, *arrays, activation="silu", return_stats=True)
    if not back:
        return Case(call, (x, weight, bias))
    arrays = dout, x, weight, bias, call()[1]
    back = functools.partial(cupyflash.group_norm_backward, *arrays, activation="silu")
    return Case(back, arrays)


def linear(rows: int, d_in: int, d_out: int, dtype: str = "bfloat16", **options: Any) -> Case:
    x, weight = random(rows, d_in, dtype=dtype), random(d_out, d_in, dtype=dtype)
    bias = random(d_out, dtype=dtype)
    call = functools.partial(cupyflash.linear, x, weight, bias, activation="gelu", **options)
    return Case(call, (x, weight, bias), 2.0 * rows * d_in * d_out)


def gate(rows: int, hidden: int, back: bool) -> Case:
    """The step of SwiGLU between its products, as in training."""
    from cupyflash.ops.linear import elementwise
    from cupyflash.runtime.lookup import library_of

    arrays = [random(rows, hidden) for _ in range(2 + back)]
    call = functools.partial(elementwise.gate, library_of(arrays[0]), "silu", *arrays)
    return Case(call, tuple(arrays))


def rotary(tokens: int) -> Case:
    """A projection whose rotary embedding is a launch of its own, as pairs straddle its tiles."""
    heads, head_dim = 32, 40
    width = heads * head_dim
    x, weight = random(1, tokens, width), random(3 * width, width)
    cos, sin = (random(tokens, head_dim // 2, dtype="float32") for _ in range(2))
    turned = cupyflash.Rotary(cos, sin)
    call = functools.partial(cupyflash.qkv_projection, x, weight, heads_q=heads, rotary=turned)
    return Case(call, (x, weight, cos, sin), 6.0 * tokens * width * width)


def diffusion() -> Case:
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 100))
    x, predicted = (random(256, 4, 128, 128) for _ in range(2))
    call = functools.partial(sampler.step, x, predicted, 40, seed=7, clip=1.0)
    return Case(call, (x, predicted))
