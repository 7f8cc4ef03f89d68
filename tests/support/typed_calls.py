"""Calls as users write them, for type checkers only: test_types.py has mypy and pyright read this.

Results have the type of the caller's arrays, and each wrong call is one to both checkers.
"""

from typing import Any

import numpy
import torch
from typing_extensions import assert_type

import cupyflash

Array = numpy.ndarray[Any, numpy.dtype[numpy.float32]]
Tensor = torch.Tensor
Three = tuple[Tensor, Tensor, None]


def attention(t: Tensor, a: Array, flag: bool, perhaps: Tensor | None) -> None:
    assert_type(cupyflash.attention(t, t, t), Tensor)
    assert_type(cupyflash.attention(a, a, a), Array)
    assert_type(cupyflash.attention(t, t, t, causal="top-left", precision="tf32"), Tensor)
    assert_type(cupyflash.attention(t, t, t, bias=perhaps, return_lse=True), tuple[Tensor, Tensor])
    assert_type(cupyflash.attention(a, a, a, layout="bhsd", return_lse=True), tuple[Array, Array])
    either = cupyflash.attention(t, t, t, return_lse=flag)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    cupyflash.attention(t, t, t).sum().backward()
    three = cupyflash.attention_backward(t, t, t, t, t, t, window=(3, None))
    assert_type(three, tuple[Tensor, Tensor, Tensor])
    dbias = cupyflash.attention_backward(t, t, t, t, t, t, bias=t, bias_grad=True).dbias
    dsinks = cupyflash.attention_backward(t, t, t, t, t, t, sinks=t).dsinks
    print(dbias, dsinks, cupyflash.attention_backward(t, t, t, t, t, t, sinks=perhaps))
    assert_type(cupyflash.scaled_dot_product_attention(t, t, t, is_causal=True), Tensor)
    assert_type(cupyflash.attention_with_cache(t, t, t, t, t, t), Tensor)
    cached = cupyflash.attention_with_cache(t, None, None, t, t, t, window=(3, 0), return_lse=True)
    assert_type(cached, tuple[Tensor, Tensor])
    assert_type(cupyflash.triangle_attention(t, t, t, t, perhaps), Tensor)
    aux = cupyflash.triangle_attention(t, t, t, t, return_aux=True)
    assert_type(aux, Three)


def flash_attention(t: Tensor, flag: bool) -> None:
    assert_type(cupyflash.flash_attn_func(t, t, t, 0.1, None, True), Tensor)
    assert_type(cupyflash.flash_attn_kvpacked_func(t, t, window_size=(3, 0)), Tensor)
    assert_type(cupyflash.flash_attn_qkvpacked_func(t), Tensor)
    assert_type(cupyflash.flash_attn_varlen_func(t, t, t, t, None, 9, 9, seqused_k=t), Tensor)
    assert_type(cupyflash.flash_attn_varlen_kvpacked_func(t, t, t, t, 9, 9), Tensor)
    assert_type(cupyflash.flash_attn_varlen_qkvpacked_func(t, t, 9, sinks=t), Tensor)
    assert_type(cupyflash.flash_attn_func(t, t, t, 0.1, return_attn_probs=True), Three)
    assert_type(cupyflash.flash_attn_kvpacked_func(t, t, return_attn_probs=True), Three)
    assert_type(cupyflash.flash_attn_qkvpacked_func(t, return_attn_probs=True), Three)
    varlen = cupyflash.flash_attn_varlen_func(t, t, t, t, t, 9, 9, return_attn_probs=True)
    assert_type(varlen, Three)
    either = cupyflash.flash_attn_func(t, t, t, return_attn_probs=flag)
    assert_type(either, Tensor | Three)
    assert_type(cupyflash.flash_attn_combine(t, t), tuple[Tensor, Tensor])
    assert_type(cupyflash.flash_attn_with_kvcache(t, t, t, cache_seqlens=9), Tensor)
    cached = cupyflash.flash_attn_with_kvcache(t, t, t, t, t, return_softmax_lse=True, sinks=t)
    assert_type(cached, tuple[Tensor, Tensor])
    assert_type(cupyflash.flash_attn_varlen_func(t, t, t, t, t, 9, 9, block_table=t), Tensor)
    assert_type(cupyflash.pad_input(cupyflash.unpad_input(t, t)[0], t, 2, 3), Tensor)


def others(t: Tensor, a: Array, blocks: list[cupyflash.BlockWeights]) -> None:
    assert_type(cupyflash.layer_norm(t, t, t), Tensor)
    assert_type(cupyflash.layer_norm(t, t, residual=a), tuple[Tensor, Array])
    assert_type(cupyflash.rms_norm(a, a, residual=a, return_stats=True), tuple[Array, Array, Array])
    out, stats = cupyflash.rms_norm(t, t, return_stats=True)
    assert_type(cupyflash.layer_norm_backward(t, t, t, stats), tuple[Tensor, Tensor, Tensor])
    assert_type(cupyflash.rms_norm_backward(out, t, None, stats), tuple[Tensor, None])
    assert_type(cupyflash.group_norm(t, 8, activation="silu"), Tensor)
    assert_type(cupyflash.group_norm(t, 8, return_stats=True), tuple[Tensor, Tensor])
    assert_type(cupyflash.group_norm_backward(t, t, t, t, t), tuple[Tensor, Tensor, Tensor])
    assert_type(cupyflash.linear(t, t, activation="gelu", norm=cupyflash.Norm(t)), Tensor)
    assert_type(cupyflash.mlp(a, a, a, gate_weight=a), Array)
    assert_type(cupyflash.qkv_projection(t, t, heads_q=8), tuple[Tensor, Tensor, Tensor])
    assert_type(cupyflash.transformer_block(t, blocks[0], t, t, t, heads=8), Tensor)
    assert_type(cupyflash.BlockStack(blocks, heads=8)(t, t, t, t), Tensor)
    sampler = cupyflash.DiffusionSampler.ddim(cupyflash.beta_schedule("cosine", 100), 10)
    assert_type(sampler.step(t, t, 3, seed=1), Tensor)
    assert_type(sampler.embeddings(8, like=t), Tensor)


def wrong(t: Tensor) -> None:
    cupyflash.attention(t, t, t, is_causal=True)  # type: ignore
    cupyflash.attention(t, t, t, causal="left")  # type: ignore
    cupyflash.attention(t, t, t, layout="bdsh")  # type: ignore
    cupyflash.attention(t, t, t, return_lse=True, precision="bf16")  # type: ignore
    cupyflash.attention(t, t, [t])  # type: ignore
    cupyflash.attention(t, t, t, return_lse=True).sum()  # type: ignore
    cupyflash.attention(t, t, t, seqused_k=3)  # type: ignore
    cupyflash.attention_with_cache(t, t, t, t, t, t, causal="top-left")  # type: ignore
    cupyflash.flash_attn_func(t, t, t, scale=1.0)  # type: ignore
    cupyflash.scaled_dot_product_attention(t, t, t, causal=True)  # type: ignore
    cupyflash.linear(t, t, activation="swish")  # type: ignore
    cupyflash.group_norm(t, 8, activation="relu")  # type: ignore
    cupyflash.flash_attn_with_kvcache(t, t, t, page_size=3)  # type: ignore
