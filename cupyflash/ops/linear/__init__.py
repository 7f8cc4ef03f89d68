"""Projections and the MLP of a transformer block: ``cuda_src/linear``."""
