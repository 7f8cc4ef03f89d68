"""Backend ``sm80``: mma.sync tensor cores, for GPUs from Turing (sm_75) on; not only for Ampere.

It computes float16 and, from Ampere on, bfloat16, of tensors whose addresses and strides are
multiples of 16 bytes. Hopper has kernels of its own, but takes these for tensors that TMA cannot
describe and for sequences of one tile.

forward.py   ``flash_fwd_sm80``: read this first, beside its kernel in cuda_src/attention/sm80
backward.py  ``flash_bwd_sm80`` and, for narrow heads, ``flash_bwd_keys_sm80``
short.py     ``flash_bwd_short_sm80``, the whole backward of sequences of one tile
dbias.py     ``flash_bwd_dbias_sm80``, the gradient of a bias that sequences share
capture_gradients.py   ``flash_bwd_captures_sm80``, the gradients of what a score reads
backend.py   what the rest of the package asks this backend for
"""
