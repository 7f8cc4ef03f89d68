"""cupyflash as an attention implementation of Hugging Face Transformers.

`register` once, then ``attn_implementation="cupy_attention"`` in ``from_pretrained`` or
``model.set_attn_implementation("cupy_attention")``. Models whose attention does not go through the
attention interface of transformers raise when they are loaded.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from ..attention.dispatch import forward
from ..attention.extras import NO_EXTRAS, Extras
from . import transformers_mask
from .transformers_mask import FUNCTION, Mask, mask
from .transformers_models import check_when_loaded
from .transformers_pattern import Pattern

# A name with "flash" in it sends many models through paths that are meant for flash-attn.
NAME = "cupy_attention"
MISNOMER = "cupyflash"
NEEDED = "transformers 5.4 or newer"


def register() -> None:
    """Add "cupy_attention" to the attention functions and to the mask functions of transformers.

    Raises:
        ImportError: no transformers, or one without these interfaces.
    """
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers import masking_utils as masks
    except ImportError as error:
        raise ImportError(f"{FUNCTION}.register: needs {NEEDED}, got: {error}") from error
    if "q_length" not in inspect.signature(masks.sdpa_mask).parameters:
        raise ImportError(f"{FUNCTION}.register: needs {NEEDED}, got {transformers.__version__}")
    check_when_loaded(PreTrainedModel, NAME, MISNOMER)
    transformers_mask.masks = masks
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
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
        attention_mask: what `transformers_mask.mask` returned, which says all that is masked; or a
            bool or additive mask of rank 4, likewise; or None, where `is_causal` alone says it.
        is_causal: what a layer without a mask is; default ``module.is_causal``, else True.
        s_aux: attention sinks, (heads,).
        position_bias: added to the scores, as in T5.
        cu_seq_lens_q, cu_seq_lens_k: sequences packed along axis 2, each with the pattern of the
            mask, or with ``is_causal`` and ``sliding_window`` where there is no mask.
        cache: a paged cache; none else is handed down to here.
        others: ``sliding_window``, the keys that a query sees, itself included; what else a layer
            tells changes nothing in its result.

    Raises:
        NotImplementedError: a paged cache, packed sequences with a mask that is no causal or
            sliding one.
        TypeError, ValueError: a mask of another rank, a causal layer without a mask whose keys are
            not as many as its queries, and as `cupyflash.attention`.
    """
    if cache is not None:
        raise NotImplementedError(
            f"{FUNCTION}: paged caches (continuous batching) are not built yet, allowed are the "
            f"dynamic and the static cache, got {type(cache).__name__}"
        )
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    width = -(-max(head_dim, value_dim) // 8) * 8  # latent attention has q and k wider than v
    q, k, v = (_widened(x, width).transpose(1, 2) for x in (query, key, value))
    scale = head_dim**-0.5 if scaling is None and width != head_dim else scaling
    softcap = softcap or 0.0
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is not None:
        causal, window = _inside_sequences(attention_mask, causal, others.get("sliding_window"))
        lengths = (max_length_q, max_length_k)
        options = (causal, scale, window, softcap, "thd", lengths, dropout)
        extras = Extras(cu_seq_lens_q.int(), cu_seq_lens_k.int(), sinks=s_aux)
        out, _ = forward(FUNCTION, *(x.flatten(0, 1) for x in (q, k, v)), options, extras)
        out = out.unflatten(0, (query.shape[0], query.shape[2]))
    else:
        if isinstance(attention_mask, Mask):
            options = attention_mask.options(query, key)
        elif attention_mask is None:
            options = _without_mask(query, key, causal, others.get("sliding_window"))
        elif attention_mask.dim() != 4:
            fact = "attention_mask must be of rank 4 or what the mask function returned"
            raise ValueError(f"{FUNCTION}: {fact}, got shape {tuple(attention_mask.shape)}")
        else:
            options = {"bias": _broadcast(attention_mask, query, key)}
        if position_bias is not None:
            options["bias"] = _added(options.get("bias"), position_bias)
        extras = Extras(
            bias=options.get("bias"), sinks=s_aux, seqused_q=options.get("seqused_q"),
            seqused_k=options.get("seqused_k"),
        )  # fmt: skip
        if not dropout and all(x is None for x in extras):
            extras = NO_EXTRAS
        causal, window = options.get("causal", False), options.get("window")
        options = (causal, scale, window, softcap, "bshd", None, dropout)
        out, _ = forward(FUNCTION, q, k, v, options, extras)
    return out[..., :value_dim], None


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros behind the last dimension, up to what the kernels take."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _broadcast(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask, if it fits the scores."""
    shape = (*query.shape[:3], key.shape[2])
    if not all(x in (1, n) for x, n in zip(mask.shape, shape)):
        raise ValueError(
            f"{FUNCTION}: attention_mask must broadcast to (batch, heads, queries, keys) = {shape}"
            f", got shape {tuple(mask.shape)}"
        )
    return mask


def _added(bias: Tensor | None, position_bias: Tensor) -> Tensor:
    if bias is None:
        return position_bias
    if bias.dtype == torch.bool:
        return position_bias.masked_fill(~bias, float("-inf"))
    return bias + position_bias


def _without_mask(query: Tensor, key: Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    """The options of a layer that has no mask; one query sees all keys, as in transformers."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if window and seqlen_k >= window and not (causal and seqlen_q == seqlen_k):
        raise ValueError(
            f"{FUNCTION}: attention_mask must say what sliding_window={window} means for "
            f"{seqlen_q} queries and {seqlen_k} keys, got None"
        )
    if not causal or seqlen_q == 1:
        return {}
    if seqlen_q != seqlen_k:
        raise ValueError(
            f"{FUNCTION}: attention_mask must say which of {seqlen_k} keys each of {seqlen_q} "
            "queries of a causal layer sees, got None"
        )
    return {"causal": True, "window": (window - 1, 0) if window else None}


def _inside_sequences(
    attention_mask: Mask | Tensor | None, causal: bool, window: int | None
) -> tuple[bool, tuple[int | None, int | None] | None]:
    """(causal, window) inside each of the packed sequences."""
    if isinstance(attention_mask, Mask):
        pattern = attention_mask.pattern or attention_mask.packed
    elif attention_mask is None and (causal or not window):
        pattern = Pattern(window - 1 if window else None, 0 if causal else None)
    else:
        pattern = None
    if pattern is None:
        raise NotImplementedError(
            f"{FUNCTION}: cu_seq_lens_q must come with a causal, bidirectional or sliding mask, or "
            f"with none, got {type(attention_mask).__name__} of another kind"
        )
    if pattern == Pattern(None, 0):
        return True, None
    return pattern.right == 0, pattern if pattern != Pattern() else None
