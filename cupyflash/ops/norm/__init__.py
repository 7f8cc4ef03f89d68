"""LayerNorm, RMSNorm and GroupNorm: ``cuda_src/norm``."""
