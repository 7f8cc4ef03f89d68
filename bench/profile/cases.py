"""The calls of bench profile: between them they launch every kernel of the project.

Each is a call of a public function at a typical size (the gate and the baselines have functions of
their own). Its least bytes are those of its inputs, read once, and of its results, written once,
unless the case says otherwise.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import cupyflash
from bench.lib import data
from bench.profile import operations as operations
from bench.profile.operations import Case, integers, random
from cupyflash import environment
from cupyflash.ops.attention.kind import ONE_TILE
from cupyflash.testing.problem import Problem, attention_flops

TOKENS, HIDDEN = 16384, 2048  # of attention: batch * seqlen, heads * head_dim
FORCED = "backend "  # in front of the name of a backend in a label
Maker = Callable[[], Case]


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
    tokens: int = TOKENS,
    keys: int | None = None,
) -> Problem:
    """So many tokens in sequences of ``seqlen``, bfloat16."""
    heads = heads or HIDDEN // head_dim
    batch = max(1, tokens // seqlen)
    return Problem("bfloat16", head_dim, batch, seqlen, heads, heads_kv or heads, causal, keys)


def packed(lengths: list[int], head_dim: int) -> Case:
    heads, total = HIDDEN // head_dim, sum(lengths)
    q, k, v = (random(total, heads, head_dim) for _ in range(3))
    ends = integers([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    arrays = q, k, v, ends, ends, max(lengths), max(lengths)
    call = functools.partial(cupyflash.flash_attn_varlen_func, *arrays, causal=True)
    flops = sum(attention_flops(1, heads, n, n, head_dim, True) for n in lengths)
    return Case(call, (q, k, v), flops)


def bias_gradient(shape: Problem) -> Case:
    """The backward pass with a bias that all sequences share."""
    return backward(shape, True, bias=random(1, shape.heads, shape.seqlen, shape.keys))


def trained_table(shape: Problem) -> Case:
    """The backward pass with the gradient of a table by distance, in exact sums."""
    table = random(shape.heads, 255, dtype="float32")
    score = cupyflash.Score("score + table(head, clamp(key - query, -127, 127) + 127)", table=table)
    q, k, v, dout = tensors(shape)
    out, lse = cupyflash.attention(q, k, v, score=score, return_lse=True)
    arrays, options = (dout, q, k, v, out, lse), {"score": score, "score_grad": True}
    call = functools.partial(cupyflash.attention_backward, *arrays, deterministic=True, **options)
    return Case(call, (*arrays, table), shape.flops("bwd"))


def with_sinks(shape: Problem) -> Case:
    return backward(shape, sinks=random(shape.heads, dtype="float32"))


def with_key_mask(shape: Problem) -> Case:
    import torch

    mask = torch.ones(shape.batch, 1, 1, shape.keys, dtype=torch.bool, device=data.DEVICE)
    return forward(shape, bias=mask)


def with_documents(shape: Problem) -> Case:
    import torch

    of = torch.arange(shape.keys, dtype=torch.int32, device=data.DEVICE) // 1000
    q, k, v, _ = tensors(shape)
    mask = cupyflash.Mask("of(query) == of(key)", of=of)
    return Case(lambda: cupyflash.attention(q, k, v, mask=mask), (q, k, v, of))


def baseline(name: str) -> Case:
    from cupyflash.ops.baselines import baselines

    if name == "vector_add":
        x, y = random(1 << 26), random(1 << 26)
        return Case(lambda: baselines.vector_add(x, y), (x, y))
    q, k, v, _ = tensors(shape := attention(1024, 64, tokens=1024, heads=16))
    call = functools.partial(getattr(baselines, name), q, k, v, causal=True)
    return Case(call, (q, k, v), shape.flops("fwd"))


# All of them --------------------------------------------------------------------------------------


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
    yield "attention fwd documents as a mask", part(with_documents, attention(4096, 128, False))
    yield "attention bwd sinks", part(with_sinks, attention(4096, 128))
    yield "attention bwd bias gradient", part(bias_gradient, biased)
    yield "attention bwd trained table", part(trained_table, attention(4096, 128, False))
    yield "attention bwd length 64", part(backward, short)
    yield "attention fwd 128 causal 4096, backend sm80", part(forward, attention(4096, 128))
    yield "attention bwd 128 causal 4096, backend sm80", part(backward, attention(4096, 128))
    yield "attention bwd 64 full 4096, backend sm80", part(backward, attention(4096, 64, False))
    yield "attention fwd float32", part(forward, float32)
    yield "attention bwd float32", part(backward, float32)
    yield "attention fwd float32, backend simt", part(forward, float32)
    yield "attention bwd float32, backend simt", part(backward, float32)
    for name in ("vector_add", "naive_attention", "fused_attention", "flash_attention_1"):
        yield f"baseline {name}", part(baseline, name)
    yield "decode 32 x 8192 keys, Llama 3 8B", part(operations.cached, 32, 8192, 32, 8, 128)
    yield "decode 8 x 8192 keys, GPT-2", part(operations.cached, 8, 8192, 12, 12, 64)
    yield "decode 1 x 512 keys, Llama 3 8B", part(operations.cached, 1, 512, 32, 8, 128)
    yield "decode 8 tokens, 8 x 8192 keys", part(operations.cached, 8, 8192, 32, 4, 128, 8)
    yield "cache_gather 8 x 4096 keys", part(operations.gathered, 8, 4096)
    for batch, keys in ((32, 8192), (1, 262144)):
        yield f"decode {batch} x {keys} keys of int8", part(operations.narrow_cache, batch, keys)
    yield "head_norm 8192 x 24 heads", part(operations.heads_of_qwen3, 8192)
    yield "embedding", operations.embedding
    yield "cache_append", operations.append
    yield "sample top-p 8 x 50257", operations.sampling
    yield "BlockStack GPT-2 4 tokens", operations.stack
    for columns in (768, 4096, 32768, 262144):
        rows = (1 << 26) // columns
        yield f"RMSNorm fwd {rows} x {columns}", part(operations.norm, rows, columns, False)
        yield f"RMSNorm bwd {rows} x {columns}", part(operations.norm, rows, columns, True)
    yield "RMSNorm fwd dropout", part(operations.norm, 16384, 4096, False, True)
    for back, name in ((False, "fwd"), (True, "bwd")):
        for last, layout in ((False, "NCHW"), (True, "NHWC")):
            for shape in ((16, 320, 64, 64), (4, 128, 256, 256), (64, 640, 8, 8)):
                text = "x".join(map(str, shape))
                yield (
                    f"GroupNorm {name} {text} {layout}",
                    functools.partial(operations.group_norm, shape, last, back),
                )
    yield "linear 8192 x 4096 to 4096", part(operations.linear, 8192, 4096, 4096)
    yield "linear 2048 x 1024 to 1024, backend sm80", part(operations.linear, 2048, 1024, 1024)
    yield "linear 4096 x 1024 to 1024 float32", part(operations.linear, 4096, 1024, 1024, "float32")
    yield "linear 4 x 768 to 3072", part(operations.linear, 4, 768, 3072)
    yield "linear 16 x 4096 to 6144", part(operations.linear, 16, 4096, 6144)
    yield "linear 4 x 4096 to 4096, backend sm80", part(operations.linear, 4, 4096, 4096)
    yield "gate of SwiGLU fwd 8192 x 14336", part(operations.gate, 8192, 14336, False)
    yield "gate of SwiGLU bwd 8192 x 14336", part(operations.gate, 8192, 14336, True)
    yield "qkv_projection, rotary of 40", part(operations.rotary, 4096)
    yield "DDPM step 256x4x128x128", operations.diffusion


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
