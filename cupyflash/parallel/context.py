"""The shard of attention functions that cannot be handed one: torch's own, and those of models."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .attention import attention
from .shard import Shard


class Context(NamedTuple):
    """What `context` was given: a shard, and the move of `attention`."""

    shard: Shard
    move: str


SDPA = torch.nn.functional.scaled_dot_product_attention
# The list is no context variable, because backward passes run in other threads.
_contexts: list[Context] = []
_seen = False


@contextlib.contextmanager
def context(shard: Shard, *, move: str = "auto") -> Iterator[None]:
    """A block in which attention functions of torch and of models attend over a shard.

    These are `torch.nn.functional.scaled_dot_product_attention` and, with transformers,
    "cupy_attention". Their tensors have the tokens of this rank, and each row of a batch is divided
    as the shard says. Run the backward pass in the block, too: a checkpoint computes the forward of
    a layer again there, and where it does so outside of the block, it raises.

    Args:
        shard: the division of the tokens of each row.
        move: as in `attention`.

    Raises:
        RuntimeError: a checkpoint computes attention again outside of the block.
        Within the block, attention functions raise as `attention` does.
    """
    global _seen
    _seen = True
    _contexts.append(Context(shard, move))
    functional = torch.nn.functional
    replaced = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        with _ReplacedSDPA():
            yield
    finally:
        functional.scaled_dot_product_attention = replaced
        _contexts.pop()


def current(function: str) -> Context | None:
    """The innermost context, or None.

    Raises:
        RuntimeError: a checkpoint computes a forward again outside of all contexts.
    """
    if _contexts:
        return _contexts[-1]
    if _seen and torch._C._current_graph_task_id() != -1:
        fact = "a checkpoint computes attention again outside of cupyflash.parallel.context"
        raise RuntimeError(f"{function}: {fact}; call backward in the block, too")
    return None


def attention_of_rows(
    function: str, given: Context, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """`attention` of (batch, heads, tokens of this rank, head_dim), each row by itself.

    Returns:
        out (batch, tokens of this rank, heads, head_dim of v).

    Raises:
        ValueError: tensors that are not of the tokens of this rank.
        As `attention`.
    """
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.dim() != 4 or x.shape[2] != len(given.shard):
            fact = f"{name} must be (batch, heads, tokens of this rank = {len(given.shard)}, head_"
            fact += "dim) in parallel.context, without the keys of a cache or of other tokens"
            raise ValueError(f"{function}: {fact}, got {tuple(x.shape)}")
    rows, tokens = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention(q, k, v, given.shard.of_rows(rows), move=given.move, **options)
    return out.unflatten(0, (rows, tokens))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of this name, of (batch, heads, tokens of this rank, head_dim)."""
    function = "parallel.context, scaled_dot_product_attention"
    if attn_mask is not None:
        fact = "attn_mask must be None, as a mask of the tokens of one rank says nothing of others"
        raise NotImplementedError(f"{function}: {fact}, got {tuple(attn_mask.shape)}")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        fact = "query and key must have the same heads without enable_gqa"
        raise ValueError(f"{function}: {fact}, got {query.shape[1]} and {key.shape[1]}")
    options = {"causal": is_causal, "scale": scale, "dropout_p": dropout_p}
    out = attention_of_rows(function, _contexts[-1], query, key, value, **options)
    return out.transpose(1, 2)


class _ReplacedSDPA(TorchFunctionMode):
    """Calls of torch's function by a name of the caller's own come here.

    torch takes such modes out of backward passes, where calls by torch's name still come here.
    """

    def __torch_function__(
        self, function: Callable, types: Any, arguments: tuple = (), options: dict | None = None
    ) -> Any:
        if function is SDPA:
            function = scaled_dot_product_attention
        return function(*arguments, **(options or {}))
