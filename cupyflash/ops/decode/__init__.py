"""Decoding: attention with a cache of keys and values, embedding and sampling.

====================  ==============================================================================
cached_attention.py   `attention_with_cache`, and cache_append.py `cache_append`: public functions
operations.py         the operation that `attention_with_cache` calls (``runtime/operation.py``)
dispatch.py           arrays to a key, a key to a plan; append_dispatch.py of `cache_append`
cached.py             `CachedShape`, what a plan depends on; cached_checks.py makes it of the arrays
plans.py              `DecodePlan`: few new tokens, in one launch of ``flash_decode*.cu``
steps.py              `StepsPlan`: more of them, by the forward of attention; paged.py where it
                      reads the pages itself, else kv_cache.py gathers them
kernels.py            configurations of all kernels of ``cuda_src/decode``
embedding.py          rows of the tables of tokens and positions
sampling.py           the next token from logits
reference.py          all of it in NumPy
====================  ==============================================================================
"""
