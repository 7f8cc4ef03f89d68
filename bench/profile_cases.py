"""The calls of bench.profile: between them they launch every kernel of the project.

Each is a call of a public function at a typical size. Its least bytes are those of its inputs, read
once, and of its results, written once, unless the case says otherwise.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import cupyflash
from bench import problem
from bench.problem import Problem
from cupyflash import environment
from cupyflash.attention.problem import ONE_TILE

TOKENS, HIDDEN = 16384, 2048  # of attention: batch * seqlen, heads * head_dim


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
    """A standard normal tensor; uninitialised on a CPU, where nothing is computed."""
    if problem.DEVICE == "cpu":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype))
    return problem.random(shape, dtype, sum(shape))


def integers(values: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32, device=problem.DEVICE)


# Attention ----------------------------------------------------------------------------------------


def forward(shape: Problem, **options: Any) -> Case:
    q, k, v, _ = tensors(shape)
    call = functools.partial(cupyflash.attention, q, k, v, causal=shape.causal, **options)
    arrays = (q, k, v, *options.values())
    return Case(functools.partial(call, return_lse=True), arrays, shape.flops("fwd"))


def backward(shape: Problem, bias_grad: bool = False, **options: Any) -> Case:
    """The backward pass; out and lse are made by the forward."""
    q, k, v, dout = tensors(shape)
    out, lse = cupyflash.attention(q, k, v, causal=shape.causal, return_lse=True, **options)
    arrays = dout, q, k, v, out, lse
    options |= {"bias_grad": True} if bias_grad else {}
    call = functools.partial(cupyflash.attention_backward, *arrays, causal=shape.causal, **options)
    workspace = 0.0
    if shape.dtype != "float32" and shape.seqlen > ONE_TILE:
        # The sum of dq in float32 is set to 0, read and written to add, and read; the LSE in base 2
        # and delta are written and read.
        rows = shape.batch * shape.seqlen * shape.heads
        workspace = 4.0 * rows * (4 * shape.head_dim + 2 * 2)
    return Case(call, (*arrays, *options.values()), shape.flops("bwd"), workspace=workspace)


def tensors(shape: Problem) -> tuple[Any, ...]:
    """q, k, v and dout."""
    rows, keys = (shape.batch, shape.seqlen), (shape.batch, shape.keys)
    head_dim, dtype = shape.head_dim, shape.dtype
    q, dout = (random(*rows, shape.heads, head_dim, dtype=dtype) for _ in range(2))
    k, v = (random(*keys, shape.heads_kv, head_dim, dtype=dtype) for _ in range(2))
    return q, k, v, dout


def attention(
    seqlen: int,
    head_dim: int,
    causal: bool = True,
    *,
    heads: int | None = None,
    heads_kv: int | None = None,
    dtype: str = "bfloat16",
    tokens: int = TOKENS,
    keys: int | None = None,
) -> Problem:
    """So many tokens in sequences of ``seqlen``."""
    heads = heads or HIDDEN // head_dim
    batch = max(1, tokens // seqlen)
    return Problem(dtype, head_dim, batch, seqlen, heads, heads_kv or heads, causal, keys)


def packed(lengths: list[int], head_dim: int) -> Case:
    heads, total = HIDDEN // head_dim, sum(lengths)
    q, k, v = (random(total, heads, head_dim) for _ in range(3))
    ends = integers([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    arrays = q, k, v, ends, ends, max(lengths), max(lengths)
    call = functools.partial(cupyflash.flash_attn_varlen_func, *arrays, causal=True)
    flops = sum(problem.attention_flops(1, heads, n, n, head_dim, True) for n in lengths)
    return Case(call, (q, k, v), flops)


def with_bias(shape: Problem, make: Callable[..., Case], **options: Any) -> Case:
    """A bias that all sequences share."""
    return make(shape, bias=random(1, shape.heads, shape.seqlen, shape.keys), **options)


def with_sinks(shape: Problem) -> Case:
    return backward(shape, sinks=random(shape.heads, dtype="float32"))


def with_key_mask(shape: Problem) -> Case:
    import torch

    mask = torch.ones(shape.batch, 1, 1, shape.keys, dtype=torch.bool, device=problem.DEVICE)
    return forward(shape, bias=mask)


def baseline(name: str) -> Case:
    from cupyflash.baselines import baselines

    if name == "vector_add":
        x, y = random(1 << 26), random(1 << 26)
        return Case(lambda: baselines.vector_add(x, y), (x, y))
    q, k, v, _ = tensors(shape := attention(1024, 64, tokens=1024, heads=16))
    call = functools.partial(getattr(baselines, name), q, k, v, causal=True)
    return Case(call, (q, k, v), shape.flops("fwd"))


# Decoding -----------------------------------------------------------------------------------------


def cached(batch: int, length: int, heads: int, heads_kv: int, head_dim: int) -> Case:
    q = random(batch, 1, heads, head_dim)
    new = [random(batch, 1, heads_kv, head_dim) for _ in range(2)]
    caches = [random(batch, length, heads_kv, head_dim) for _ in range(2)]
    positions = integers([length - 1] * batch)
    arrays = q, *new, *caches
    call = functools.partial(cupyflash.attention_with_cache, *arrays, positions)
    return Case(call, arrays, 4.0 * batch * heads * length * head_dim)


def embedding() -> Case:
    from cupyflash.decode.embedding import embedding as embed

    weight, rows = random(50257, 768), 8192
    call = functools.partial(embed, integers(list(range(rows))), weight)
    return Case(call, (), least=2.0 * rows * weight[0].nbytes)


def append() -> Case:
    from cupyflash.decode.kv_cache import cache_append

    rows, caches = [random(512, 8, 128) for _ in range(2)], [random(512, 64, 8, 128)] * 2
    caches[1] = random(512, 64, 8, 128)
    call = functools.partial(cache_append, *rows, *caches, integers([63] * 512))
    return Case(call, (), least=2.0 * _bytes(rows))


def sampling() -> Case:
    from cupyflash.decode.sampling import Sampling, sample

    logits, out = random(8, 50257, dtype="float16"), integers([0] * 8)
    how = Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=3)
    return Case(lambda: sample(logits, how, out=out), (logits, out))


def stack() -> Case:
    """Twelve blocks of GPT-2 for one token of four sequences."""
    from bench.transformer import BlockProblem

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
    for y in (x, dout) if problem.DEVICE != "cpu" else ():
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


def mlp(rows: int, width: int, hidden: int) -> Case:
    """SwiGLU."""
    x = random(rows, width)
    up, gate, down = random(hidden, width), random(hidden, width), random(width, hidden)
    arrays = x, up, down
    call = functools.partial(cupyflash.mlp, *arrays, gate_weight=gate, activation="silu")
    return Case(call, (*arrays, gate), 6.0 * rows * width * hidden)


def gate(rows: int, hidden: int, back: bool) -> Case:
    """The step of SwiGLU between its products, as in training."""
    from cupyflash.linear import elementwise
    from cupyflash.runtime.array import library_of

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


# All of them --------------------------------------------------------------------------------------

FORCED = "backend "  # in front of the name of a backend in a label
Maker = Callable[[], Case]


def main_grid() -> Iterator[tuple[str, Maker]]:
    """Attention at the lengths for which the traffic is judged."""
    for direction, make in (("fwd", forward), ("bwd", backward)):
        for head_dim in (64, 128):
            for causal in (False, True):
                for seqlen in (4096, 8192, 16384):
                    mask = "causal" if causal else "full"
                    shape = attention(seqlen, head_dim, causal)
                    yield (
                        f"attention {direction} {head_dim} {mask} {seqlen}",
                        functools.partial(make, shape),
                    )


def others() -> Iterator[tuple[str, Maker]]:
    """A call for each kernel that `main_grid` does not launch."""
    part, wide, float32 = functools.partial, attention(4096, 256), attention(4096, 128)
    float32 = dataclasses.replace(float32, dtype="float32")
    grouped = attention(2048, 128, tokens=2048, heads=32, heads_kv=2)
    few = attention(64, 128, False, tokens=64, heads=16, keys=16384)
    short = attention(64, 32, False, tokens=1 << 16, heads=16)
    biased = attention(128, 32, False, tokens=1 << 15, heads=4)
    yield "attention fwd 256 causal 4096", part(forward, wide)
    yield "attention bwd 256 causal 4096", part(backward, wide)
    yield "attention fwd 64 queries, 16384 keys", part(forward, few)
    yield "attention fwd packed lengths", part(packed, [1, 113, 2048, 4095, 10127], 128)
    yield "attention bwd 32 heads, 2 of keys", part(backward, grouped)
    yield "attention fwd key mask", part(with_key_mask, attention(512, 64, False))
    yield "attention bwd sinks", part(with_sinks, attention(4096, 128))
    yield "attention bwd bias gradient", part(with_bias, biased, backward, bias_grad=True)
    yield "attention bwd length 64", part(backward, short)
    yield "attention fwd 128 causal 4096, backend sm80", part(forward, attention(4096, 128))
    yield "attention bwd 128 causal 4096, backend sm80", part(backward, attention(4096, 128))
    yield "attention fwd float32", part(forward, float32)
    yield "attention bwd float32", part(backward, float32)
    yield "attention fwd float32, backend simt", part(forward, float32)
    yield "attention bwd float32, backend simt", part(backward, float32)
    for name in ("vector_add", "naive_attention", "fused_attention", "flash_attention_1"):
        yield f"baseline {name}", part(baseline, name)
    yield "decode 32 x 8192 keys, Llama 3 8B", part(cached, 32, 8192, 32, 8, 128)
    yield "decode 8 x 8192 keys, GPT-2", part(cached, 8, 8192, 12, 12, 64)
    yield "decode 1 x 512 keys, Llama 3 8B", part(cached, 1, 512, 32, 8, 128)
    yield "embedding", embedding
    yield "cache_append", append
    yield "sample top-p 8 x 50257", sampling
    yield "BlockStack GPT-2 4 tokens", stack
    for columns in (768, 4096, 32768, 262144):
        rows = (1 << 26) // columns
        yield f"RMSNorm fwd {rows} x {columns}", part(norm, rows, columns, False)
        yield f"RMSNorm bwd {rows} x {columns}", part(norm, rows, columns, True)
    yield "RMSNorm fwd dropout", part(norm, 16384, 4096, False, True)
    for back, name in ((False, "fwd"), (True, "bwd")):
        for last, layout in ((False, "NCHW"), (True, "NHWC")):
            for shape in ((16, 320, 64, 64), (4, 128, 256, 256), (64, 640, 8, 8)):
                text = "x".join(map(str, shape))
                yield (
                    f"GroupNorm {name} {text} {layout}",
                    functools.partial(group_norm, shape, last, back),
                )
    yield "linear 8192 x 4096 to 4096", part(linear, 8192, 4096, 4096)
    yield "linear 2048 x 1024 to 1024, backend sm80", part(linear, 2048, 1024, 1024)
    yield "linear 4096 x 1024 to 1024 float32", part(linear, 4096, 1024, 1024, "float32")
    yield "linear 4 x 768 to 3072", part(linear, 4, 768, 3072)
    yield "linear 16 x 4096 to 6144", part(linear, 16, 4096, 6144)
    yield "linear 4 x 4096 to 4096, backend sm80", part(linear, 4, 4096, 4096)
    yield "mlp SwiGLU 4 x 768, 3072, backend sm80", part(mlp, 4, 768, 3072)
    yield "gate of SwiGLU fwd 8192 x 14336", part(gate, 8192, 14336, False)
    yield "gate of SwiGLU bwd 8192 x 14336", part(gate, 8192, 14336, True)
    yield "qkv_projection, rotary of 40", part(rotary, 4096)
    yield "DDPM step 256x4x128x128", diffusion


def cases(only: str = "", quick: bool = False) -> Iterator[tuple[str, Maker]]:
    """(label, what makes the case), those whose label contains ``only``.

    Args:
        quick: of the attention that is judged only length 4096.
    """
    for label, make in (*main_grid(), *others()):
        if only in label and not (quick and label.endswith((" 8192", " 16384"))):
            yield label, make


def forced(label: str) -> contextlib.AbstractContextManager:
    """The backend that the label of a case names is forced; none by default."""
    _, is_forced, backend = label.partition(FORCED)
    return environment.override(backend=backend) if is_forced else contextlib.nullcontext()
