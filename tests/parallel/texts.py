"""Scores and masks of the caller's own over several ranks, beside each sequence by itself."""

import dataclasses

import calls
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cupyflash import Score
from cupyflash.ops.attention.options import NO_EXTRAS
from cupyflash.ops.attention.score_text import Text
from cupyflash.ops.attention.score_text.arguments import learning
from cupyflash.parallel import attention, choice, pieces
from cupyflash.parallel.exchange import calls as calls_of
from cupyflash.parallel.texts import CallText, text_of
from cupyflash.parallel.tokens import Band, Tokens
from cupyflash.testing import expected as of_options
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


def forward_backward(arguments, name, move, least_bytes=choice.LEAST_BYTES, slack=0.0):
    """(index, {name: result of this rank}) of a `calls.problem` with a text.

    The text "alibi" is what the option of this name does; then the LSE has the gradient `dlse_of`.
    """
    choice.LEAST_BYTES = choice.LEAST_COPIED = least_bytes
    inputs, options = calls.problem(*arguments)
    if dist.get_backend() == "nccl":
        inputs, options = calls.on_gpu(inputs), calls.on_gpu(options)
    shard = calls.shard_of(arguments[0], move, slack=slack)
    q, k, v = (shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    learned = {}
    if name == "alibi":
        score, mask = _slopes(options.pop("alibi_slopes")), None
        learned = {"dsinks": options["sinks"].requires_grad_()}
    else:
        arrays = [x.to(q.device) for x in arrays_of(name, arguments[0], q.shape[1])]
        arrays = [x.requires_grad_(x.is_floating_point()) for x in arrays]
        learned = {f"d{i}": x for i, x in enumerate(arrays) if x.requires_grad}
        score, mask = (x and x(*arrays) for x in TEXTS[name][:2])
    move = "auto" if isinstance(move, tuple) else move
    out, lse = attention(
        q, k, v, shard, return_lse=True, move=move, score=score, mask=mask, **options
    )
    leaves = {"dq": q, "dk": k, "dv": v, **learned}
    results, slopes = [out], [shard.take(inputs.dout)]
    if name == "alibi":
        results.append(lse)
        slopes.append(shard.take(dlse_of(arguments).to(q.device), 1))
    gradients = torch.autograd.grad(results, list(leaves.values()), slopes)
    results = {"out": out.detach(), "lse": lse.detach().t(), **dict(zip(leaves, gradients))}
    return shard.index(), {name: x.cpu() for name, x in results.items()}


def dlse_of(arguments):
    """A gradient of the LSE of all tokens."""
    lengths, _, heads, *_ = arguments
    return torch.linspace(-1, 1, heads[0] * sum(lengths)).reshape(heads[0], -1)


def block_masks(move):
    """Whether a BlockMask of each sequence and head gives what its function does; and an error."""
    inputs, _ = calls.problem([40, 40], "float32", (4, 2), 16, {})
    shard = calls.shard_of([40, 40], move)
    document = torch.arange(80).reshape(2, 40) // 9
    mask = lambda b, h, q, k: (document[b, q] == document[b, k]) & (k + h <= q + 3)  # noqa: E731
    leaves = [shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    results = []
    blocks = create_block_mask(mask, 2, 4, 40, 40, "cpu", BLOCK_SIZE=8)
    for given in (mask, blocks):
        out = attention(*leaves, shard, mask=given, move=move)
        results.append([out, *torch.autograd.grad(out, leaves, shard.take(inputs.dout))])
    other = create_block_mask(mask, 2, 4, 40, 39, "cpu", BLOCK_SIZE=8)
    try:
        attention(*leaves, shard, mask=other, move=move)
    except ValueError as error:
        return all(map(torch.equal, *results)), str(error)


def sizes(move):
    """The errors, "" for none, of arrays of as many elements as are read, and of fewer."""
    lengths = [20, 20, 20, 9]  # the tokens of a rank are more than those of a sequence
    inputs, _ = calls.problem(lengths, "float32", (4, 2), 16, {})
    shard, found = calls.shard_of(lengths, move), []
    mine = [shard.take(x) for x in (inputs.q, inputs.k, inputs.v)]
    for batches, tokens in ((4, 20), (4, 19), (3, 20)):
        table = torch.zeros(batches, tokens)
        try:
            attention(*mine, shard, move=move, score=lambda s, b, h, q, k: s + table[b, k])  # noqa: B023
            found.append("")
        except (ValueError, IndexError) as error:
            found.append(str(error))
    return found


def ways(move):
    """{way: whether its results are those of a plain call}, on this rank, with a score."""
    inputs, _ = calls.problem([30, 11], "float32", (4, 2), 16, {})
    shard = calls.shard_of([30, 11], move)
    factor = torch.linspace(0.5, 1.5, 4).requires_grad_()
    score = Score(lambda score, b, h, q, k: factor[h] * score - q / 50)
    leaves = [shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    leaves.append(factor)

    def plain(q, k, v):
        options = {"dropout_p": 0.25, "dropout_seed": 3, "score": score}
        return attention(q, k, v, shard, move=move, causal=True, **options)

    def results(function):
        out = function(*leaves[:3])
        return [out.detach(), *torch.autograd.grad(out, leaves, shard.take(inputs.dout))]

    compiled = torch.compile(lambda *x: plain(*x) * 1.0, backend="aot_eager")
    right = results(plain)
    found = {
        "checkpoint": results(lambda *x: checkpoint(plain, *x, use_reentrant=False)),
        "compiled": results(compiled),
    }
    return {name: all(map(torch.equal, x, right)) for name, x in found.items()}


def in_one_process(inputs, lengths, ranks, band, options, extras, text):
    """{name: result} of ranks one after another, with the keys of lists instead of a collective.

    The gradients of captures are those of the text's own names.
    """
    tokens, device = Tokens.of(lengths, ranks), inputs.q.device
    learned = [x for x in text.text.captures if x.learns]
    results = [torch.full_like(inputs.q, torch.nan) for _ in range(2)]
    lse = torch.full((len(inputs.q), inputs.q.shape[1]), torch.nan, device=device)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (inputs.k, inputs.v)]
    of_text = [0.0] * len(learned)
    for rank in range(ranks):
        index = torch.from_numpy(tokens.index(rank)).to(device)
        made = calls_of(tokens, rank, band)
        rows = [torch.from_numpy(x.keys).to(device) for x in made]
        pairs = [(inputs.k[x], inputs.v[x]) for x in rows]
        of_device = [pieces.DeviceCall.of(x, device) for x in made]
        q, dout = inputs.q[index], inputs.dout[index]
        out, some_lse = pieces.forward(of_device, q, pairs, options, extras, text)
        dq, found, (_, *of_captures) = pieces.backward(
            of_device, dout, q, pairs, out, some_lse, None, options, extras, text
        )
        for some, pair in zip(rows, found, strict=True):
            for whole, x in zip(sums, pair):
                whole.index_add_(0, some, x.float())
        results[0][index], results[1][index], lse[index] = out, dq, some_lse.t()
        of_text = [x + y for x, y in zip(of_text, filter(torch.is_tensor, of_captures))]
    dk, dv = (x.to(inputs.q.dtype) for x in sums)
    named = zip((f"d{x.name}" for x in learned), of_text)
    found = {"out": results[0], "dq": results[1], "lse": lse.t(), "dk": dk, "dv": dv, **dict(named)}
    return {name: x.cpu() for name, x in found.items()}


PLACES = frozenset(("batch", "head", "query", "key"))
SCORES = ("score - slopes(head) * abs(query - key)", "")  # ALiBi, or its option
OF_DROPOUT = {"dropout_p": 0.25, "dropout_seed": 7}


def _slopes_of_dropout(device="cpu"):
    return torch.linspace(0.02, 0.2, 4, device=device)


def with_dropout(inputs, lengths, ranks, score):
    """`in_one_process` with ALiBi, a causal window and dropout."""
    device, slopes = inputs.q.device, _slopes_of_dropout(inputs.q.device)
    text, captures = Text("", "", (), True), ()
    if score:
        text, captures = Score(score, slopes=slopes).alone._replace(drops=True), (slopes,)
    seed = torch.tensor([OF_DROPOUT["dropout_seed"]], device=device)
    extras = NO_EXTRAS._replace(dropout_seed=seed, alibi_slopes=None if score else slopes)
    options = {"dropout_p": OF_DROPOUT["dropout_p"], "deterministic": True}
    text = CallText(text, captures, PLACES, 0, 4)
    return in_one_process(inputs, lengths, ranks, Band(90, 0, 16), options, extras, text)


def expected_with_dropout(inputs):
    """The requirements on it, of inputs on the CPU."""
    options = {"causal": True, "window": (90, None), "alibi_slopes": _slopes_of_dropout()}
    return of_options(inputs, **options, **OF_DROPOUT)


def with_both(arguments, ranks, band, learn=True):
    """`in_one_process` with the text "both"."""
    lengths, _, heads, *_ = arguments
    inputs, _ = calls.problem(*arguments)
    arrays = arrays_of("both", lengths, heads[0])
    text, captures, _ = text_of(*(x(*arrays) for x in TEXTS["both"][:2]), tuple(lengths), 0)
    text = learning(text, [learn and x.dtype == "float32" for x in text.captures])
    text = CallText(text, captures, PLACES, 0, heads[0])
    found = in_one_process(inputs, lengths, ranks, band, {}, NO_EXTRAS, text)
    return {"d0" if name == "dtable" else name: x for name, x in found.items()}


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
