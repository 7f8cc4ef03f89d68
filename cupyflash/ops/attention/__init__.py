"""Attention: from the arrays of a call to the kernels of ``cuda_src/attention``."""
