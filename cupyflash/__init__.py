"""Fused attention for CuPy arrays and torch tensors, compiled on first use with NVRTC.

See https://arxiv.org/abs/2307.08691 for the algorithm, docs/ for an example of every function, and
README.md for what runs where.
"""

from .attention.attention import attention, attention_backward
from .attention.combine import flash_attn_combine
from .attention.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .attention.sdpa import scaled_dot_product_attention
from .decode.block import BlockStack, BlockWeights, transformer_block
from .decode.cached_attention import attention_with_cache
from .diffusion.sampler import DiffusionSampler
from .diffusion.schedule import beta_schedule, timestep_embeddings
from .linear.linear import Norm, Rotary, linear
from .linear.mlp import mlp
from .linear.qkv import qkv_projection
from .norm.group_norm import group_norm, group_norm_backward
from .norm.norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from .precompile import warmup

__version__ = "0.1.0"

__all__ = [
    "BlockStack",
    "BlockWeights",
    "DiffusionSampler",
    "Norm",
    "Rotary",
    "attention",
    "attention_backward",
    "attention_with_cache",
    "beta_schedule",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "group_norm",
    "group_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "mlp",
    "qkv_projection",
    "rms_norm",
    "rms_norm_backward",
    "scaled_dot_product_attention",
    "timestep_embeddings",
    "transformer_block",
    "warmup",
]
