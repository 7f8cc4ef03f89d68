"""Steps of diffusion models: ``cuda_src/diffusion``."""
