"""cupyflash as an attention implementation of Hugging Face Transformers.

`register` once, then ``attn_implementation="cupy_attention"`` in ``from_pretrained`` or
``model.set_attn_implementation("cupy_attention")``. Models that this would change raise when they
are loaded (transformers_models.py). ``python -m cupyflash.integrations.transformers serve MODEL``
is ``transformers serve MODEL`` on it.
"""

import contextlib
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from ..ops.attention.operations import FORWARD
from ..ops.attention.options import Extras, plain_options
from ..parallel.context import attention_of_rows, current
from . import transformers_continuous, transformers_mask
from .transformers_mask import FUNCTION, Mask, mask
from .transformers_models import NAME, check_when_loaded
from .transformers_pattern import Pattern, answer_for_packing

NEEDED = "needs transformers 5.4 or newer"
PIP_LINE = "pip install 'transformers>=5.4'"
# transformers.utils.output_capturing, once `register` has found it; older versions have none.
capturing: Any = None

# `others` of `attention`: the window, and arguments that do not change the result of a layer.
OTHERS = {"sliding_window", "output_attentions", "position_ids"}


def register() -> None:
    """Add "cupy_attention" to the attention functions and to the mask functions of transformers.

    A model on it runs with continuous batching too (`transformers_continuous`).

    Raises:
        ImportError: no transformers, or one without these interfaces.
    """
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers import masking_utils as masks
    except ImportError as error:
        raise ImportError(f"{FUNCTION}.register: {NEEDED}, got: {error}; {PIP_LINE}") from error
    if "q_length" not in inspect.signature(masks.sdpa_mask).parameters:
        got = transformers.__version__
        raise ImportError(f"{FUNCTION}.register: {NEEDED}, got {got}; {PIP_LINE}")
    global capturing
    with contextlib.suppress(ImportError):
        from transformers.utils import output_capturing as capturing
    check_when_loaded(PreTrainedModel, OTHERS | inspect.signature(attention).parameters.keys())
    transformers_mask.masks = masks
    answer_for_packing(masks)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    transformers_continuous.register(attention)


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
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    cache: Any = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`cupyflash.attention` of (batch, heads, seqlen, head_dim); the result has axes 1, 2 swapped.

    Args:
        attention_mask: the return value of `transformers_mask.mask`, or a bool or additive mask of
            rank 4: either says all that is masked. None: `is_causal` alone says it.
        is_causal: whether a layer without a mask is causal; default ``module.is_causal``.
        s_aux: attention sinks, (heads,).
        position_bias: added to the scores, as in T5.
        cu_seq_lens_q, cu_seq_lens_k: sequences packed along axis 2, each with the pattern of the
            mask, or with ``is_causal`` and ``sliding_window`` where there is no mask.
        indices: (batch, seqlen_q, n), the only keys that a query sees, of those that are not
            masked: what the indexer of DeepSeek Sparse Attention has selected.
        block_indices, sinks: blocks of keys that each group of heads has selected, and a sink for
            each query; refused.
        cache: a paged cache, which is refused; transformers hands no other kind down to here.
        deterministic: that of `cupyflash.attention`; None leaves it to torch's switch.
        others: ``sliding_window``, the number of keys that a query sees, itself included, and
            the rest of `OTHERS`. Models that hand over anything else raise when they are loaded.

    In `cupyflash.parallel.context` the tensors have the tokens of this rank, and the pattern of the
    mask holds in each sequence of the shard; masks of other tokens are refused.

    Raises:
        NotImplementedError: ``output_attentions``, a paged cache, a ``block_table``,
            ``block_indices``, ``sinks``, ``indices`` with an additive mask; packed sequences with
            ``indices``, a ``position_bias``, padding, or a mask that is neither causal nor sliding;
            and as `cupyflash.attention`.
        TypeError, ValueError: one of the ``cu_seq_lens`` without the other, a mask of another rank,
            a causal layer without a mask that has more or fewer keys than queries, no mask and no
            word of ``is_causal``, and as `cupyflash.attention`.
    """
    _refuse_weights(others)
    _refuse(cache, "paged caches (continuous batching)", "the dynamic and the static cache")
    _refuse(others.get("block_table"), "block tables", "managers that switch the model themselves")
    _refuse(block_indices, "block_indices (keys selected in blocks)", "indices of keys, and masks")
    _refuse(sinks, "sinks of each query", "s_aux, a sink for each head")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout}
    options["deterministic"] = False if deterministic is None else deterministic
    sliding = others.get("sliding_window")
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if (given := current(FUNCTION)) is not None:
        _refuse(indices, "indices of keys in parallel.context", "all keys of a layer")
        _refuse(position_bias, "position biases in parallel.context", "layers without one")
        _refuse(cu_seq_lens_q, "cu_seq_lens in parallel.context", "the lengths of its shard")
        causal, window = _inside_sequences(attention_mask, causal, sliding)
        options |= {"causal": causal, "window": window, "sinks": s_aux}
        return attention_of_rows(FUNCTION, given, query, key, value, **options), None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        _refuse(indices, "indices of keys in packed sequences", "sequences of one length")
        _refuse(position_bias, "position biases of packed sequences", "sequences of one length")
        options["causal"], options["window"] = _inside_sequences(attention_mask, causal, sliding)
        options["max_seqlens"] = max_length_q, max_length_k
        return _packed((query, key, value), (cu_seq_lens_q, cu_seq_lens_k), s_aux, options), None
    masked = _options(attention_mask, query, key, causal, sliding)
    if position_bias is not None:
        masked["bias"] = _added(masked.get("bias"), position_bias)
    if indices is not None:
        masked["bias"] = _selected(masked.get("bias"), indices, key.shape[2])
    causal, window = masked.pop("causal", False), masked.pop("window", None)
    options = plain_options(FUNCTION, causal=causal, window=window, **options)
    arrays, extras = (q, k, v), Extras(**masked, sinks=s_aux)
    if any(x is not None for x in extras):
        arrays = (*arrays, *extras)
    out, _ = FORWARD(FUNCTION, arrays, (options, False))
    return out, None


def _packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of sequences that are packed along axis 2; the result has axes 1, 2 swapped."""
    query, key, _ = tensors
    if any(x is None for x in cu_seqlens):
        missing = "cu_seq_lens_q" if cu_seqlens[0] is None else "cu_seq_lens_k"
        fact = "cu_seq_lens_q and cu_seq_lens_k must come together"
        raise TypeError(f"{FUNCTION}: {fact}, got no {missing}")
    if cu_seqlens[1] is cu_seqlens[0] and key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{FUNCTION}: cu_seq_lens_k must be those of the {key.shape[2]} keys, got those of "
            f"the {query.shape[2]} queries"
        )
    rows = (x.transpose(1, 2).flatten(0, 1) for x in tensors)
    extras = Extras(*(x.int() for x in cu_seqlens), sinks=sinks)
    plain = plain_options(FUNCTION, layout="thd", **options)
    out, _ = FORWARD(FUNCTION, (*rows, *extras), (plain, False))
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _refuse_weights(others: dict[str, Any]) -> None:
    if others.get("output_attentions") or _weights_are_captured():
        raise NotImplementedError(
            f"{FUNCTION}: output_attentions must be False, as no attention weights are in memory, "
            'allowed with them is attn_implementation="eager", got True'
        )


