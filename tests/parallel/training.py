"""Training steps of small models of transformers, whose tokens several ranks divide."""

import torch
import torch.distributed as dist
import transformers
from small_transformers import MODELS

from cupyflash import parallel
from cupyflash.integrations.transformers import register

LENGTHS = [21, 34, 1, 8]  # longer than the windows of the models, and no multiple of the ranks


def model_of(name, checkpoint):
    config_name, model_name, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**settings, attn_implementation="cupy_attention")
    model = getattr(transformers, model_name)(config).train()
    with torch.no_grad():  # so that attention is not uniform
        for weight in model.parameters():
            weight.mul_(2)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def tokens():
    """ids, positions and labels of packed sequences."""
    ids = torch.randint(1, 100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    labels = ids.roll(-1)
    labels[torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    return ids, positions, labels


def loss_of(model, ids, positions, labels):
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def alone(name):
    """(loss, {name: gradient}) of one step in which a process computes each sequence by itself.

    Not all models of transformers keep packed sequences apart.
    """
    register()
    model, loss = model_of(name, False), 0
    for sequence in zip(*(x.split(LENGTHS) for x in tokens()), strict=True):
        loss += loss_of(model, *sequence)
    loss.backward()
    return loss.detach(), gradients_of(model)


def divided(name, checkpoint):
    """The same by all ranks: sums of what each has."""
    register()
    model, shard = model_of(name, checkpoint), parallel.Shard(LENGTHS)
    ids, positions, labels = map(shard.take, tokens())
    assert torch.equal(positions, shard.positions())
    with parallel.context(shard):
        loss = loss_of(model, ids, positions, labels)
        loss.backward()
    loss, gradients = loss.detach(), gradients_of(model)
    for x in (loss, *gradients.values()):
        dist.all_reduce(x)
    return loss, gradients


def gradients_of(model):
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def outside_of_the_context(name):
    """The text of the error of a checkpoint that computes attention again outside."""
    register()
    model, shard = model_of(name, True), parallel.Shard(LENGTHS)
    ids = shard.take(torch.ones(sum(LENGTHS), dtype=torch.int64))[None]
    with parallel.context(shard):
        out = model(input_ids=ids, position_ids=shard.positions()[None], use_cache=False)
    try:
        out.logits.sum().backward()
    except RuntimeError as error:
        return str(error)


def refused(name):
    """The text of the error of a padding mask."""
    register()
    model, shard = model_of(name, False), parallel.Shard(LENGTHS)
    ids = shard.take(torch.ones(sum(LENGTHS), dtype=torch.int64))[None]
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    try:
        with parallel.context(shard):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    except NotImplementedError as error:
        return str(error)
