"""What transformers hands to every layer as the mask of a forward, where cupyflash computes it.

None, or one tensor of rank 4 whose dtype tells what it is:

* bool or float (batch, 1 or heads, seqlen_q, seqlen_k): all that is masked; nothing else applies.
* int32 (batch, 1, 1, 1): how many keys of each sequence count, beside what the layer says itself,
  which is whether it is causal and its window. No mask is in memory, and padding takes no time.
* uint8 (batch, 1, 1, seqlen_k): the keys that are no padding, beside what the layer says itself.

The values of a padding mask are read once in a forward of more than one token, all layers together,
which makes the host wait for the GPU: only they say whether there is padding, and where. Nothing is
read while torch compiles or a CUDA graph is captured.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | Callable[[], Tensor] | None:
    """The mask of a forward; of packed sequences a function that builds it, if a layer needs it.

    Args:
        q_offset, kv_offset: positions of the first query and key; a tensor with a static cache.
        mask_function: (batch, head, query, key) -> visible, of indices.
        attention_mask: padding, bool (batch, keys up to now), True where there is a token.
        local_size: the sliding window, or the length of chunks.
        allow_is_causal_skip, allow_is_bidirectional_skip: the pattern may be left to the layers.
    """
    whole = functools.partial(
        sdpa_mask,
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device, **others,
    )  # fmt: skip
    bidirectional = allow_is_bidirectional_skip or mask_function is bidirectional_mask_function
    window = local_size is not None and local_size == getattr(config, "sliding_window", None)
    if window:
        left_to_layers = allow_is_causal_skip or allow_is_bidirectional_skip
    else:
        left_to_layers = mask_function in (causal_mask_function, bidirectional_mask_function)
    counted = isinstance(q_offset, int) and isinstance(kv_offset, int)
    if not left_to_layers:
        packed = attention_mask is None and counted and q_length == kv_length
        return functools.cache(whole) if packed and not _unreadable(device) else whole()
    # A static cache has room behind the last token: the last query is not the one of the last key.
    if counted and (bidirectional or q_offset + q_length == kv_offset + kv_length):
        if attention_mask is None:
            return None
        visible = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        visible = visible[:, kv_offset : kv_offset + kv_length]
        if q_length > 1 and not _unreadable(device):
            gaps = (visible[:, 1:] > visible[:, :-1]).any()
            padded, gaps = torch.stack((~visible.all(), gaps)).tolist()
            if not padded:
                return None
            if not gaps and (bidirectional or q_length == kv_length):
                return visible.sum(1, dtype=torch.int32)[:, None, None, None]
        return visible.to(torch.uint8)[:, None, None]
    if attention_mask is None and not bidirectional:
        lengths = torch.full((batch_size, 1, 1, 1), q_length, dtype=torch.int32, device=device)
        return lengths + (q_offset - kv_offset)
    return whole()


def _unreadable(device: torch.device | str) -> bool:
    """Whether torch compiles or captures, so that values cannot steer what is done."""
    on_gpu = torch.device(device).type == "cuda"
    return torch.compiler.is_compiling() or (on_gpu and torch.cuda.is_current_stream_capturing())
