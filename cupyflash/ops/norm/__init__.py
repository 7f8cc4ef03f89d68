"""LayerNorm and RMSNorm, with a residual and dropout before them: ``cuda_src/norm``.

norm.py has the public functions, dispatch.py the way from arrays to a plan (plan.py), kernels.py
the choice of a kernel and its tile, configs.py the configurations, dropout.py that of dropout.
"""
