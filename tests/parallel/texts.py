"""Scores and masks of the caller's own over several ranks, beside each sequence by itself."""

import dataclasses

import calls
import torch

from cupyflash.parallel import attention, choice
from cupyflash.testing.scores import expected_scores
from cupyflash.testing.tolerance import Expected, Result


def _gates(gate, offset):
    return lambda score, b, h, q, k: score * torch.sigmoid(gate[b, h, q]) + offset[b, h, k]


def _distances(table, _):
    middle = table.shape[1] // 2
    return lambda score, b, h, q, k: score + table[h, (k - q).clamp(-middle, middle) + middle]


def _slopes(slopes):
    return lambda score, b, h, q, k: score - slopes[b, h] * abs(q - k)


def _documents(_, document):
    return lambda b, h, q, k: (document[b, q] == document[b, k]) & (k + h <= q + 3)


def _documents_alone(document):
    return lambda b, h, q, k: document[b, q] == document[b, k]


# The functions of a score and of a mask, each of the arrays that follow: of shapes by name, or int.
TEXTS = {
    "gates": (_gates, None, "bhn", "bhn"),
    "slopes": (_slopes, None, "bh"),
    "documents": (None, _documents_alone, "documents"),
    "both": (_distances, _documents, "h9", "documents"),
}


def arrays_of(name, lengths, heads):
    """What the text reads, the same on every rank."""
    seeded = torch.Generator().manual_seed(5)
    sizes = {"b": len(lengths), "h": heads, "n": max(lengths), "9": 9}
    found = []
    for shape in TEXTS[name][2:]:
        if shape == "documents":
            found.append((torch.arange(sizes["n"]) // 7).repeat(sizes["b"], 1))
        else:
            found.append(torch.rand([sizes[x] for x in shape], generator=seeded))
    return tuple(found)


def forward_backward(arguments, name, move, least_bytes=choice.LEAST_BYTES):
    """(index, {name: result of this rank}) of a `calls.problem` with a text.

    The text "alibi" is what the option of this name does.
    """
    choice.LEAST_BYTES = least_bytes
    inputs, options = calls.problem(*arguments)
    shard = calls.shard_of(arguments[0], move)
    q, k, v = (shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    learned = {}
    if name == "alibi":
        score, mask = _slopes(options.pop("alibi_slopes")), None
        learned = {"dsinks": options["sinks"].requires_grad_()}
    else:
        arrays = arrays_of(name, arguments[0], q.shape[1])
        arrays = [x.requires_grad_(x.is_floating_point()) for x in arrays]
        learned = {f"d{i}": x for i, x in enumerate(arrays) if x.requires_grad}
        score, mask = (x and x(*arrays) for x in TEXTS[name][:2])
    move = "auto" if isinstance(move, tuple) else move
    out, lse = attention(
        q, k, v, shard, return_lse=True, move=move, score=score, mask=mask, **options
    )
    leaves = {"dq": q, "dk": k, "dv": v, **learned}
    gradients = torch.autograd.grad(out, list(leaves.values()), shard.take(inputs.dout))
    results = {"out": out.detach(), "lse": lse.detach().t(), **dict(zip(leaves, gradients))}
    return shard.index(), results


def expected(arguments, name):
    """The requirements on the results, from each sequence by itself; causal and window alone."""
    lengths, _, heads, _, options = arguments
    inputs, _ = calls.problem(*arguments)
    arrays = arrays_of(name, lengths, heads[0])
    score, mask = TEXTS[name][:2]
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    joined = {}
    for number, rows in enumerate(slice(*x) for x in zip(ends, ends[1:])):
        fields = {x: getattr(inputs, x)[rows][None] for x in ("q", "k", "v", "dout")}
        one = dataclasses.replace(inputs, **fields, cu_seqlens_q=None, cu_seqlens_k=None)
        of_score = score and _of_sequence(score, number)
        found = expected_scores(one, of_score, _masked(mask, number, options), arrays)
        for key, x in found.results.items():
            if not key.removeprefix("d").isdigit():
                x = x._replace(exact=x.exact[0], yardstick=x.yardstick[0])
            joined[key] = [*joined.get(key, []), x]
    return Expected({key: _joined(key, parts) for key, parts in joined.items()})


def _of_sequence(score, number):
    return lambda *arrays: lambda s, b, h, q, k: score(*arrays)(s, b + number, h, q, k)


def _masked(mask, number, options):
    """The mask of one sequence, with the causal mask and the window of the options."""
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right

    def of_arrays(*arrays):
        def seen(b, h, q, k):
            found = torch.ones_like(q, dtype=torch.bool)
            if mask is not None:
                found &= mask(*arrays)(b + number, h, q, k)
            if left is not None:
                found &= q - k <= left
            return found if right is None else found & (k - q <= right)

        return seen

    return of_arrays


def _joined(name, parts):
    if name.removeprefix("d").isdigit():
        return sum(parts[1:], parts[0])
    axis = 1 if name == "lse" else 0
    exact, yardstick = (
        torch.cat([getattr(x, field) for x in parts], axis) for field in ("exact", "yardstick")
    )
    terms = max(x.terms for x in parts)
    return Result(exact, yardstick, parts[0].dtype, terms, parts[0].rounded)
