"""cupyflash as an attention implementation of Hugging Face Transformers.

`register` once, then ``attn_implementation="cupyflash"`` in ``from_pretrained`` or
``model.set_attn_implementation("cupyflash")``.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

import cupyflash

from ..attention.dispatch import forward
from ..attention.extras import Extras

NAME = "cupyflash"
NEEDED = "transformers 5.4 or newer"
FUNCTION = "cupyflash.integrations.transformers"


def register() -> None:
    """Add "cupyflash" to the attention functions and to the mask functions of transformers.

    Raises:
        ImportError: no transformers, or one without these interfaces.
    """
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
        from transformers import modeling_utils as models
        from transformers.generation import utils as generation
    except ImportError as error:
        raise ImportError(f"{FUNCTION}.register: needs {NEEDED}, got: {error}") from error
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"{FUNCTION}.register: needs {NEEDED}, got {transformers.__version__}")
    from .transformers_mask import mask

    if NAME not in AttentionInterface().valid_keys():
        for module in (models, masking_utils, generation):
            _not_from_the_hub(module)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`cupyflash.attention` of (batch, heads, seqlen, head_dim); the result has axes 1, 2 swapped.

    Args:
        attention_mask: what `transformers_mask.mask` returned, or another mask of rank 4.
        s_aux: attention sinks, (heads,).
        position_bias: added to the scores, as in T5.
        cu_seq_lens_q, cu_seq_lens_k: sequences packed along axis 2, instead of a mask.
        cache: a paged cache; none else is handed down to here.
        others: ``sliding_window``, the keys that a query sees on each side, itself included.

    Raises:
        NotImplementedError: a paged cache, layers that keep their window to themselves.
        TypeError, ValueError: a mask of another rank, and as `cupyflash.attention`.
    """
    if cache is not None:
        raise NotImplementedError(
            f"{FUNCTION}: paged caches (continuous batching) are not built yet, allowed are the "
            f"dynamic and the static cache, got {type(cache).__name__}"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    softcap = softcap or 0.0
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if (wider := q.shape[-1] - v.shape[-1]) > 0:  # as in DeepSeek's latent attention
        v = torch.nn.functional.pad(v, (0, wider))
    if cu_seq_lens_q is not None:
        lengths = (max_length_q, max_length_k)
        options = (causal, scaling, _window(module, others), softcap, "thd", lengths, dropout)
        extras = Extras(cu_seq_lens_q.int(), cu_seq_lens_k.int(), sinks=s_aux)
        out, _ = forward(FUNCTION, *(x.flatten(0, 1) for x in (q, k, v)), options, extras)
        out = out.unflatten(0, q.shape[:2])
    else:
        if callable(attention_mask):
            attention_mask = attention_mask()
        options = _masked(attention_mask, position_bias)
        if attention_mask is None or attention_mask.dtype in (torch.int32, torch.uint8):
            options |= {"causal": causal, "window": _window(module, others, key.shape[2])}
            if causal and q.shape[1] == k.shape[1]:  # padding of the one is padding of the other
                options["seqused_q"] = options["seqused_k"]
        out = cupyflash.attention(
            q, k, v, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout, **options
        )
    return out[..., : value.shape[-1]], None


def _masked(mask: Tensor | None, position_bias: Tensor | None) -> dict[str, Any]:
    """The options of `cupyflash.attention` that come from a mask and a bias."""
    if mask is not None and mask.dim() != 4:
        fact = "attention_mask must be of rank 4 or what the mask function returned"
        raise ValueError(f"{FUNCTION}: {fact}, got shape {tuple(mask.shape)}")
    lengths = None
    if mask is not None and mask.dtype == torch.int32:
        lengths, mask = mask.flatten(), None
    elif mask is not None and mask.dtype == torch.uint8:
        mask = mask.view(torch.bool)
    if mask is None:
        mask = position_bias
    elif position_bias is not None and mask.dtype == torch.bool:
        mask = position_bias.masked_fill(~mask, float("-inf"))
    elif position_bias is not None:
        mask = mask + position_bias
    return {"bias": mask, "seqused_k": lengths}


def _window(
    module: torch.nn.Module, others: dict[str, Any], seqlen_k: int | None = None
) -> tuple[int, int] | None:
    """The window that a layer hands down, or has where its model forgets to.

    Raises:
        NotImplementedError: layers of models that have a window, but do not tell.
    """
    told = "sliding_window" in others or hasattr(module, "sliding_window")
    window = others.get("sliding_window", getattr(module, "sliding_window", None))
    if window is not None:
        return window - 1, window - 1
    window = getattr(getattr(module, "config", None), "sliding_window", None)
    if not told and window is not None and (seqlen_k is None or seqlen_k > window):
        raise NotImplementedError(
            f"{FUNCTION}: {type(module).__name__} must hand its sliding_window to the attention "
            f"function for sequences longer than that ({window}), got none"
        )
    return None


def _not_from_the_hub(module: Any) -> None:
    """Keep a module of transformers from taking "cupyflash" for a build of flash-attn.

    Its loader takes every name that holds "flash" for one, and fetches it from the hub or puts
    another in its place.
    """
    original = module.is_flash_attention_requested

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **others: Any
    ) -> bool:
        name = getattr(config, "_attn_implementation", requested_attention_implementation)
        return name != NAME and original(config, requested_attention_implementation, **others)

    module.is_flash_attention_requested = is_flash_attention_requested
