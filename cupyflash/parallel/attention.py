"""`attention` of packed sequences whose tokens are divided among the ranks of a `Shard`."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from .. import environment
from ..ops.attention.options import Extras, Options, plain_options
from ..runtime.array import compiling
from ..runtime.checks import plain_flag, short
from .agreement import ERRORS, agree
from .checks import Call, checked, refuse_not_built
from .copied import MOST_BYTES, CopiedKeys
from .copied_heads import CopiedHeads
from .exchange import calls, exchange
from .gathered import GatheredKeys
from .heads import Heads, join_heads, numbered, split_heads, whole_sequences
from .over_keys import AttentionOverKeys, Keys
from .peers import peers_of
from .pieces import FUNCTION, DeviceCall
from .routes import routes
from .shard import Shard
from .sharded import sharding_of
from .transport import Team

logger = logging.getLogger("cupyflash")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str = "ieee",
    move: str = "auto",
    **not_built: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cupyflash.attention` in each of the packed sequences of which the ranks hold the tokens.

    All ranks of the shard call it with the same options. Gradients flow as on one GPU: those of q,
    k and v belong to the tokens of this rank. The gradient of the sinks is the part that this rank
    has computed; the parts of all ranks add up to the whole, as those of weights do.

    On a CPU all ranks compare their calls before anything is sent. On a GPU, where that waits for
    it, they do so in the first call of a shard, and in every call with CUPYFLASH_DEBUG=1.

    Args:
        q: (tokens of this rank, heads_q, head_dim), float16, bfloat16 or float32, the tokens that
            ``shard.take`` takes, in that order. Or a DTensor of all tokens, in ``shard.order``,
            sharded along them; then so are k, v and the results.
        k: (tokens of this rank, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: like k; its head_dim may be another one.
        shard: the division of the sequences.
        causal, scale, window, softcap: as in `cupyflash.attention`; queries and keys are the same
            tokens, so that "top-left" and "bottom-right" mean the same.
        alibi_slopes: float32 (heads_q,) or (sequences, heads_q).
        sinks: (heads_q,), float32 or dtype of q, the same on all ranks.
        dropout_p, dropout_seed: as there, where only heads travel; an equal seed on all ranks drops
            what it drops on one. Without a seed each rank draws one for its heads.
        return_lse: return (out, lse); lse float32 (heads_q, tokens of this rank), differentiable.
        deterministic, precision: as in `cupyflash.attention`.
        move: "heads": an all-to-all before and after, and each head is computed as on one GPU, with
            the same bits where the kernels have the same plan. heads_q must be a multiple of the
            ranks, and heads_kv a multiple or a divisor. "keys": keys and values travel, a group of
            heads at a time. A shard of a mesh with two axes has both, "heads x keys". "auto" takes
            what leaves fewer bytes to wait for.
        not_built: ``bias``, ``seqused_q``, ``seqused_k`` and ``layout`` of `cupyflash.attention`.

    Returns:
        out (tokens of this rank, heads_q, head_dim of v).

    Raises:
        TypeError, ValueError, NotImplementedError: as `cupyflash.attention`, on all ranks, with the
            number of the rank whose call is wrong. ValueError: ranks with other options.
            NotImplementedError: ``not_built``; dropout, and ALiBi that is not causal, where keys
            travel.
        RankError: another rank has failed or left.
    """
    if not isinstance(shard, Shard):
        raise TypeError(f"{FUNCTION}: shard must be a Shard, got {short(shard)}")
    options = {
        "causal": causal, "scale": scale, "window": window, "softcap": softcap,
        "dropout_p": dropout_p, "deterministic": deterministic, "precision": precision,
    }  # fmt: skip
    extras = Extras(alibi_slopes=alibi_slopes, sinks=sinks, dropout_seed=dropout_seed)
    arguments = (q, k, v, shard, options, extras, return_lse, move, not_built)
    if compiling():
        from ..runtime.torch_graphs import eagerly  # which imports much that few need

        out, lse = eagerly(_call, *arguments)
    else:
        out, lse = _call(*arguments)
    return (out, lse) if return_lse else out


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    options: dict[str, Any],
    extras: Extras,
    return_lse: bool,
    move: str,
    not_built: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    call = error = sharding = None
    try:
        refuse_not_built(not_built)
        return_lse = plain_flag(FUNCTION, "return_lse", return_lse)
        plain = Options(*plain_options(FUNCTION, **options))
        sharding = sharding_of(shard, q, k, v)
        if sharding is not None:
            q, k, v = (x.to_local() for x in (q, k, v))
        q, k, v, extras = _autocast(q, k, v, extras)
        call = _checked(q, k, v, shard, plain, extras, move)
    except ERRORS as raised:
        error = raised
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in (q, k, v))
    if not (on_gpu and shard.agreed) or environment.current().debug:
        agree(FUNCTION, shard.teams, shard.failures, f"{call}, return_lse={return_lse}", error)
        shard.agreed = True
    elif error is not None:
        with shard.failures.reported(FUNCTION):
            raise error
    out, lse = _moved(q, k, v, shard, call, extras, return_lse)
    if sharding is None:
        return out, lse
    return sharding.result(out, 0), sharding.result(lse if return_lse else None, 1)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, shard: Shard, options: Options, extras: Extras, move: str
) -> Call:
    """`checked`, once for calls that are alike."""
    tensors = (q, k, v, *extras)
    if not all(x is None or isinstance(x, Tensor) for x in tensors) or not isinstance(move, str):
        return checked(q, k, v, shard, options, extras, move)
    facts = (
        x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
        for x in tensors
    )
    key = "checked", options, move, torch.is_grad_enabled(), *facts
    return _kept(shard, key, lambda: checked(q, k, v, shard, options, extras, move))


