"""Backend ``sm90``: wgmma tensor cores fed by the copy engine (TMA) of Hopper.

It computes float16 and bfloat16 on GPUs of compute capability 9.0 itself, whose instructions
(sm_90a) exist on no other, of tensors that a tensor map can describe.

forward.py       ``flash_fwd_sm90``: read this first, beside its kernel in cuda_src/attention/sm90
backward.py      ``flash_bwd_sm90``, ``flash_bwd_wide_sm90`` for wide heads; what decides a pass
kernels.py       their template parameters, threads and boxes
boolean_bias.py  which Boolean biases are computed as a text of the library's own
launch.py        tensor maps, the counter of tiles, packed sequences, keys that blocks share
backend.py       what the rest of the package asks this backend for
"""
