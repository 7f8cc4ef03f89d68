"""Fused attention for CuPy arrays and torch tensors, compiled on first use with NVRTC.

See https://arxiv.org/abs/2307.08691 for the algorithm and README.md for what runs where.
"""

from .attention import attention, attention_backward
from .diffusion import DiffusionSampler
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .group_norm import group_norm, group_norm_backward
from .linear import Norm, Rotary, linear
from .mlp import mlp
from .norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from .precompile import warmup
from .qkv import qkv_projection
from .schedule import beta_schedule, timestep_embeddings
from .sdpa import scaled_dot_product_attention
from .transformer_block import BlockStack, BlockWeights, transformer_block

__version__ = "0.1.0"

__all__ = [
    "BlockStack",
    "BlockWeights",
    "DiffusionSampler",
    "Norm",
    "Rotary",
    "attention",
    "attention_backward",
    "beta_schedule",
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
