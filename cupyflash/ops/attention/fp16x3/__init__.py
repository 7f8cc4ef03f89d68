"""Backend ``fp16x3``: float32 on mma.sync tensor cores, by three float16 products.

It is for GPUs from Turing on; where CUDA cores are as fast, it must be forced. A pass launches two
kernels that split the inputs (``before``), the main kernel, those that end the pass (``after``),
and those of ``simt``, which compute the sequences whose range the float16 parts cannot hold
(``fallback``).

kernels.py   ``flash_fwd_fp16x3`` and ``flash_bwd_fp16x3``: read these first, and parts.cuh in
             cuda_src/attention/fp16x3, which explains the method
launch.py    the launches around a main kernel
backend.py   what the rest of the package asks this backend for
"""
