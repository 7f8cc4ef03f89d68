"""Errors for keywords of other attention libraries, which say what to write here instead.

The functions of attention take unknown keywords as ``**foreign``, only to refuse them: a call that
has none pays nothing for it, and signatures do not show it.
"""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ...runtime.checks import short
from .names import caller_name
from .options import Extras, Options

Function = TypeVar("Function", bound=Callable)

_MASK = "a bool one is True where a query sees a key"
_LEFT_OUT = "leave it out: the kernels need no such choice"
_PACKED = "flash_attn_varlen_func takes packed sequences"
# Keywords of flash-attn, torch, xFormers, transformers and others: the option of
# `cupyflash.attention` that says the same, if there is one, and a hint.
KEYWORDS = {
    "is_causal": ("causal", "True ends at the last key, 'top-left' is what SDPA does"),
    **dict.fromkeys(("attn_mask", "attention_mask", "attn_bias"), ("bias", _MASK)),
    "mask": ("mask", f"a function; an array is bias, and {_MASK}"),
    "score_mod": ("score", "the same function"),
    "block_mask": ("mask", "a BlockMask, or the function of it"),
    "key_padding_mask": ("seqused_k", "the number of keys of each sequence, int32 (batch,)"),
    "cache_seqlens": ("seqused_k", "int32 (batch,)"),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "qk_scale"), ("scale", "")),
    "window_size": ("window", "as (left, right)"),
    "sliding_window": ("window", "a sliding window of n keys is (n - 1, 0)"),
    **dict.fromkeys(("dropout", "dropout_rate", "attn_dropout", "p"), ("dropout_p", "")),
    **dict.fromkeys(("seed", "rng_state", "generator"), ("dropout_seed", "an integer")),
    **dict.fromkeys(("soft_cap", "logits_soft_cap", "logit_cap"), ("softcap", "")),
    **dict.fromkeys(("s_aux", "sink", "learnable_sink"), ("sinks", "one logit for each head")),
    **dict.fromkeys(
        ("return_attn_probs", "return_softmax_lse", "return_softmax", "return_aux"),
        ("return_lse", "the weights themselves exist nowhere"),
    ),
    **dict.fromkeys(("tensor_layout", "qkv_format"), ("layout", "'bshd' or 'bhsd'")),
    "enable_gqa": ("", "leave it out: q may have a multiple of the heads of k and v"),
    "training": ("", "leave it out, and pass dropout_p=0.0 where nothing is trained"),
    **dict.fromkeys(
        ("num_splits", "pack_gqa", "sm_margin", "backend", "op", "kernel_options"), ("", _LEFT_OUT)
    ),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), ("", _PACKED)),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), ("", _PACKED)),
    **dict.fromkeys(
        ("block_table", "page_table"), ("page_table", "attention_with_cache takes paged caches")
    ),
    **{"k_descale": ("k_scale", ""), "v_descale": ("v_scale", "")},
    **{"cache_batch_idx": ("sequences", ""), "cache_leftpad": ("leftpad", "")},
}

# The functions of other libraries, and what replaces them in this package.
ELSEWHERE = {
    **dict.fromkeys(
        ("flash_attn_unpadded_func", "varlen_attn", "BlockDiagonalMask"), "flash_attn_varlen_func"
    ),
    "flash_attn_unpadded_kvpacked_func": "flash_attn_varlen_kvpacked_func",
    "flash_attn_unpadded_qkvpacked_func": "flash_attn_varlen_qkvpacked_func",
    **dict.fromkeys(("flash_attention", "flash_attn", "sageattn"), "attention"),
    "memory_efficient_attention": "attention(q, k, v, bias=attn_bias, dropout_p=p, scale=scale)",
    "sdpa": "scaled_dot_product_attention",
    "LowerTriangularMask": "attention(q, k, v, causal='top-left')",
    "apply_rotary_emb": "qkv_projection(x, weight, heads_q=heads, rotary=Rotary(cos, sin))",
    **dict.fromkeys(
        ("MultiheadAttention", "multi_head_attention_forward"),
        "qkv_projection, attention and linear",
    ),
    **dict.fromkeys(("LayerNorm", "FusedLayerNorm"), "layer_norm"),
    **dict.fromkeys(("RMSNorm", "FusedRMSNorm"), "rms_norm"),
    "GroupNorm": "group_norm",
    "Linear": "linear",
    "MLP": "mlp",
}


_ATTENTION = {*Options._fields, *Extras._fields, "return_lse", "score", "mask"}
_ATTENTION -= {"max_seqlens", "key_mask", "text"}


def refuses_foreign(function: Function) -> Function:
    """Takes ``**foreign`` out of the signature that `inspect` and `help` show."""
    signature = inspect.signature(function)
    known = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=known)
    return function


def refuse(function: Callable, foreign: dict[str, Any]) -> NoReturn:
    """Says what to write instead of the first of these keywords.

    Raises:
        TypeError: always.
    """
    name, value = next(iter(foreign.items()))
    allowed = inspect.signature(function).parameters
    option, hint = KEYWORDS.get(name, (name, ""))
    ours = caller_name(function.__name__, option)
    if ours in allowed:
        hint = f"write {ours}" + f" ({hint})" * bool(hint)
    elif option in _ATTENTION:
        hint = f"cupyflash.attention has {option}" + f" ({hint})" * bool(hint)
    elif name not in KEYWORDS:
        hint = f"allowed are {', '.join(allowed)}"
    fact = f"there is no keyword {name}, {hint}"
    raise TypeError(f"{function.__name__}: {fact}, got {name}={short(value)}")