def _weights_are_captured() -> bool:
    """Whether the model, which may not hand `output_attentions` down, collects attention weights.

    torch.compile cannot trace the look-up.
    """
    collector = getattr(capturing, "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():
        return False
    return any(name.endswith("attentions") for name in collector.get() or ())


def _refuse(argument: Any, what: str, allowed: str) -> None:
    if argument is not None:
        raise NotImplementedError(
            f"{FUNCTION}: {what} are not built yet, allowed are {allowed}, got "
            f"{type(argument).__name__}"
        )


def _options(
    attention_mask: Mask | Tensor | None,
    query: Tensor,
    key: Tensor,
    causal: bool | None,
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


def _selected(bias: Tensor | None, indices: Tensor, seqlen_k: int) -> Tensor:
    """The mask, without the keys that a query has not selected."""
    if bias is not None and bias.dtype != torch.bool:
        # Before 5.12 these models add a Boolean mask to scores, and nobody sees the future masked.
        raise NotImplementedError(
            f"{FUNCTION}: attention_mask beside indices must be Boolean (transformers 5.12 or "
            f"newer), got {bias.dtype}"
        )
    selected = indices.new_zeros((*indices.shape[:2], seqlen_k), dtype=torch.bool)
    selected = selected.scatter(2, indices.long(), True)[:, None]
    return selected if bias is None else bias & selected


def _without_mask(
    seqlen_q: int, seqlen_k: int, causal: bool | None, sliding: int | None
) -> dict[str, Any]:
    """The options of a layer without a mask; a single query sees all keys, as in transformers."""
    if causal is None and seqlen_q > 1:  # eager attention sees all keys here, SDPA is causal
        raise ValueError(
            f"{FUNCTION}: attention_mask must say what a layer without is_causal sees, got None"
        )
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
    attention_mask: Mask | Tensor | None, causal: bool | None, sliding: int | None
) -> tuple[bool, tuple[int | None, int | None] | None]:
    """(causal, window) inside each of the packed sequences."""
    if isinstance(attention_mask, Mask):
        _refuse(attention_mask.keys, "padding masks of packed sequences", "sequences without it")
        _refuse(attention_mask.lengths, "lengths of packed sequences", "cu_seq_lens alone")
        pattern = attention_mask.pattern or attention_mask.packed
    elif attention_mask is None and causal is not None and (causal or not sliding):
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


if __name__ == "__main__":
    register()
    transformers_continuous.command(sys.argv)
