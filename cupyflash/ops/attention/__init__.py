"""Attention: from the arrays of a call to the kernels of ``cuda_src/attention``.

A call passes these modules; the part in the middle runs once for all calls of one signature.

=================  =================================================================================
attention.py       the public functions; options become plain values (options.py)
operations.py      `FORWARD`, `BACKWARD`: torch or not, autograd or not (``runtime/operation.py``)
dispatch.py        arrays to a key, a key to a plan; on a CPU to cpu.py

checks.py          the first time: views of the arrays become a `Problem` (problem.py)
planning.py        a `Kind` (kind.py) chooses the backend (backends.py), tuning.py perhaps the tile
sm90/, sm80/,      the backend makes a `Pass` of launches (passes.py), by the rules of sharing.py;
fp16x3/, simt/     ``cuda_src/attention`` has a folder of the same name

plan.py            `ForwardPlan`, `BackwardPlan`: allocates the results and launches the `Pass`
=================  =================================================================================

Beside this way lie other signatures (sdpa.py, flex.py, triangle.py, ``ops/flash_attn.py``), torch
(torch_side.py, torch_ops.py, torch_plain.py, torch_text.py), scores and masks of the caller's own
(score_text/, captures.py, capture_gradients.py), masks.py and padding.py, which prepare arrays,
combine.py, and the reference of the tests (reference.py, score.py, online_softmax.py).
"""
