"""Denoising loops of a diffusion policy."""
