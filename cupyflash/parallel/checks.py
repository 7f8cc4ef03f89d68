"""The checks of a call of `parallel.attention`, and the way that it takes; nothing is sent here."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.attention.checks import check
from ..ops.attention.options import Extras, Options
from ..ops.attention.score_text import Text
from ..ops.attention.score_text.checks import check_text
from ..runtime.checks import short
from ..runtime.lookup import library_of
from ..runtime.philox import is_number, require_seed_array, seed_array
from . import choice
from .exchange import share
from .pieces import FUNCTION
from .shard import Shard
from .texts import views_of
from .tokens import Band

LIBRARY = library_of(torch.empty(0))

# Arguments of `cupyflash.attention` that are not built here, and what says the same.
NOT_BUILT = {
    "bias": "a bias spans all tokens, and packed sequences have none: write score + bias[batch, "
    "head, query, key] as score=, allowed is None",
    "seqused_q": "the lengths of the shard say which tokens count: write query < seqused_q[batch] "
    "as mask=, allowed is None",
    "seqused_k": "the lengths of the shard say which tokens count: write key < seqused_k[batch] as "
    "mask=, allowed is None",
    "layout": "q, k and v are (tokens, heads, head_dim): allowed is no layout",
}


class Call(NamedTuple):
    """The facts of a call that must be the same on all ranks.

    Attributes:
        options: of `plain_options`, without layout and lengths.
        band: the keys that a query sees.
        move: "heads", "keys" or "heads x keys".
        heads: of q and of k.
        dims: of q and k, and of v.
        dtype: of q, k and v.
        text: of the score and the mask.
        extras: the seed, or whether there is none; the shapes and dtypes of the optional arrays
            and of what the text reads.
        sequences: of the shard.
        gradient: whether a backward pass may follow.
    """

    options: dict[str, Any]
    band: Band
    move: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    text: Text | None
    extras: list[Any]
    sequences: int
    gradient: bool


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    options: Options,
    extras: Extras,
    move: str,
    captures: tuple = (),
) -> Call:
    """The facts of a call.

    Args:
        captures: what the text of the options reads.

    Raises:
        TypeError, ValueError, NotImplementedError: as `parallel.attention` says.
    """
    given = {"q": q, "k": k, "v": v, **extras._asdict()}
    seed = given.pop("dropout_seed")
    given = {name: x for name, x in given.items() if x is not None or name in "qkv"}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{FUNCTION}: {name} must be a torch tensor, got {short(x)}")
        if name in "qkv" and (x.dim() != 3 or len(x) != len(shard)):
            fact = f"{name} must be (tokens of the rank, heads, head_dim), here with {len(shard)}"
            raise ValueError(f"{FUNCTION}: {fact} tokens, got {tuple(x.shape)}")
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad:
        fact = "alibi_slopes have no gradient (use alibi_slopes.detach())"
        raise NotImplementedError(f"{FUNCTION}: {fact}, got some that require one")
    if slopes is not None and slopes.dim() == 2:
        if len(slopes) != len(shard.lengths):
            fact = f"alibi_slopes must be (heads,) or ({len(shard.lengths)} sequences, heads)"
            raise ValueError(f"{FUNCTION}: {fact}, got {tuple(slopes.shape)}")
        given["alibi_slopes"] = slopes[0] if len(slopes) else slopes.new_empty(slopes.shape[1])
    views = {name: LIBRARY.view(x[None] if name in "qkv" else x) for name, x in given.items()}
    tensors = {name: views.pop(name) for name in "qkv"}
    check(FUNCTION, tensors, options._replace(text=None), views)
    if options.text is not None:
        longest = max(shard.lengths, default=0)
        places = {"batch": len(shard.lengths), "head": q.shape[1], "query": longest, "key": longest}
        read = views_of(options.text, captures, LIBRARY)
        check_text(FUNCTION, options, views, read, tensors["q"], places)
    if is_number(seed):
        seed_array(FUNCTION, LIBRARY, torch.empty(0), seed, options.dropout_p)
    elif seed is not None:
        require_seed_array(FUNCTION, LIBRARY, q, seed)
    band = _band(options)
    heads, dims = (q.shape[1], k.shape[1]), (q.shape[2], v.shape[2])
    read = [x for x in captures if isinstance(x, Tensor)]
    tensors = [x for x in (q, k, v, extras.sinks, *read) if x is not None]
    kept = options._asdict()
    del kept["layout"], kept["max_seqlens"], kept["text"]
    return Call(
        kept,
        band,
        _move(shard, move, heads, dims, q.element_size(), band, _costs_more(options, band, slopes)),
        heads,
        dims,
        q.dtype,
        options.text,
        [seed if is_number(seed) else seed is None]
        + [None if x is None else (tuple(x.shape), x.dtype) for x in (slopes, extras.sinks, *read)],
        len(shard.lengths),
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
    )


def refuse_not_built(arguments: dict[str, Any]) -> None:
    """Raises NotImplementedError for `NOT_BUILT`, and TypeError for what nobody knows."""
    for name, x in arguments.items():
        if name not in NOT_BUILT:
            raise TypeError(f"{FUNCTION}: got an unexpected keyword argument {name!r}")
        if x is not None:
            raise NotImplementedError(f"{FUNCTION}: {NOT_BUILT[name]}, got {name}={short(x)}")


def _band(options: Options) -> Band:
    """The keys that a query sees, without limits that no sequence reaches."""
    left, right = (None if x in (None, -1) else x for x in options.window or (None, None))
    # Dropout draws the numbers of 16 queries and 16 keys together.
    return Band(left, 0 if options.causal else right, 16 if options.dropout_p else 1)


def _move(
    shard: Shard,
    move: Any,
    heads: tuple[int, int],
    dims: tuple[int, int],
    item: int,
    band: Band,
    costs_more: bool,
) -> str:
    """The move that is made.

    Args:
        costs_more: an option takes heads, if nothing else is asked for.

    Raises:
        ValueError: another one than the shard has, or heads that the ranks cannot divide.
    """
    mesh = len(shard.teams) == 2
    allowed = ("auto", "heads x keys") if mesh else ("auto", "heads", "keys")
    if not isinstance(move, str) or move not in allowed:
        what = "a mesh of keys and heads" if mesh else "one group"
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"{FUNCTION}: move of {what} must be one of {names}, got {short(move)}")
    if move == "auto" and mesh:
        move = "heads x keys"
    elif move == "auto" and shard.tokens.apart:
        move = "keys"  # of which none travel
    elif move == "auto":
        everything = band.left is None and not shard.slack
        seen = 1.0 if everything else share(shard.tokens, band)
        move = choice.choose(shard.ranks, heads, dims, item, prefers_heads=costs_more, share=seen)
    ranks = {"heads": shard.ranks, "keys": 1}.get(move, shard.teams[0].size)
    if not choice.heads_divide(ranks, *heads):
        fact = f"heads of q must be a multiple of the {ranks} ranks that divide them, and those of "
        fact += "k a multiple or a divisor"
        raise ValueError(f"{FUNCTION}: {fact}, got {heads[0]} and {heads[1]}")
    return move


def _costs_more(options: Options, band: Band, slopes: Tensor | None) -> bool:
    """Whether an option has kernels of its own where keys travel, which are slower."""
    return bool(options.dropout_p) or (slopes is not None and band.right != 0)
