"""GroupNorm fused with an activation function: ``cuda_src/group_norm``.

group_norm.py has the public functions, dispatch.py the way from arrays to a plan (plan.py),
kernels.py the kernels that read a group once, steps.py the three launches for all other groups.
"""
