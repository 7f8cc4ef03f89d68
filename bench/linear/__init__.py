"""Projections and MLPs beside torch and cuBLASLt."""
