"""Backend ``sm90``: wgmma tensor cores fed by the copy engine (TMA) of Hopper.

It computes float16 and bfloat16 on GPUs of compute capability 9.0 itself, whose instructions
(sm_90a) exist on no other, of tensors that a tensor map can describe.

forward.py   ``flash_fwd_sm90``: read this first, beside its kernel in cuda_src/attention/sm90
backward.py  ``flash_bwd_sm90`` and, for wide heads, ``flash_bwd_wide_sm90``; what decides a pass
launch.py    tensor maps, the counter of tiles, packed sequences, keys that blocks share
kernels.py   the configurations of all kernels, and the kinds of bias that TMA loads
backend.py   what the rest of the package asks this backend for
"""
