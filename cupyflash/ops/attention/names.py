"""The names of arguments in public functions that are not those of `cupyflash.attention`."""

_WINDOW = {"scale": "softmax_scale", "window": "window_size", "return_lse": "return_attn_probs"}
_PACKED = {"q": "qkv", "k": "qkv", "v": "qkv"}
_ONE_LENGTH = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
_ONE_LENGTH |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
_KEY_VALUE = {"k": "kv", "v": "kv"}
_TORCH = {"q": "query", "k": "key", "v": "value"}
_ATEN = {"cu_seqlens_q": "cum_seq_q", "cu_seqlens_k": "cum_seq_k", "causal": "is_causal"}
_ATEN |= {"max_seqlen_q": "max_q", "max_seqlen_k": "max_k"}
# The arrays of `cupyflash.attention_with_cache`, and k and v of attention on them.
_PAGED = {"k_cache": "k", "v_cache": "v", "page_table": "block_table", "positions": "seqused_k"}
_CACHED = {"k": "k_cache", "v": "v_cache", "page_table": "block_table", "leftpad": "cache_leftpad"}
_CACHED |= {"positions": "cache_seqlens", "seqused_k": "cache_seqlens", "k_scale": "k_descale"}
_CACHED |= {"sequences": "cache_batch_idx", "v_scale": "v_descale"}
_CACHED |= {"return_lse": "return_softmax_lse"}

NAMES = {
    "flash_attn_func": _WINDOW,
    "flash_attn_kvpacked_func": _WINDOW | _KEY_VALUE,
    "flash_attn_qkvpacked_func": _WINDOW | _PACKED,
    "flash_attn_varlen_func": _WINDOW | _PAGED,
    "flash_attn_with_kvcache": _WINDOW | _CACHED,
    "flash_attn_varlen_kvpacked_func": _WINDOW | _KEY_VALUE,
    "flash_attn_varlen_qkvpacked_func": _WINDOW | _PACKED | _ONE_LENGTH,
    "scaled_dot_product_attention": _TORCH | {"bias": "attn_mask", "causal": "is_causal"},
    "flex_attention": _TORCH | {"score": "score_mod", "mask": "block_mask"},
    "triangle_attention": {"key_mask": "mask", "return_lse": "return_aux"},
    "attention_with_cache": {"k": "k_cache", "v": "v_cache", "seqused_k": "positions"},
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
