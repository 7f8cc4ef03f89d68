"""Fused attention for CuPy arrays and torch tensors, compiled on first use with NVRTC.

See https://arxiv.org/abs/2307.08691 for the algorithm and README.md for what runs where.
"""

from .attention import attention, attention_backward
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .precompile import warmup
from .sdpa import scaled_dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "attention",
    "attention_backward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "scaled_dot_product_attention",
    "warmup",
]
