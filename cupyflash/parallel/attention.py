"""`attention` of packed sequences whose tokens are divided among the ranks of a `Shard`."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import environment
from ..ops.attention.options import Extras, Options, plain_options
from ..runtime.array import compiling
from ..runtime.checks import plain_flag, short
from . import apart
from .agreement import agree
from .checks import Call, checked, refuse_not_built
from .moves import kept, moved
from .pieces import FUNCTION
from .shard import Shard
from .sharded import sharding_of
from .texts import text_of

if TYPE_CHECKING:
    from ..ops.attention.score_text.scores import Mask, Score


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
    score: "Score | Callable | None" = None,
    mask: "Mask | Callable | None" = None,
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
    k and v belong to the tokens of this rank. The gradients of the sinks and of what a score reads
    are the part that this rank has computed; the parts of all ranks add up to the whole, as those
    of weights do.

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
        score, mask: as in `cupyflash.attention`, of the numbers of sequence and head among all, and
            of places in the whole sequence. What they read is the same on all ranks, of all heads
            and tokens. A mask does not change which keys travel, as a window does.
        dropout_p, dropout_seed: as there; an equal seed on all ranks drops what it drops on one.
            Without a seed each rank draws one.
        return_lse: return (out, lse); lse float32 (heads_q, tokens of this rank), differentiable.
        deterministic, precision: as in `cupyflash.attention`.
        move: "heads": an all-to-all before and after, and each head is computed as on one GPU, with
            the same bits where the kernels have the same plan. heads_q must be a multiple of the
            ranks, and heads_kv a multiple or a divisor. "keys": keys and values travel, a group of
            heads at a time. A shard of a mesh with two axes has both, "heads x keys". "auto" takes
            what leaves fewer bytes to wait for. Where a shard with slack divides no sequence,
            "keys" and "auto" send nothing.
        not_built: ``bias``, ``seqused_q``, ``seqused_k`` and ``layout`` of `cupyflash.attention`.

    Returns:
        out (tokens of this rank, heads_q, head_dim of v).

    Raises:
        TypeError, ValueError, NotImplementedError: as `cupyflash.attention`, on all ranks, with the
            number of the rank whose call is wrong. ValueError: ranks with other options.
            NotImplementedError: ``not_built``, which a score or a mask can say; a BlockMask beside
            sequences of several lengths, whose mask_mod is allowed.
        RankError: another rank has failed or left, in this call or in an earlier one.
    """
    if not isinstance(shard, Shard):
        raise TypeError(f"{FUNCTION}: shard must be a Shard, got {short(shard)}")
    options = {
        "causal": causal, "scale": scale, "window": window, "softcap": softcap,
        "dropout_p": dropout_p, "deterministic": deterministic, "precision": precision,
    }  # fmt: skip
    extras = Extras(alibi_slopes=alibi_slopes, sinks=sinks, dropout_seed=dropout_seed)
    arguments = (q, k, v, shard, options, extras, score, mask, return_lse, move, not_built)
    if compiling():
        from ..runtime.torch_graphs import eagerly  # which imports much that few need

        out, lse = eagerly(_call, *arguments)
        return (out, lse) if return_lse else out
    known = None
    if alibi_slopes is dropout_seed is score is mask is None and not not_built:
        known = apart.prepared(q, k, v, shard, options, move)
    if known is not None and type(return_lse) is bool:
        out, lse = apart.attention(q, k, v, sinks, known, return_lse)
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
    score: Any,
    mask: Any,
    return_lse: bool,
    move: str,
    not_built: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    call = error = sharding = None
    captures, found = (), None
    try:
        refuse_not_built(not_built)
        return_lse = plain_flag(FUNCTION, "return_lse", return_lse)
        heads = q.shape[1] if isinstance(q, Tensor) and q.dim() == 3 else 0  # checked below
        text, captures, found = text_of(score, mask, shard.lengths, heads)
        plain = Options(*plain_options(FUNCTION, **options), text)
        sharding = sharding_of(shard, q, k, v)
        if sharding is not None:
            q, k, v = (x.to_local() for x in (q, k, v))
        q, k, v, extras = _autocast(q, k, v, extras)
        call = _checked(q, k, v, shard, plain, extras, move, captures)
    except Exception as raised:  # also of a function of the caller's own, as it is traced
        error = raised
    on_gpu = _on_gpu(q, k, v)
    if not (on_gpu and shard.agreed) or environment.current().debug:
        numbers = [x for x in captures if not isinstance(x, Tensor)]
        facts = f"{call}, return_lse={return_lse}, numbers {numbers}"
        agree(FUNCTION, shard.teams, shard.failures, facts, error)
        shard.agreed = True
    elif error is not None:
        shard.agreed = False  # if all ranks have made this call, they can go on
        shard.failures.tell(error)
        raise error
    with shard.failures.reported(FUNCTION):  # what it computes between collectives may raise, too
        out, lse = moved(q, k, v, shard, call, extras, (captures, found), return_lse)
    if on_gpu:
        apart.keep(shard, call, q, k, v, extras, move)
    if sharding is None:
        return out, lse
    return sharding.result(out, 0), sharding.result(lse if return_lse else None, 1)


def _on_gpu(*tensors: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_cuda for x in tensors)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    options: Options,
    extras: Extras,
    move: str,
    captures: tuple,
) -> Call:
    """`checked`, once for calls that are alike."""
    given = (q, k, v, *extras)
    make = functools.partial(checked, q, k, v, shard, options, extras, move, captures)
    if not all(x is None or isinstance(x, Tensor) for x in given) or not isinstance(move, str):
        return make()
    facts = (
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
        if isinstance(x, Tensor)
        else type(x)
        for x in (*given, *captures)
    )
    return kept(shard, ("checked", options, move, torch.is_grad_enabled(), *facts), make)


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
