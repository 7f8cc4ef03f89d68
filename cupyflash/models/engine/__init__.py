"""Continuous batching: one engine for the language models of this package.

    engine = Engine(model)
    request = engine.submit([1, 2, 3], max_new_tokens=20)
    while not request.reason:
        engine.step()

Source of the pages: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180.
"""

from .batch import Batch
from .engine import Engine
from .pool import PagePool
from .request import Request

__all__ = ["Batch", "Engine", "PagePool", "Request"]
