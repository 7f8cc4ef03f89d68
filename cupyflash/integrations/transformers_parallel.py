"""A layer of a model of transformers whose tokens are divided among the ranks of a shard."""

from typing import Any

from torch import Tensor

from .. import parallel
from ..parallel.context import Context
from .transformers_mask import FUNCTION


def attention(
    given: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    options: dict[str, Any],
) -> Tensor:
    """`parallel.attention` of (1, heads, tokens of this rank, head_dim), with axes 1, 2 swapped.

    Raises:
        ValueError: several rows, or keys of a cache.
        As `parallel.attention`.
    """
    if len(query) != 1 or key.shape[2] != query.shape[2]:
        fact = "q and k in parallel.context must be one row of the tokens of this rank, as packed"
        got = f"{tuple(query.shape)} and {tuple(key.shape)}"
        raise ValueError(f"{FUNCTION}: {fact} sequences are, without a cache, got {got}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    shard, move = given
    out = parallel.attention(q, k, v, shard, causal=causal, window=window, move=move, **options)
    return out[None]
