"""GPT-2 transformer blocks for one new token: a whole stack of them in one persistent launch.

block.py has the public functions, stack.py the checked weights and the way from arrays to a plan
(plan.py); the kernel is ``cuda_src/block/decode_stack.cu``.
"""
