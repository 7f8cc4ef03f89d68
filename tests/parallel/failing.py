"""Functions in which one rank of a test does something wrong."""

import contextlib
import os
import time

import numpy
import torch
import torch.distributed as dist
from calls import shard_of
from torch.nn.attention.flex_attention import create_block_mask

from cupyflash import Mask, Score
from cupyflash.parallel import Shard, attention, pieces, transport

TOKENS = [40, 9]


def tensors(shard, heads=(4, 2), head_dim=16):
    return [torch.zeros(len(shard), h, head_dim) for h in (heads[0], heads[1], heads[1])]


def wrong(name, bad=(1,), move="keys"):
    """One call in which the ranks ``bad`` alone do what ``name`` says, then a right one."""
    shard = shard_of(TOKENS, move)
    q, k, v = tensors(shard)
    options = {"causal": True, "move": "auto" if isinstance(move, tuple) else move}
    if dist.get_rank() in bad:
        q, k, v, options = WRONG[name](q, k, v, options)
    text = None
    try:
        attention(q, k, v, shard, **options)
    except (TypeError, ValueError, NotImplementedError, KeyError, transport.RankError) as error:
        text = f"{type(error).__name__}: {error}"
    out = attention(*tensors(shard), shard, causal=True)
    assert out.shape == (len(shard), 4, 16)
    return text


WRONG = {
    "tokens": lambda q, k, v, o: (q[1:], k, v, o),
    "dtype": lambda q, k, v, o: (q, k.half(), v, o),
    "no tensor": lambda q, k, v, o: (q, k, None, o),
    "rank": lambda q, k, v, o: (q[None], k, v, o),
    "heads": lambda q, k, v, o: (q[:, :3], k, v, o),
    "uneven": lambda q, k, v, o: (q[:, :3], k[:, :1], v[:, :1], o | {"move": "heads"}),
    "key heads": lambda q, k, v, o: (
        q.repeat(1, 3, 1),
        k.repeat(1, 3, 1)[:, :3],
        v.repeat(1, 3, 1)[:, :3],
        o | {"move": "heads"},
    ),  # fmt: skip
    "slopes": lambda q, k, v, o: (q, k, v, o | {"alibi_slopes": torch.ones(3, 4)}),
    "slopes learn": lambda q, k, v, o: (
        q,
        k,
        v,
        o | {"alibi_slopes": torch.ones(4, requires_grad=True)},
    ),  # fmt: skip
    "sinks": lambda q, k, v, o: (q, k, v, o | {"sinks": torch.ones(3)}),
    "score": lambda q, k, v, o: (q, k, v, o | {"score": Score("f(head)", f=numpy.ones(4, "f"))}),
    "mask": lambda q, k, v, o: (q, k, v, o | {"mask": "key < query"}),
    "both": lambda q, k, v, o: (q, k, v, o | {"score": Score("2 * score"), "softcap": 3.0}),
    "raises": lambda q, k, v, o: (q, k, v, o | {"score": lambda *_: {}["slopes"]}),
    "block mask": lambda q, k, v, o: (
        q,
        k,
        v,
        o | {"mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, 49, 49, "cpu")},
    ),  # fmt: skip
    "seed": lambda q, k, v, o: (q, k, v, o | {"dropout_p": 0.5, "dropout_seed": -1}),
    "bias": lambda q, k, v, o: (q, k, v, o | {"bias": torch.zeros(49, 49)}),
    "lengths": lambda q, k, v, o: (q, k, v, o | {"seqused_k": torch.ones(2)}),
    "layout": lambda q, k, v, o: (q, k, v, o | {"layout": "bhsd"}),
    "unknown": lambda q, k, v, o: (q, k, v, o | {"causual": True}),
    "move": lambda q, k, v, o: (q, k, v, o | {"move": "ring"}),
    "option": lambda q, k, v, o: (q, k, v, o | {"softcap": -1.0}),
    "other option": lambda q, k, v, o: (q, k, v, o | {"softcap": 2.0}),
    "other shape": lambda q, k, v, o: (torch.cat([q, q], 1), k, v, o),
    "other text": lambda q, k, v, o: (q, k, v, o | {"mask": Mask("key < query")}),
    "other seed": lambda q, k, v, o: (q, k, v, o | {"dropout_seed": 3}),
    "gradient": lambda q, k, v, o: (q.requires_grad_(), k, v, o),
}


def shards(name):
    """The text of the error where rank 1 makes a shard of something else."""
    lengths = {"other": [41, 8], "negative": [-1], "text": "40", "float": [40.5], "one": 40}[name]
    try:
        Shard(lengths if dist.get_rank() == 1 else TOKENS)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def fail(where):
    """The text of the error, and seconds until it, where rank 1 fails in a call."""
    shard, bad = Shard(TOKENS), dist.get_rank() == 1
    q, k, v = (x.requires_grad_() for x in tensors(shard))
    move, options = "keys", {"causal": True}
    if where == "heads":  # rank 1 reads outside of an array, in attention of whole sequences
        places, table = torch.full((40,), 9 * bad, dtype=torch.int32), torch.zeros(3)
        move, options = "heads", {"mask": lambda b, h, q, k: table[places[k]] == 0}
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if bad and where == "forward":
            stack.callback(setattr, pieces, "forward", pieces.forward)
            pieces.forward = raises
        try:
            if bad and where == "leaves":
                os._exit(0)
            if bad and where == "absent":
                time.sleep(5)
                return None
            out = attention(q, k, v, shard, move=move, **options)
            if bad and where == "backward":
                stack.callback(setattr, pieces, "backward", pieces.backward)
                pieces.backward = raises
            out.sum().backward()
        except (transport.RankError, MemoryError, IndexError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return None


def go_on():
    """The texts of the errors of a call in which rank 1 fails, of one behind it, and of a shard."""
    shard, bad = Shard(TOKENS), dist.get_rank() == 1
    q, k, v = tensors(shard, heads=(4, 4))
    texts = []
    with contextlib.ExitStack() as stack:
        if bad:
            stack.callback(setattr, pieces, "forward", pieces.forward)
            pieces.forward = raises
        for call in (attention, attention, lambda *_, **__: Shard(TOKENS)):
            try:
                call(q, k, v, shard, move="keys")
                texts.append(None)
            except (transport.RankError, MemoryError) as error:
                texts.append(f"{type(error).__name__}: {error}")
            stack.close()  # from here on nothing fails by itself
    return texts


def raises(*_):
    raise MemoryError("no room")
