"""Backend ``simt``: plain CUDA, for any GPU from Pascal on, any strides, and all three dtypes.

It is the readable backend, and the fallback for everything that the others cannot take. Its kernels
also compute the sequences that ``fp16x3`` cannot.

kernels.py   ``flash_fwd_simt`` and ``flash_bwd_simt``: read their sources in
             cuda_src/attention/simt before those of any other backend; and
             ``flash_bwd_captures_simt``, the gradients of what a score reads
backend.py   what the rest of the package asks this backend for
"""
