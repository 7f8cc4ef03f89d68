"""Functions that all ranks of a test run, on inputs that each makes from the same seed."""

import contextlib
import dataclasses
import functools
import random
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Along
from torch.utils.checkpoint import checkpoint

from cupyflash import flash_attn_varlen_func
from cupyflash.parallel import Shard, attention, choice, moves, peers, transport
from cupyflash.testing import make_alibi_slopes
from cupyflash.testing.inputs import make_varlen_inputs


def problem(lengths, dtype, heads, head_dim, options):
    """(inputs, options of `cupyflash.attention`); "sinks" and "alibi" in them become arrays."""
    inputs = make_varlen_inputs(
        "torch", dtype, lengths, lengths, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim
    )
    options = dict(options)
    if alibi := options.pop("alibi", 0):
        batch = len(lengths) if alibi == 2 else None
        options["alibi_slopes"] = make_alibi_slopes(heads[0], "torch", batch=batch)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, heads[0])
    return inputs, options


@functools.cache
def mesh(*shape):
    """A mesh of keys and heads; every rank makes the same ones in the same order."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("keys", "heads"))


def shard_of(lengths, move, zigzag=True, slack=0.0):
    group = mesh(*move) if isinstance(move, tuple) else None
    return Shard(lengths, group, zigzag=zigzag, slack=slack)


def forward_backward(
    arguments, move, zigzag=True, least_bytes=choice.LEAST_BYTES, by="engines", slack=0.0
):
    """(index, {name: result of this rank}) of attention of a `problem`.

    Args:
        least_bytes: of the keys that travel together; 1 for one head at a time.
        by: "engines" or "kernel", which copy between GPUs that reach each other's memory, or
            "collectives".
    """
    choice.LEAST_BYTES = choice.LEAST_COPIED = least_bytes
    choice.COPY_SECONDS = {"engines": 0.0, "kernel": 1.0}.get(by)
    reach = {"collectives": lambda *_: None}.get(by, peers.peers_of)
    moves.peers_of = reach
    inputs, options = problem(*arguments)
    if dist.get_backend() == "nccl":
        inputs, options = on_gpu(inputs), on_gpu(options)
    shard = shard_of(arguments[0], move, zigzag, slack)
    q, k, v = (shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    leaves = {"dq": q, "dk": k, "dv": v}
    if "sinks" in options:
        options["sinks"] = leaves["dsinks"] = options["sinks"].requires_grad_()
    move = "auto" if isinstance(move, tuple) else move
    out, lse = attention(q, k, v, shard, return_lse=True, move=move, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), shard.take(inputs.dout))
    results = {"out": out.detach(), "lse": lse.detach().t(), **dict(zip(leaves, gradients))}
    return shard.index(), {name: x.cpu() for name, x in results.items()}


def on_gpu(given):
    """Inputs, or a dictionary, with all tensors on the GPU of this rank."""
    fields = given if isinstance(given, dict) else vars(given)
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in fields.items()}
    return moved if isinstance(given, dict) else dataclasses.replace(given, **moved)


def whole(results, total):
    """The results of all ranks together, in the order of the tokens; those of weights add up."""
    indices, parts = zip(*results, strict=True)
    order = torch.cat(indices)
    assert order.sort().values.tolist() == list(range(total))
    joined = {}
    for name in parts[0]:
        rows = [part[name] for part in parts]
        if name == "dsinks" or name.removeprefix("d").isdigit():
            joined[name] = torch.stack(rows).sum(0)
            continue
        joined[name] = torch.empty(total, *rows[0].shape[1:], dtype=rows[0].dtype)
        joined[name][order] = torch.cat(rows)
    joined["lse"] = joined["lse"].t()
    return joined


def delayed(run, *arguments):
    """`forward_backward` with streams that wait for up to half a millisecond here and there."""
    delays = random.Random(1000 * run + dist.get_rank())

    def after_a_delay(function):
        def call(self, *rest):
            streams = [torch.cuda.current_stream(), getattr(self, "stream", None)]
            with torch.cuda.stream(delays.choice(streams) or streams[0]):
                torch.cuda._sleep(delays.randrange(10**6))
            return function(self, *rest)

        return call

    names = [(peers.Peers, x) for x in ("enter", "tell", "hear", "follow", "leave", "send")]
    with contextlib.ExitStack() as stack:
        for where, name in (*names, (transport.Pending, "wait")):
            function = after_a_delay(getattr(where, name))
            stack.enter_context(mock.patch.object(where, name, function))
        return forward_backward(*arguments)


def ways(move):
    """{way: whether its results are those of a plain call}, on this rank."""
    inputs, _ = problem([30, 11], "float32", (4, 2), 16, {})
    shard = Shard([30, 11])
    q, k, v = (shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    dout = shard.take(inputs.dout)
    options = {"causal": True, "move": move}

    def results(function, *tensors):
        for x in (q, k, v):
            x.grad = None
        out = function(*tensors)
        out.backward(dout)
        return [out.detach(), q.grad, k.grad, v.grad]

    def plain(q, k, v):
        return attention(q, k, v, shard, **options)

    def strided(x):
        return torch.stack([x, x], dim=2)[:, :, 1]

    right = results(plain, q, k, v)

    def same(*found):
        return all(torch.equal(x, y) for x, y in zip(found, right, strict=True))

    found = {
        "checkpoint": same(
            *results(lambda *x: checkpoint(plain, *x, use_reentrant=False), q, k, v)
        ),
        "reentrant": same(*results(lambda *x: checkpoint(plain, *x, use_reentrant=True), q, k, v)),
        "strided": same(*results(lambda *x: plain(*map(strided, x)), q, k, v)),
    }
    with torch.no_grad():
        found["no gradient"] = torch.equal(plain(q, k, v), right[0])
    around = torch.compile(lambda q, k, v: plain(q * 2, k, v) * 1.0, backend="aot_eager")
    found["compiled"] = same(*results(lambda q, k, v: around(q / 2, k, v), q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        cast = plain(q, k, v)
    rounded = plain(*(x.bfloat16() for x in (q, k, v)))
    found["autocast"] = torch.equal(cast, rounded)
    found["lse"] = _lse_gradient(shard, inputs, (q, k, v), options)
    return found


def _lse_gradient(shard, inputs, leaves, options):
    """Whether the gradient of an LSE is that of the one-process call."""
    _, lse = attention(*leaves, shard, return_lse=True, **options)
    weights = torch.linspace(0, 1, shard.total)
    found = torch.autograd.grad((lse * shard.take(weights)).sum(), leaves[:2])
    whole = [x.requires_grad_() for x in (inputs.q, inputs.k)]
    ends, longest = inputs.cu_seqlens_q, max(shard.lengths)
    _, lse, _ = flash_attn_varlen_func(
        *whole, inputs.v, ends, ends, longest, longest, causal=True, return_attn_probs=True
    )
    right = torch.autograd.grad((lse * weights).sum(), whole)
    pairs = zip(found, right, strict=True)
    return all(torch.allclose(x, shard.take(y), rtol=1e-5, atol=1e-6) for x, y in pairs)


def taken_and_gathered(lengths, move, slack=0.0):
    """Whether `take` and `gather` undo each other, along both axes, and gradients are sums."""
    shard = shard_of(lengths, move, slack=slack)
    x = torch.arange(3.0 * shard.total).reshape(shard.total, 3)
    mine = shard.take(x).requires_grad_()
    whole = shard.gather(mine)
    (gradient,) = torch.autograd.grad(whole, mine, (1 + shard.rank) * x)
    ranks = sum(range(1, shard.ranks + 1))
    positions = torch.cat([torch.arange(n) for n in lengths] or [torch.arange(0)])
    return (
        torch.equal(whole, x)
        and torch.equal(shard.gather(shard.take(x.t(), 1), 1), x.t())
        and torch.equal(gradient, ranks * shard.take(x))
        and torch.equal(shard.gather(shard.positions()), positions)
        and torch.equal(
            shard.order().split(shard.tokens.counts.tolist())[shard.rank], shard.index()
        )
    )


def after_inference(move):
    """Whether gradients are right with a shard that was first used in inference mode."""
    inputs, _ = problem([30, 11], "float32", (4, 2), 16, {})
    results = []
    for infers in (False, True):
        shard, leaves = Shard([30, 11]), [inputs.q, inputs.k, inputs.v]
        leaves = [x.detach().requires_grad_() for x in leaves]
        for mode in (torch.inference_mode(),) * infers + (contextlib.nullcontext(),):
            with mode:
                mine = [shard.take(x) for x in leaves]
                out = shard.gather(attention(*mine, shard, move=move))
        results.append(torch.autograd.grad(out, leaves, inputs.dout))
    return all(map(torch.equal, *results))


def bytes_sent(heads, move):
    """Bytes that this rank sends to others in a forward over 16 tokens of each rank."""
    inputs, _ = problem([64], "float32", heads, 16, {})
    shard, sent = Shard([64]), []
    send = dist.all_to_all_single

    def counted(out, x, receive, counts, **options):
        mine = counts[shard.rank]
        sent.append((sum(counts) - mine) * x[0].numel() * x.element_size())
        return send(out, x, receive, counts, **options)

    dist.all_to_all_single = counted
    try:
        attention(*(shard.take(x) for x in (inputs.q, inputs.k, inputs.v)), shard, move=move)
    finally:
        dist.all_to_all_single = send
    return sum(sent)


def of_sharded(move):
    """Whether DTensors have the results of their local parts, and what is refused, as texts."""
    lengths = [23, 9]
    inputs, _ = problem(lengths, "float32", (4, 2), 16, {})
    ranks = dist.get_world_size()
    group = mesh(*move) if isinstance(move, tuple) else init_device_mesh("cpu", (ranks,))
    shard, places = Shard(lengths, group), [Along(0)] * group.ndim
    local = [shard.take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    given = [DTensor.from_local(x.detach(), group, places).requires_grad_() for x in local]
    dout = shard.take(inputs.dout)
    out, lse = attention(*local, shard, causal=True, return_lse=True)
    right = [out, *torch.autograd.grad(out, local, dout)]
    sharded, sharded_lse = attention(*given, shard, causal=True, return_lse=True)
    assert sharded.shape == inputs.q.shape and sharded_lse.shape == (4, 32)
    sharded.backward(DTensor.from_local(dout, group, places))
    found = [sharded, *(x.grad for x in given)]
    same = all(torch.equal(x.to_local(), y) for x, y in zip(found, right, strict=True))
    same &= torch.equal(sharded_lse.to_local(), lse)
    texts = []
    for wrong in ((given[0], *local[1:]), [x.redistribute(group, [Replicate()] * group.ndim)
                                           for x in given]):  # fmt: skip
        try:
            attention(*wrong, shard)
        except (TypeError, ValueError) as error:
            texts.append(str(error))
    shard = Shard([10], group)  # of which torch has other chunks on two axes
    local = torch.zeros(len(shard), 4, 16)
    uneven = DTensor.from_local(local, group, places, shape=(10, 4, 16), stride=(64, 16, 1))
    try:
        attention(uneven, uneven, uneven, shard)
    except ValueError as error:
        texts.append(str(error))
    return same, texts


def forgotten():
    """The teams whose memory is kept before and after the end of their group."""
    groups = [dist.new_group(), dist.new_group()]
    teams = [transport.Team.of(group) for group in groups]
    peers.found |= {(team, torch.device("cpu")): None for team in teams}
    dist.destroy_process_group(groups[0])
    peers.forget_destroyed()
    return [(team, torch.device("cpu")) in peers.found for team in teams]
