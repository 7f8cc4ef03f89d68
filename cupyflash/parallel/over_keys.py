"""Keys that travel: each rank computes its own queries over the keys of all ranks.

Nothing is merged, as each softmax is over all keys of a query. The keys come by copies of the GPUs
where they reach each other's memory (`copied`), else by collectives (`gathered`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.attention.options import Extras
from ..ops.attention.preparation import split_extras
from ..ops.attention.score_text.arguments import learning
from . import pieces
from .pieces import FUNCTION, DeviceCall
from .texts import CallText


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """The calls of one rank, and the way of their keys.

    Attributes:
        way: a `gathered.GatheredKeys` or `copied.CopiedKeys`.
    """

    calls: list[DeviceCall]
    way: Any


class AttentionOverKeys(torch.autograd.Function):
    """(out, lse) of the queries of this rank over the keys of all teams.

    The sinks and what the text reads are arguments of their own, as they have gradients.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, extras, sinks, keys, options, heads_at_once, text, *captures):  # noqa: ANN001, ANN205
        extras = extras._replace(sinks=sinks)
        groups, ratio = _groups(k.shape[1], heads_at_once), q.shape[1] // max(1, k.shape[1])
        out = lse = None  # of one group they are what the kernels return
        if len(groups) != 1 or not keys.calls:
            out = q.new_empty((*q.shape[:2], v.shape[2]))
            lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        with keys.way.failures.reported(FUNCTION):
            journey = keys.way.start(k, v, groups, gradients=False)
            for number, group in enumerate(groups):
                mine = _queries(group, ratio)
                arrived = journey.arrived(number)
                if not keys.calls:  # this rank has no tokens
                    continue
                of_heads = _of_heads(mine, extras, text, captures)
                found = pieces.forward(keys.calls, q[:, mine], arrived, options, *of_heads)
                if out is None:
                    out, lse = found
                else:
                    out[:, mine], lse[mine] = found
            journey.end()
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in captures]
        tensors = [x if isinstance(x, Tensor) else None for x in captures]
        ctx.save_for_backward(q, k, v, out, lse, *extras, *tensors)
        ctx.rest = keys, options, groups, text
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # noqa: ANN001, ANN205
        q, k, v, out, lse, *saved = ctx.saved_tensors
        extras, captures = split_extras(saved)
        sinks = extras.sinks
        keys, options, groups, text = ctx.rest
        captures = [x if n is None else n for x, n in zip(captures, ctx.numbers, strict=True)]
        if text is not None:
            learn = ctx.needs_input_grad[-len(captures) :] if captures else ()
            text = text._replace(text=learning(text.text, learn))
        if dout is None:  # only the LSE is used
            dout = torch.zeros_like(out)
        dout = dout.contiguous()  # perhaps an expanded scalar
        dq = None if len(groups) == 1 else torch.empty_like(q)  # of one group as out above
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        sums = [None] * len(captures)
        ratio = q.shape[1] // max(1, k.shape[1])
        with keys.way.failures.reported(f"{FUNCTION}, backward"):
            journey = keys.way.start(k, v, groups, gradients=True)
            for number, group in enumerate(groups):
                mine = _queries(group, ratio)
                of_heads = _of_heads(mine, extras, text, captures)
                arrived = journey.arrived(number)
                some_dq, gradients, (some_sinks, *some) = pieces.backward(
                    keys.calls, dout[:, mine], q[:, mine], arrived, out[:, mine],
                    lse[mine], None if dlse is None else dlse[mine], options, *of_heads,
                )  # fmt: skip
                if dq is None:
                    dq = some_dq
                else:
                    dq[:, mine] = some_dq
                if sinks is not None:
                    dsinks[mine] = some_sinks.to(sinks.dtype)
                sums = [y if x is None else x + y for x, y in zip(sums, some, strict=True)]
                journey.give(number, gradients)
            dk, dv = journey.gradients()
            journey.end()
        learned = [x if x is None else x.to(of.dtype) for x, of in zip(sums, captures, strict=True)]
        return dq, dk, dv, None, dsinks, None, None, None, None, *learned


def _of_heads(
    mine: slice, extras: Extras, text: CallText | None, captures: Sequence[Any]
) -> tuple[Extras, CallText | None]:
    """The optional arrays and the text of some query heads."""
    of_heads = extras.alibi_slopes, extras.sinks
    slopes, sinks = (None if x is None else x[..., mine] for x in of_heads)
    if text is not None:
        text = text._replace(captures=tuple(captures)).of_heads(mine.start)
    return extras._replace(alibi_slopes=slopes, sinks=sinks), text


def _groups(heads_kv: int, heads_at_once: int) -> list[slice]:
    """Key heads that travel together."""
    return [slice(h, min(h + heads_at_once, heads_kv)) for h in range(0, heads_kv, heads_at_once)]


def _queries(group: slice, ratio: int) -> slice:
    """The query heads of some key heads."""
    return slice(group.start * ratio, group.stop * ratio)
