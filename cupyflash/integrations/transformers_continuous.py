"""transformers' continuous batching (``generate_batch``, ``transformers serve``) for this package.

Continuous batching takes implementations with "flash" in their names only, and for its block tables
those that its import of flash-attn's functions knows. A model on "cupy_attention" switches to
`CONTINUOUS` when a manager of continuous batching takes it, and back when that stops or fails.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops.decode.cached_attention import attention_with_cache
from .transformers_mask import FUNCTION
from .transformers_models import CONTINUOUS, NAME

Attention = Callable[..., tuple[Tensor, None]]
# Arguments of `attention` that change its result, and that steps with a block table do not heed.
UNPAGED = ("position_bias", "indices", "block_indices", "sinks")


def register(attention: Attention) -> None:
    """Adds `CONTINUOUS` to transformers, where it has continuous batching by such names.

    Args:
        attention: that of "cupy_attention", which computes the steps without a block table.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers import modeling_flash_attention_utils as flash
        from transformers.generation.continuous_batching import continuous_api
        from transformers.masking_utils import flash_attention_mask

        manager, mixin = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousMixin
        create, manage = manager.__init__, mixin.continuous_batching_context_manager
        switch, imports = manager.switch_to_cb_friendly_attn, flash._lazy_imports
    except (ImportError, AttributeError):  # an older version, whose manager refuses the name
        return
    if getattr(manager, "_cupyflash_switches", False):
        return

    @functools.wraps(switch)
    def switched(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        if model.config._attn_implementation != NAME:
            return switch(self, model, *arguments, **options)
        model.set_attn_implementation(CONTINUOUS)
        self._original_attn_impl = NAME
        return None

    @functools.wraps(imports)
    def imported(implementation: str | None, *arguments: Any, **options: Any) -> tuple:
        if implementation != CONTINUOUS:
            return imports(implementation, *arguments, **options)
        return _functions()

    @functools.wraps(create)
    def created(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        with _switched_back(model):
            create(self, model, *arguments, **options)

    @functools.wraps(manage)
    @contextlib.contextmanager
    def managed(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        with _switched_back(self), manage(self, *arguments, **options) as found:
            yield found

    manager.switch_to_cb_friendly_attn, manager._cupyflash_switches = switched, True
    manager.__init__, mixin.continuous_batching_context_manager = created, managed
    if hasattr(manager, "_create_batch_processor"):
        manager._create_batch_processor = _filled(manager._create_batch_processor)
    flash._lazy_imports = imported
    AttentionInterface.register(CONTINUOUS, functools.partial(continuous_attention, attention))
    AttentionMaskInterface.register(CONTINUOUS, flash_attention_mask)


@contextlib.contextmanager
def _switched_back(model: Any) -> Iterator[None]:
    """Context in which an error puts a model back on "cupy_attention".

    A manager that could not be made, or could not warm up, is never stopped.
    """
    before = model.config._attn_implementation
    try:
        yield
    except BaseException:
        if (before, model.config._attn_implementation) == (NAME, CONTINUOUS):
            model.set_attn_implementation(NAME)
        raise


def _filled(create: Callable[..., Any]) -> Callable[..., Any]:
    """The `_create_batch_processor` of a manager, with its buffers filled when it returns.

    transformers (5.17 to 5.24) fills them on the current stream, for which its own streams do not
    wait: on a GPU that many processes share, the first step can come first.
    """

    @functools.wraps(create)
    def created(self: Any, *arguments: Any, **options: Any) -> Any:
        found = create(self, *arguments, **options)
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()
        return found

    return created


def _functions() -> tuple[Callable, ...]:
    """What transformers imports of flash-attn; it asks for a function that takes block tables."""
    import cupyflash

    return (
        cupyflash.flash_attn_func,
        cupyflash.flash_attn_varlen_func,
        cupyflash.flash_attn_with_kvcache,
        cupyflash.pad_input,
        cupyflash.unpad_input,
    )


def continuous_attention(
    attention: Attention,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a step of continuous batching; tensors as those of `attention`.

    Args:
        query, key, value: packed sequences; with a block table a token of each. Keys and values
            are the new ones alone where ``options`` has the cache, as before transformers 5.24.
        block_table: int32 (batch, max_pages), the pages of ``k_cache`` and ``v_cache``, (num_pages,
            page_size, heads, head_dim), that the sequences have.
        options: as for `attention`; ``cu_seq_lens_k`` counts the new tokens.

    Raises:
        NotImplementedError: a call from elsewhere than continuous batching; dropout and `UNPAGED`
            with a block table; and as `cupyflash.attention_with_cache`.
    """
    if (cache := options.pop("cache", None)) is not None:
        *pages, key, value = _of_cache(cache, module, key, value, block_table, options)
        k_cache, v_cache, block_table = pages
    elif block_table is None and options.get("read_index") is None:
        fact = f'"{CONTINUOUS}" is for continuous batching alone, which a model on "{NAME}"'
        raise NotImplementedError(f"{FUNCTION}: {fact} switches to by itself, got another call")
    if block_table is None:
        return attention(module, query, key, value, attention_mask, **options)
    if options.get("dropout"):
        fact = "dropout must be 0 with a block table"
        raise NotImplementedError(f"{FUNCTION}: {fact}, got {options['dropout']}")
    if given := [name for name in UNPAGED if options.get(name) is not None]:
        fact = f"{', '.join(UNPAGED)} must be None with a block table"
        allowed = 'allowed is attn_implementation="eager"'
        raise NotImplementedError(f"{FUNCTION}: {fact}, {allowed}, got {', '.join(given)}")
    q, k, v = (
        x.transpose(1, 2).reshape(-1, 1, x.shape[1], x.shape[3]) for x in (query, key, value)
    )
    count, ends, sliding = len(q), options["cu_seq_lens_k"], options.get("sliding_window")
    before = (ends[1 : count + 1] - ends[:count] - 1).int()
    sinks = options.get("s_aux")
    out = attention_with_cache(
        q,
        k,
        v,
        k_cache,
        v_cache,
        before,
        page_table=block_table,
        scale=options.get("scaling"),
        softcap=options.get("softcap") or 0.0,
        window=(sliding - 1, 0) if sliding else None,
        sinks=None if sinks is None else sinks.detach(),
    )
    return out.view(query.shape[0], -1, *out.shape[2:]), None


def _of_cache(
    cache: Any,
    module: torch.nn.Module,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """(k_cache, v_cache, block_table, key, value) of a layer, from a `PagedAttentionCache`.

    Without a block table the new tokens enter the cache here, and key and value are all that the
    queries see. ``options`` get the lengths of this kind of layer, by the names of `attention`.
    """
    if "max_length_q" in options:  # from 5.19 on the cache knows the kind of a layer itself
        options["block_table"] = block_table
        key, value = cache.update(key, value, module.layer_idx, kwargs=options)
        pages = (options.pop(name, None) for name in ("k_cache", "v_cache", "block_table"))
        return *pages, key, value
    kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    for x in "qk":
        options[f"max_length_{x}"] = options.pop(f"max_seqlen_{x}")
    for name in ("cu_seq_lens_k", "max_length_k"):
        if isinstance(options[name], dict):
            options[name] = options[name][kind]
    if block_table is not None and hasattr(cache, "get_cache_for_block_table"):  # 5.18
        group, *pages = cache.get_cache_for_block_table(module.layer_idx)
        return *pages, block_table[group], key, value
    if block_table is not None:
        group, layer = cache.layer_index_to_group_indices[module.layer_idx]
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        pages = (x[layer].view(shape) for x in (cache.key_cache, cache.value_cache))
        return *pages, block_table[group], key, value
    where = {name: options.pop(name) for name in ("read_index", "write_index")}
    whole = cache.update(key, value, module.layer_idx, **where)
    return None, None, None, *(x.transpose(0, 1)[None] for x in whole)


def command(arguments: list[str]) -> None:
    """transformers' own command line, with "cupy_attention" as its implementation of attention.

    Args:
        arguments: those of the command, the first the name of the program; changed in place.
    """
    from transformers.cli import transformers as cli
    from transformers.cli.serving.model_manager import ModelManager

    validate = ModelManager._validate_args

    @functools.wraps(validate)
    def validated(self: Any) -> None:
        """Checks the options without our name, because transformers knows only its own."""
        name = self.attn_implementation
        self.attn_implementation = None if name == NAME else name
        validate(self)
        self.attn_implementation = name

    ModelManager._validate_args = validated
    serves = "serve" in arguments[1:2]
    if serves and not any(x.startswith("--attn-implementation") for x in arguments):
        arguments += ["--attn-implementation", NAME]
    cli.main()
