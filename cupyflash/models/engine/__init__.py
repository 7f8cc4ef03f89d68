"""Continuous batching: one engine for the language models of this package.

    engine = Engine(model)
    request = engine.submit([1, 2, 3], max_new_tokens=20)
    while not request.reason:
        engine.step()

A step passes these modules:

=============  =====================================================================================
engine.py      `Engine.step`: enqueues a step, and reads the tokens of the one before it
scheduler.py   which requests (request.py) the step is for; it is over prompts or decodes
pool.py        the pages of keys and values that the requests of the step have
decoder.py     the arrays of the step on the device (batch.py), CUDA graphs, sampling
devices.py     what differs between NumPy, CuPy and torch
attention.py   attention of a layer, which the ``logits`` of a model calls with its q, k and v
=============  =====================================================================================

Source of the pages: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180.
"""

from .batch import Batch
from .engine import Engine
from .pool import PagePool
from .request import Request

__all__ = ["Batch", "Engine", "PagePool", "Request"]
