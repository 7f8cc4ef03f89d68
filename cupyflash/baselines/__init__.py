"""The three steps from a first kernel to attention: ``cuda_src/baselines``."""

from .baselines import fused_attention, naive_attention, vector_add

__all__ = ["fused_attention", "naive_attention", "vector_add"]
