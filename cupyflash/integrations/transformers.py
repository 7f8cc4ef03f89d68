"""cupyflash as an attention implementation of Hugging Face Transformers.

`register` once, then ``attn_implementation="cupy_attention"`` in ``from_pretrained`` or
``model.set_attn_implementation("cupy_attention")``. Models whose attention does not go through the
attention interface of transformers raise when they are loaded: transformers accepts any registered
name for any model, and one that multiplies its matrices itself would silently go on doing so, with
a mask made for somebody else.
"""

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..attention.dispatch import FORWARD
from ..attention.options import Extras, plain_options
from . import transformers_mask
from .transformers_mask import FUNCTION, Mask, Pattern, mask

# A name with "flash" in it sends many models through paths that are meant for flash-attn.
NAME = "cupy_attention"
MISNOMER = "cupyflash"
NEEDED = "transformers 5.4 or newer"

# How a class of models shows whether it calls the attention interface, or computes by itself.
SUPPORTED = ("attention_backend", "sdpa", "flash_attn", "flex_attn")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# A dictionary of layers, one for each implementation, as before there was an interface.
ATTENTION_CLASSES = re.compile(r"^\w*ATTENTION_CLASSES\w* = ", re.MULTILINE)
ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\([^)]*nn\.Module", re.MULTILINE)


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
    _check_when_loaded(PreTrainedModel)
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
        attention_mask: the return value of `transformers_mask.mask`, or a bool or additive mask of
            rank 4: either says all that is masked. None: `is_causal` alone says it.
        is_causal: whether a layer without a mask is causal; default ``module.is_causal``, else
            True.
        s_aux: attention sinks, (heads,).
        position_bias: added to the scores, as in T5.
        cu_seq_lens_q, cu_seq_lens_k: sequences packed along axis 2, each with the pattern of the
            mask, or with ``is_causal`` and ``sliding_window`` where there is no mask.
        cache: a paged cache, which is refused; transformers hands no other kind down to here.
        others: ``sliding_window``, the number of keys that a query sees, itself included. Other
            arguments change nothing in the result of a layer.

    Raises:
        NotImplementedError: a paged cache, or packed sequences with a mask that is neither causal
            nor sliding.
        TypeError, ValueError: a mask of another rank, a causal layer without a mask that has more
            or fewer keys than queries, and as `cupyflash.attention`.
    """
    if cache is not None:
        raise NotImplementedError(
            f"{FUNCTION}: paged caches (continuous batching) are not built yet, allowed are the "
            f"dynamic and the static cache, got {type(cache).__name__}"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    softcap, sliding = softcap or 0.0, others.get("sliding_window")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is not None:
        causal, window = _inside_sequences(attention_mask, causal, sliding)
        lengths = (max_length_q, max_length_k)
        options = (causal, scaling, window, softcap, "thd", lengths, dropout, False, "ieee")
        extras = Extras(cu_seq_lens_q.int(), cu_seq_lens_k.int(), sinks=s_aux)
        arrays = (*(x.flatten(0, 1) for x in (q, k, v)), *extras)
        out, _ = FORWARD(FUNCTION, arrays, (plain_options(FUNCTION, options), False))
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    masked = _options(attention_mask, query, key, causal, sliding)
    if position_bias is not None:
        masked["bias"] = _added(masked.get("bias"), position_bias)
    causal, window = masked.pop("causal", False), masked.pop("window", None)
    options = (causal, scaling, window, softcap, "bshd", None, dropout, False, "ieee")
    arrays, extras = (q, k, v), Extras(**masked, sinks=s_aux)
    if any(x is not None for x in extras):
        arrays = (*arrays, *extras)
    out, _ = FORWARD(FUNCTION, arrays, (plain_options(FUNCTION, options), False))
    return out, None


def _options(
    attention_mask: Mask | Tensor | None,
    query: Tensor,
    key: Tensor,
    causal: bool,
    sliding: int | None,
) -> dict[str, Any]:
    """The options and extras of `cupyflash.attention` that mask what this layer masks."""
    if isinstance(attention_mask, Mask):
        return attention_mask.options(query, key)
    if attention_mask is None:
        return _without_mask(query.shape[2], key.shape[2], causal, sliding)
    if attention_mask.dim() != 4:
        fact = "attention_mask must be of rank 4 or what the mask function returned"
        raise ValueError(f"{FUNCTION}: {fact}, got shape {tuple(attention_mask.shape)}")
    shape = (*query.shape[:3], key.shape[2])
    if not all(x in (1, n) for x, n in zip(attention_mask.shape, shape)):
        raise ValueError(
            f"{FUNCTION}: attention_mask must broadcast to (batch, heads, queries, keys) = {shape}"
            f", got shape {tuple(attention_mask.shape)}"
        )
    return {"bias": attention_mask}


def _added(bias: Tensor | None, position_bias: Tensor) -> Tensor:
    if bias is None:
        return position_bias
    if bias.dtype == torch.bool:
        return position_bias.masked_fill(~bias, float("-inf"))
    return bias + position_bias


def _without_mask(
    seqlen_q: int, seqlen_k: int, causal: bool, sliding: int | None
) -> dict[str, Any]:
    """The options of a layer without a mask; a single query sees all keys, as in transformers."""
    if sliding and seqlen_k >= sliding and not (causal and seqlen_q == seqlen_k):
        raise ValueError(
            f"{FUNCTION}: attention_mask must say what sliding_window={sliding} means for "
            f"{seqlen_q} queries and {seqlen_k} keys, got None"
        )
    if not causal or seqlen_q == 1:
        return {}
    if seqlen_q != seqlen_k:
        raise ValueError(
            f"{FUNCTION}: attention_mask must say which of {seqlen_k} keys each of {seqlen_q} "
            "queries of a causal layer sees, got None"
        )
    return {"causal": True, "window": (sliding - 1, 0) if sliding else None}


def _inside_sequences(
    attention_mask: Mask | Tensor | None, causal: bool, sliding: int | None
) -> tuple[bool, tuple[int | None, int | None] | None]:
    """(causal, window) inside each of the packed sequences."""
    if isinstance(attention_mask, Mask):
        pattern = attention_mask.pattern or attention_mask.packed
    elif attention_mask is None and (causal or not sliding):
        pattern = Pattern(sliding - 1 if sliding else None, 0 if causal else None)
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


def _check_when_loaded(base: type) -> None:
    """Make models raise that are loaded with, or set to, "cupy_attention" and do not call it.

    Args:
        base: `transformers.PreTrainedModel`, whose methods are wrapped, once.
    """
    if getattr(base, "_cupyflash_checks", False):
        return
    adjust, assign = base._check_and_adjust_attn_implementation, base.set_attn_implementation

    @functools.wraps(adjust)
    def checked_adjust(self: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        _check_name(attn_implementation)
        if attn_implementation == NAME:
            _check_model(type(self), base)
        return adjust(self, attn_implementation, *others, **options)

    @functools.wraps(assign)
    def checked_assign(self: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        requests = list(_requests(self.config, attn_implementation))
        for _, requested in requests:
            _check_name(requested)
        configs = [id(config) for config, requested in requests if requested == NAME]
        for module in self.modules():
            everywhere = attn_implementation == NAME
            if isinstance(module, base) and (everywhere or id(module.config) in configs):
                _check_model(type(module), base)
        return assign(self, attn_implementation, *others, **options)

    base._check_and_adjust_attn_implementation = checked_adjust
    base.set_attn_implementation = checked_assign
    base._cupyflash_checks = True


def hands_attention_over(model: type, base: type) -> bool:
    """Whether a class of models calls the attention interface, or has no attention of its own.

    A class calls the interface if two things hold: the model says that it supports an attention
    other than eager, and its module names the interface and has no dictionary of attention layers.
    """
    supports = any(getattr(model, f"_supports_{name}", False) for name in SUPPORTED)
    with_attention = False
    for ancestor in model.__mro__:
        if issubclass(ancestor, base) and ancestor is not base:
            calls, computes = _attention_in(ancestor.__module__)
            if calls and supports:
                return True
            with_attention |= calls or computes
    return not with_attention


def _check_name(requested: Any) -> None:
    if requested == MISNOMER:
        raise ValueError(
            f'attn_implementation: the name is "{NAME}", since transformers takes every name with '
            f'"flash" in it for flash-attn, got "{MISNOMER}"'
        )


def _check_model(model: type, base: type) -> None:
    if hands_attention_over(model, base):
        return
    parts = f'{{"": "{NAME}", "vision_config": "eager"}}'
    raise ValueError(
        f"{model.__name__}: computes its attention itself and not through transformers' attention "
        'interface, allowed is attn_implementation="eager" (or "sdpa", where the model has it), '
        f'for this part alone with a dict such as {parts}, got "{NAME}"'
    )


@functools.cache
def _attention_in(module_name: str) -> tuple[bool, bool]:
    """Whether a module uses the attention interface, and whether it defines attention layers."""
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return False, False  # typed in by the user: the classes it inherits from decide
    calls = INTERFACE in source and not ATTENTION_CLASSES.search(source)
    return calls, ATTENTION_CLASS.search(source) is not None


def _requests(config: Any, requested: Any) -> Iterator[tuple[Any, Any]]:
    """(configuration, implementation) of a model and its parts, for a request by name or dict."""
    own = requested.get("") if isinstance(requested, dict) else requested
    yield config, own
    for key in config.sub_configs:
        part = getattr(config, key, None)
        wanted = requested.get(key) if isinstance(requested, dict) else requested
        if part is not None and wanted is not None:
            yield from _requests(part, wanted)
