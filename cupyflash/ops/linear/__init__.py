"""Projections and the MLP of a transformer block: ``cuda_src/linear``.

========================  ==========================================================================
linear.py                 `linear`, `mlp`, `qkv_projection`: the public functions
operations.py             the operation that they call (``runtime/operation.py``)
options.py                `Arrays` and `Options`, which the modules pass on
plan.py                   arrays to a key, a key to a plan
launches.py               which kernels a problem launches, in which order
kernels.py                those of any GPU; sm90_kernels.py and small_m_sm90_kernels.py of Hopper
head_norm.py              the norm of the heads of q and k (Qwen3)
autograd.py               gradients, autocast, torch.compile; elementwise.py has its kernels
reference.py              all of it in NumPy
========================  ==========================================================================
"""
