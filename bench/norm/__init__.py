"""Norms and the diffusion step beside torch and Liger."""
