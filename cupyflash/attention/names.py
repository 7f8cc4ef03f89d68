"""The arguments of public functions that have other names than those of `cupyflash.attention`."""

_WINDOW = {"scale": "softmax_scale", "window": "window_size"}
_PACKED = {"q": "qkv", "k": "qkv", "v": "qkv"}
_ONE_LENGTH = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
_ONE_LENGTH |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
_KEY_VALUE = {"k": "kv", "v": "kv"}
_TORCH = {"q": "query", "k": "key", "v": "value"}
_ATEN = {"cu_seqlens_q": "cum_seq_q", "cu_seqlens_k": "cum_seq_k", "causal": "is_causal"}
_ATEN |= {"max_seqlen_q": "max_q", "max_seqlen_k": "max_k"}

NAMES = {
    "flash_attn_func": _WINDOW,
    "flash_attn_kvpacked_func": _WINDOW | _KEY_VALUE,
    "flash_attn_qkvpacked_func": _WINDOW | _PACKED,
    "flash_attn_varlen_func": _WINDOW,
    "flash_attn_varlen_kvpacked_func": _WINDOW | _KEY_VALUE,
    "flash_attn_varlen_qkvpacked_func": _WINDOW | _PACKED | _ONE_LENGTH,
    "scaled_dot_product_attention": _TORCH | {"bias": "attn_mask", "causal": "is_causal"},
    "attention_with_cache": {"k": "k_cache", "v": "v_cache"},
    "_flash_attention_forward": _TORCH | _ATEN,
    "_flash_attention_backward": _TORCH | _ATEN | {"dout": "grad_out", "lse": "logsumexp"},
    "cupyflash.integrations.transformers": _TORCH
    | {
        "bias": "attention_mask",
        "causal": "is_causal",
        "cu_seqlens_k": "cu_seq_lens_k",
        "cu_seqlens_q": "cu_seq_lens_q",
        "dropout_p": "dropout",
        "max_seqlen_k": "max_length_k",
        "max_seqlen_q": "max_length_q",
        "scale": "scaling",
        "sinks": "s_aux",
        "window": "sliding_window",
    },
}


def caller_name(function: str, name: str) -> str:
    """The name of an argument as the caller of this function wrote it."""
    return NAMES.get(function, {}).get(name, name)
