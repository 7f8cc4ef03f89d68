"""The operations, a folder for each topic; kernels lie in a folder of the same name in cuda_src.

`attention` is the largest. `block` builds on `decode` and `norm`, `linear` on `norm`.
"""
