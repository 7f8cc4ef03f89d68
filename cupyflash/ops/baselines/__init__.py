"""The steps from a first kernel to attention: ``cuda_src/baselines``."""

from .baselines import flash_attention_1, fused_attention, naive_attention, vector_add

__all__ = ["flash_attention_1", "fused_attention", "naive_attention", "vector_add"]
