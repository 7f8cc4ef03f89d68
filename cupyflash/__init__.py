"""Fused attention for CuPy arrays and torch tensors, compiled on first use with NVRTC.

See https://arxiv.org/abs/2307.08691 for the algorithm, docs/ for an example of every function, and
README.md for what runs where.

The modules behind these names are imported when they are first used.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; MODULES says the same at run time
    from .ops.attention.attention import attention as attention
    from .ops.attention.attention import attention_backward as attention_backward
    from .ops.attention.combine import flash_attn_combine as flash_attn_combine
    from .ops.attention.flex import flex_attention as flex_attention
    from .ops.attention.score_text.scores import Mask as Mask
    from .ops.attention.score_text.scores import Score as Score
    from .ops.attention.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .ops.attention.triangle import triangle_attention as triangle_attention
    from .ops.block.block import BlockStack as BlockStack
    from .ops.block.block import BlockWeights as BlockWeights
    from .ops.block.block import transformer_block as transformer_block
    from .ops.decode.cache_append import cache_append as cache_append
    from .ops.decode.cached_attention import attention_with_cache as attention_with_cache
    from .ops.diffusion.sampler import DiffusionSampler as DiffusionSampler
    from .ops.diffusion.schedule import beta_schedule as beta_schedule
    from .ops.diffusion.schedule import timestep_embeddings as timestep_embeddings
    from .ops.flash_attn import flash_attn_func as flash_attn_func
    from .ops.flash_attn import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from .ops.flash_attn import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from .ops.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from .ops.flash_attn import (
        flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
    )
    from .ops.flash_attn import (
        flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
    )
    from .ops.flash_attn_cache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from .ops.flash_attn_padding import index_first_axis as index_first_axis
    from .ops.flash_attn_padding import pad_input as pad_input
    from .ops.flash_attn_padding import unpad_input as unpad_input
    from .ops.group_norm.group_norm import group_norm as group_norm
    from .ops.group_norm.group_norm import group_norm_backward as group_norm_backward
    from .ops.linear.linear import Norm as Norm
    from .ops.linear.linear import Rotary as Rotary
    from .ops.linear.linear import linear as linear
    from .ops.linear.linear import mlp as mlp
    from .ops.linear.linear import qkv_projection as qkv_projection
    from .ops.norm.norm import layer_norm as layer_norm
    from .ops.norm.norm import layer_norm_backward as layer_norm_backward
    from .ops.norm.norm import rms_norm as rms_norm
    from .ops.norm.norm import rms_norm_backward as rms_norm_backward
    from .precompile import warmup as warmup

__version__ = "0.1.0"

# The public names of each module, which the first use of one imports.
MODULES = {
    "ops.attention.attention": "attention attention_backward",
    "ops.attention.combine": "flash_attn_combine",
    "ops.attention.flex": "flex_attention",
    "ops.attention.score_text.scores": "Mask Score",
    "ops.attention.sdpa": "scaled_dot_product_attention",
    "ops.attention.triangle": "triangle_attention",
    "ops.block.block": "BlockStack BlockWeights transformer_block",
    "ops.decode.cache_append": "cache_append",
    "ops.decode.cached_attention": "attention_with_cache",
    "ops.diffusion.sampler": "DiffusionSampler",
    "ops.diffusion.schedule": "beta_schedule timestep_embeddings",
    "ops.flash_attn": "flash_attn_func flash_attn_kvpacked_func "
    "flash_attn_qkvpacked_func flash_attn_varlen_func flash_attn_varlen_kvpacked_func "
    "flash_attn_varlen_qkvpacked_func",
    "ops.flash_attn_cache": "flash_attn_with_kvcache",
    "ops.flash_attn_padding": "index_first_axis pad_input unpad_input",
    "ops.group_norm.group_norm": "group_norm group_norm_backward",
    "ops.linear.linear": "Norm Rotary linear mlp qkv_projection",
    "ops.norm.norm": "layer_norm layer_norm_backward rms_norm rms_norm_backward",
    "precompile": "warmup",
}
_MODULE_OF = {name: module for module, names in MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def _imported(name: str) -> Any:
    """A public name, or a module of the package: ``cupyflash.jit`` needs no import of its own."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    text = f"module {__name__!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(text)
    if importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    from .ops.attention.foreign import ELSEWHERE

    if name in ELSEWHERE:
        text += f", write {ELSEWHERE[name]}"
        asking = sys._getframe(1).f_globals["__name__"]
        if asking in ("importlib._bootstrap", "_frozen_importlib"):
            # This is ``from cupyflash import name``, which drops the text of an AttributeError.
            raise ImportError(text, name=__name__)
    raise AttributeError(text)


if not TYPE_CHECKING:  # with a __getattr__, checkers accept any name of the package
    __getattr__ = _imported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
