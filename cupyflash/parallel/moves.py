"""The moves of a checked call: heads, keys, or both; `attention` says what they are."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from ..ops.attention.options import Extras
from ..ops.attention.score_text import Text
from ..ops.attention.score_text.capture import SEQUENCE
from ..ops.attention.score_text.tiles import FoundTiles
from ..runtime.philox import seed_array
from .checks import LIBRARY, Call
from .copied import MOST_BYTES, CopiedKeys
from .copied_heads import CopiedHeads
from .exchange import calls, exchange
from .gathered import GatheredKeys
from .heads import Heads, Whole, join_heads, numbered, split_heads, whole_sequences
from .over_keys import AttentionOverKeys, Keys
from .peers import peers_of
from .pieces import FUNCTION, DeviceCall
from .routes import routes
from .shard import Shard
from .texts import CallText, with_alibi
from .tokens import Tokens
from .transport import Team

logger = logging.getLogger("cupyflash")


def moved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    call: Call,
    extras: Extras,
    read: tuple[tuple, FoundTiles | None],
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a checked call; None for an LSE that nobody needs.

    Args:
        read: what the text of the call reads, and tiles of its mask (`text_of`).
    """
    captures, found = read
    across, along = {
        "heads": (shard.teams[0], Team()),
        "keys": (Team(), shard.teams[0]),
    }.get(call.move, (shard.teams[0], shard.teams[-1]))
    heads = _heads(shard, across, q.device) if across.size > 1 else None
    own = own_lengths(shard, across, along)
    first_head = across.rank * (q.shape[1] // across.size)
    of_call, options, slopes = call.text, call.options, extras.alibi_slopes
    if own is None:
        if slopes is not None and call.band.right != 0:
            of_call, captures = with_alibi(of_call, captures, slopes, options["softcap"])
            extras, options = extras._replace(alibi_slopes=None), options | {"softcap": 0.0}
        seed = seed_array(FUNCTION, LIBRARY, q, extras.dropout_seed, options["dropout_p"])
        extras = extras._replace(dropout_seed=seed)
        if seed is not None:
            of_call = (of_call or Text("", "", ()))._replace(drops=True)
    text = None
    if of_call is not None:
        names = _names(call, across, own is not None)
        text = CallText(of_call, captures, names, first_head, call.heads[0], found)
    if heads is not None:
        q, k, v = split_heads(heads, q, k, v)
        mine = slice(first_head, first_head + q.shape[1])
        slopes, sinks = (
            None if x is None else x[..., mine] for x in (extras.alibi_slopes, extras.sinks)
        )
        extras = extras._replace(alibi_slopes=slopes, sinks=sinks)
    if own is not None:
        out, lse = _whole(q, k, v, shard, own, across, call, extras, text, need_lse)
    else:
        keys = _keys(shard, across.size, along, call, k, v)
        group = keys.way.heads_at_once(k, v)
        options = {name: x for name, x in options.items() if name not in ("causal", "window")}
        arrays = (q, k, v, extras._replace(sinks=None), extras.sinks)
        text = text and text._replace(captures=())
        out, lse = AttentionOverKeys.apply(*arrays, keys, options, group, text, *captures)
    if heads is not None:
        out = join_heads(heads, out)
        lse = join_heads(heads, lse.t()).t() if need_lse else None
    return out, lse


def own_lengths(shard: Shard, across: Team, along: Team) -> tuple[int, ...] | None:
    """The lengths of all sequences, 0 for those of other teams, if a team has all of a sequence.

    Else it is None, and keys travel.

    Args:
        across, along: the teams between which heads and keys travel.
    """
    if along.size == 1:
        return shard.lengths

    def make() -> tuple[int, ...] | None:
        tokens = _of_teams(shard, across.size)
        return tuple(tokens.sizes[:, along.rank].tolist()) if tokens.apart else None

    return kept(shard, ("own", across.size), make)


def _names(call: Call, across: Team, are_whole: bool) -> frozenset[str]:
    """The variables of a text that the calls of a move count from elsewhere.

    Args:
        across: the team between whose ranks heads travel.
        are_whole: the calls have whole sequences, so that no keys travel.
    """
    if are_whole:
        moved = {"head": across.size > 1, "batch": _counted(call, across)}
    else:  # the keys of a piece begin at 0 where nothing limits them
        moved = {"head": True, "batch": True, "query": True, "key": call.band.left is not None}
    return frozenset(name for name, is_moved in moved.items() if is_moved)


def _counted(call: Call, team: Team) -> bool:
    """Whether lengths must be `numbered`."""
    return bool(call.options["dropout_p"]) and team.size > 1


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    own: tuple[int, ...],
    team: Team,
    call: Call,
    extras: Extras,
    text: CallText | None,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of whole sequences, with the heads that this rank of a team has.

    Args:
        own: the lengths of all sequences, 0 for those of other teams.
    """
    slopes, counted = extras.alibi_slopes, _counted(call, team)
    of_sequences = slopes is not None and slopes.dim() == 2
    if counted and of_sequences:
        extras = extras._replace(alibi_slopes=slopes.repeat_interleave(team.size, 0))
    numbers_count = of_sequences or text is not None or bool(call.options["dropout_p"])
    whole = whole_of(shard, own, team if counted else Team(), q.device, numbers_count)
    of_call = None
    if text is not None:
        make = functools.partial(_sequences, whole.count, team.size)
        pieces = shard.on(q.device, ("sequences", whole.count), make) if counted else None
        of_call = text.of(pieces, None if own is shard.lengths else whole)
    plain = whole.plain(call.options)
    return whole_sequences(q, k, v, whole, plain, extras, of_call, need_lse)


def whole_of(
    shard: Shard, own: tuple[int, ...], team: Team, device: torch.device, numbers_count: bool
) -> Whole:
    """The sequences of a call.

    Args:
        own: the lengths of all sequences, 0 for those of other teams.
        team: of several ranks if their lengths must be `numbered`.
        numbers_count: a sequence must have its number among all; else those of other teams are left
            out.
    """
    whole = own is shard.lengths

    def make() -> Whole:
        lengths = own if whole or numbers_count else tuple(filter(None, own))
        lengths = numbered(lengths, team) if team.size > 1 else lengths
        name = "cu_seqlens", team.size, whole, numbers_count
        ends = shard.on(device, name, functools.partial(_ends, lengths))
        return Whole(len(lengths), max(lengths, default=0), ends)

    return kept(shard, ("whole", team.size, whole, numbers_count, device), make)


def _heads(shard: Shard, team: Team, device: torch.device) -> Heads | CopiedHeads:
    """The way between tokens and heads in the team of this rank."""
    first = shard.rank - team.rank

    def make() -> Heads | CopiedHeads:
        ranks, peers = range(first, first + team.size), peers_of(team, device)
        if peers is None:
            indices = [shard.tokens.index(rank) for rank in ranks]
            return Heads.of(team, shard.failures, indices, device)
        whole = shard.tokens.teams(team.size).runs(first // team.size)
        runs = [shard.tokens.runs(rank) for rank in ranks]
        return CopiedHeads(team, shard.failures, peers, whole, runs)

    return kept(shard, ("heads", team.size, device), make)


def _keys(shard: Shard, size: int, team: Team, call: Call, k: Tensor, v: Tensor) -> Keys:
    """The calls of this rank, and the way of the keys between teams of ``size`` ranks."""
    tokens, device = _of_teams(shard, size), k.device
    key = size, call.band, device

    def copied() -> CopiedKeys | None:
        peers = peers_of(team, device)
        rows = [int(x.cu_seqlens_k[-1]) for x in mine]
        return peers and CopiedKeys(team, shard.failures, peers, routes(tokens, call.band), rows)

    def gathered() -> GatheredKeys:
        plan = exchange(tokens, team.rank, call.band)
        logger.debug("%s: %s of %s, %s", FUNCTION, call.move, shard, plan.kind)
        return GatheredKeys.of(team, shard.failures, plan, [x.keys for x in mine], device)

    mine = kept(shard, ("calls", *key), lambda: calls(tokens, team.rank, call.band))
    way = kept(shard, ("copied", *key), copied)
    if way is None or way.size(k, v) > MOST_BYTES:
        way = kept(shard, ("gathered", *key), gathered)
    made = kept(shard, ("device", *key), lambda: [DeviceCall.of(x, device) for x in mine])
    return Keys(made, way)


def _of_teams(shard: Shard, size: int) -> Tokens:
    """The tokens of teams of ``size`` ranks."""
    return kept(shard, ("teams", size), lambda: shard.tokens.teams(size))


def kept(shard: Shard, key: tuple, make: Callable[[], Any]) -> Any:
    if key not in shard.kept:
        shard.kept[key] = make()
    return shard.kept[key]


def _ends(lengths: tuple[int, ...]) -> numpy.ndarray:
    """int32 (sequences + 1,), where the sequences begin, and the end of the last."""
    return numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int32)


def _sequences(count: int, size: int) -> numpy.ndarray:
    """The pieces of `numbered` lengths, of which ``size`` stand for a sequence."""
    pieces = numpy.zeros((3, count), numpy.int32)
    pieces[SEQUENCE] = numpy.arange(count) // size
    return pieces