def _moved(
    q: Tensor, k: Tensor, v: Tensor, shard: Shard, call: Call, extras: Extras, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a checked call; None for an LSE that nobody needs."""
    across, along = {
        "heads": (shard.teams[0], Team()),
        "keys": (Team(), shard.teams[0]),
    }.get(call.move, (shard.teams[0], shard.teams[-1]))
    heads = _heads(shard, across, q.device) if across.size > 1 else None
    if heads is not None:
        q, k, v = split_heads(heads, q, k, v)
        mine = slice(across.rank * q.shape[1], (across.rank + 1) * q.shape[1])
        slopes, sinks = (
            None if x is None else x[..., mine] for x in (extras.alibi_slopes, extras.sinks)
        )
        extras = extras._replace(alibi_slopes=slopes, sinks=sinks)
    if along.size == 1:
        lengths, slopes = shard.lengths, extras.alibi_slopes
        if call.options["dropout_p"] and across.size > 1:
            lengths = numbered(lengths, across)
            if slopes is not None and slopes.dim() == 2:
                extras = extras._replace(alibi_slopes=slopes.repeat_interleave(across.size, 0))
        make = functools.partial(_ends, lengths)
        ends = shard.on(q.device, ("cu_seqlens", len(lengths)), make)
        out, lse = whole_sequences(q, k, v, lengths, ends, call.options, extras)
    else:
        keys = _keys(shard, across.size, along, call, k, v)
        group = keys.way.heads_at_once(k, v)
        options = {x: call.options[x] for x in ("scale", "softcap", "deterministic", "precision")}
        arrays = (q, k, v, extras.alibi_slopes, extras.sinks)
        out, lse = AttentionOverKeys.apply(*arrays, keys, options, group)
    if heads is not None:
        out = join_heads(heads, out)
        lse = join_heads(heads, lse.t()).t() if need_lse else None
    return out, lse


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

    return _kept(shard, ("heads", team.size, device), make)


def _keys(shard: Shard, size: int, team: Team, call: Call, k: Tensor, v: Tensor) -> Keys:
    """The calls of this rank, and the way of the keys between teams of ``size`` ranks."""
    tokens, device = shard.tokens.teams(size), k.device
    key = size, call.band, device

    def copied() -> CopiedKeys | None:
        peers = peers_of(team, device)
        rows = [int(x.cu_seqlens_k[-1]) for x in mine]
        return peers and CopiedKeys(team, shard.failures, peers, routes(tokens, call.band), rows)

    def gathered() -> GatheredKeys:
        plan = exchange(tokens, team.rank, call.band)
        logger.debug("%s: %s of %s, %s", FUNCTION, call.move, shard, plan.kind)
        return GatheredKeys.of(team, shard.failures, plan, [x.keys for x in mine], device)

    mine = _kept(shard, ("calls", *key), lambda: calls(tokens, team.rank, call.band))
    way = _kept(shard, ("copied", *key), copied)
    if way is None or way.size(k, v) > MOST_BYTES:
        way = _kept(shard, ("gathered", *key), gathered)
    made = _kept(shard, ("device", *key), lambda: [DeviceCall.of(x, device) for x in mine])
    return Keys(made, way)


def _kept(shard: Shard, key: tuple, make: Callable[[], Any]) -> Any:
    if key not in shard.kept:
        shard.kept[key] = make()
    return shard.kept[key]


def _ends(lengths: tuple[int, ...]) -> numpy.ndarray:
    """int32 (sequences + 1,), where the sequences begin, and the end of the last."""
    return numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int32)


def _autocast(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Any, ...]:
    """q, k, v and the optional arrays, cast under autocast as `cupyflash.attention` casts them."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return q, k, v, extras
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) else x for x in (q, k, v))
    if isinstance(extras.sinks, Tensor) and extras.sinks.dtype != torch.float32:
        extras = extras._replace(sinks=extras.sinks.to(dtype))
    return q, k, v, extras
