"""Functions of ranks whose shards leave sequences whole."""

import sys
from unittest import mock

import calls
import texts
import torch
import torch.distributed as dist

from cupyflash import environment
from cupyflash.parallel import Shard, attention, moves

MODULE = sys.modules["cupyflash.parallel.attention"]


def forward_backward(name, arguments, move, travel, slack):
    """That of `calls`, or with a name that of `texts`; an error if keys travel and should not."""
    error = AssertionError("keys travel")
    with mock.patch.object(moves, "_keys", moves._keys if travel else mock.Mock(side_effect=error)):
        if name:
            return texts.forward_backward(arguments, name, move, slack=slack)
        return calls.forward_backward(arguments, move, slack=slack)


def repeated(lengths, slack):
    """What the second of two calls is, as on a GPU: {what: whether it is so}, and a text."""
    inputs, options = calls.problem(lengths, "float32", (4, 2), 16, {"sinks": True})
    shard = Shard(lengths, slack=slack)
    sinks = options["sinks"].requires_grad_()
    q, k, v = (shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))

    def results(q=q, k=k, v=v, **others):
        given = {"causal": True, "sinks": sinks, "return_lse": True} | others
        out, lse = attention(q, k, v, shard, **given)
        slopes = shard.take(inputs.dout), torch.ones_like(lse)
        return out, lse, *torch.autograd.grad((out, lse), (q, k, v, sinks), slopes)

    def same(found):
        return all(map(torch.equal, found, first))

    long = mock.Mock(side_effect=KeyError("all of a call"))
    with mock.patch.object(MODULE, "_on_gpu", lambda *_: True):
        first = results()
        with mock.patch.object(MODULE, "_call", long):
            found = {"same": same(results()), "short": not long.called}
            with torch.no_grad():
                found["no lse"] = torch.equal(
                    attention(q, k, v, shard, causal=True, sinks=sinks), first[0]
                )
            found["short without a gradient"] = not long.called
            for name, others in {
                "option": {"softcap": 3.0}, "array": {"softcap": torch.zeros(())},
                "shape": {"q": q[:, :2]}, "move": {"move": "heads"}, "bias": {"bias": 3},
                "score": {"score": lambda s, *_: 2 * s}, "seed": {"dropout_seed": 3},
            }.items():  # fmt: skip
                try:
                    results(**others)
                except KeyError:
                    found[name] = True
            with environment.override(debug=True):
                try:
                    results()
                except KeyError:
                    found["debug"] = True
        dropped = results(dropout_p=0.5, dropout_seed=3)
        found["dropout"] = not same(dropped) or len(shard) == 0
        found["again"] = same(results())
        try:
            attention(q, k.half(), v, shard, causal=True)
        except TypeError as error:
            return found, str(error)


def refused(slack):
    """The text of the error of a slack."""
    try:
        Shard([3, 4], slack=slack)
    except (TypeError, ValueError) as error:
        return str(error)


def another():
    """The text of the error where rank 1 has another slack."""
    try:
        Shard([3, 4], slack=0.5 * dist.get_rank())
    except ValueError as error:
        return str(error)
