"""Calls over a shard whose sequences lie on one rank each: nothing travels, and no rank waits.

The first call of some options and shapes goes the way of all calls, on which ranks compare what
they call. Those like it that follow on a GPU are calls of one GPU, which take as much of the host.
"""

from typing import Any

from torch import Tensor

from .. import environment
from ..ops.attention.options import Extras
from .checks import Call
from .heads import Whole, whole_sequences
from .moves import own_lengths, whole_of
from .shard import Shard
from .transport import Team

Prepared = tuple[Whole, tuple]  # the sequences of a call, and its plain options


def keep(
    shard: Shard, call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras, move: str
) -> None:
    """Prepares calls like a checked one, if it needs nothing but its sequences and options."""
    travels = call.move != "keys" or len(shard.teams) > 1 or not shard.tokens.apart
    alone = extras.alibi_slopes is call.text is None and not call.options["dropout_p"]
    if travels or not alone:
        return
    team = Team()
    own = own_lengths(shard, team, shard.teams[0])
    whole = whole_of(shard, own, team, q.device, numbers_count=False)
    shard.kept[_key(q, k, v, move, call.options)] = whole, whole.plain(call.options)


def prepared(
    q: Any, k: Any, v: Any, shard: Shard, options: dict[str, Any], move: Any
) -> Prepared | None:
    """The sequences and options that `keep` has prepared for calls like this one, if it has."""
    if not type(q) is type(k) is type(v) is Tensor or environment.current().debug:
        return None
    try:
        return shard.kept.get(_key(q, k, v, move, options))
    except TypeError:  # an option that is not hashable
        return None


def _key(q: Tensor, k: Tensor, v: Tensor, move: Any, options: dict[str, Any]) -> tuple:
    """The key of a call; plans have dtypes and strides in theirs, and refuse wrong ones."""
    return "apart", q.shape, k.shape, v.shape, q.device, move, *options.values()


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, known: Prepared, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a prepared call. No rank waits for it, and so none hears of an error."""
    return whole_sequences(q, k, v, *known, Extras(sinks=sinks), None, need_lse)
