"""torch's scaled_dot_product_attention in `parallel.context`, beside one process."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from cupyflash import flash_attn_varlen_func, parallel
from cupyflash.integrations import accelerate

LENGTHS = [37, 14]


def rows(batch, is_causal, move):
    """Largest differences of out, dq, dk and dv of this rank, and whether a checkpoint has them."""
    source = torch.Generator().manual_seed(0)
    shard = parallel.Shard(LENGTHS)
    heads = 4, 2, 2, 4
    whole = [torch.randn(batch, h, shard.total, 16, generator=source) for h in heads]
    parts = zip(*(x.split(LENGTHS, 2) for x in whole), strict=True)
    right = [torch.cat(x, 2) for x in zip(*(results(sdpa, is_causal, *x) for x in parts))]
    mine = [shard.take(x, 2) for x in whole]
    with parallel.context(shard, move=move):
        found = results(sdpa, is_causal, *mine)

        def again(*tensors, **options):
            return checkpoint(
                lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, **options),
                *tensors,
                use_reentrant=False,
            )

        same = all(map(torch.equal, results(again, is_causal, *mine), found))
    return [(x - shard.take(y, 2)).abs().max().item() for x, y in zip(found, right)], same


def results(function, is_causal, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = function(q, k, v, is_causal=is_causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def dropped(move):
    """The largest difference to dropout of one process that draws the same seed."""
    shard, source = parallel.Shard(LENGTHS), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, shard.total, 16, generator=source) for _ in range(3))
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    torch.manual_seed(3)
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    options = {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS), "dropout_p": 0.4}
    right = flash_attn_varlen_func(*flat, ends, ends, **options)
    torch.manual_seed(3)
    with parallel.context(shard, move=move):
        found = sdpa(*(shard.take(x, 2) for x in (q, k, v)), dropout_p=0.4)
    return (found[0].transpose(0, 1) - shard.take(right)).abs().max().item()


def refused(name):
    """The text of the error of a call in the context."""
    shard = parallel.Shard(LENGTHS)
    q = torch.zeros(1, 2, len(shard), 16)
    arguments, options = {
        "mask": ((q, q, q, torch.zeros(len(shard), len(shard))), {}),
        "tokens": ((q, q[:, :, 1:], q[:, :, 1:]), {}),
        "heads": ((q, q[:, :1], q[:, :1]), {}),
    }[name]
    try:
        with parallel.context(shard):
            sdpa(*arguments, **options)
    except (NotImplementedError, ValueError) as error:
        return str(error)


def buffers(lengths):
    """Whether the block of torch's signature has the results of one process, and restores."""
    total = sum(lengths or [64])
    made = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, total, 4, 16, generator=made) for _ in range(4)]
    ids = torch.arange(2 * total).reshape(2, total)
    right = results(packed(lengths or [total]), True, *(x.transpose(1, 2) for x in whole))
    given = [ids.clone(), *(x.clone() for x in whole)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block = parallel.context_parallel(
        mesh, buffers=given, buffer_seq_dims=[1] * 5, no_restore_buffers={given[0]}, lengths=lengths
    )
    with block as shard:
        same = torch.equal(given[0], shard.take(ids, 1))
        mine = [x.clone().transpose(1, 2) for x in given[1:]]
        found = results(sdpa, True, *mine)
    same &= torch.equal(given[0], shard.take(ids, 1))
    same &= all(map(torch.equal, given[1:], whole))
    return [(x - shard.take(y, 2)).abs().max().item() for x, y in zip(found, right)], same


def packed(lengths):
    def attention(*tensors, **options):
        rows = zip(*(x.split(lengths, 2) for x in tensors), strict=True)
        return torch.cat([sdpa(*some, **options) for some in rows], 2)

    return attention


def groups_in_turn():
    """The largest differences in blocks of two meshes; the groups of the first one are gone."""
    source, errors = torch.Generator().manual_seed(0), []
    whole = torch.randn(1, 2, 24, 16, generator=source)
    right = sdpa(whole, whole, whole, is_causal=True)
    for _ in range(2):
        group, x = dist.new_group(), whole.clone()
        mesh = DeviceMesh.from_group(group, "cpu")
        with parallel.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]) as shard:
            out = shard.gather(sdpa(x, x, x, is_causal=True), 2)
        errors.append((out - right).abs().max().item())
        dist.destroy_process_group(group)
    return errors


def wrong_buffers(name):
    """The text of the error."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, y = torch.zeros(8, 3), torch.zeros(8)
    options = {
        "none": {},
        "dims": {"buffers": [x], "buffer_seq_dims": [0, 1]},
        "tokens": {"buffers": [x, y], "buffer_seq_dims": [1, 0]},
        "lengths": {"buffers": [x], "buffer_seq_dims": [0], "lengths": [5, 4]},
        "axis": {"buffers": [x, y], "buffer_seq_dims": [0, 1]},
        "gradient": {"buffers": [x, torch.zeros(8, requires_grad=True)], "buffer_seq_dims": [0, 0]},
        "no buffer": {"buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": {y}},
    }[name]
    try:
        with parallel.context_parallel(mesh, **options):
            pass
    except ValueError as error:
        assert x.shape == (8, 3)  # nothing has been changed
        return str(error)


class Accelerating:
    """What `integrations.accelerate.prepare` needs of an accelerator."""

    def __init__(self):
        self.torch_device_mesh = init_device_mesh(
            "cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)
        )


def accelerated():
    """Whether the block of an accelerator divides its buffers."""
    accelerator = Accelerating()
    assert accelerate.prepare(accelerator, "model") == ("model",)
    ids = torch.arange(12)[None]
    with accelerator._cp_context(buffers=[ids], buffer_seq_dims=[1], no_restore_buffers=None):
        inside = ids.shape
    return inside == (1, 6) and torch.equal(ids, torch.arange(12)[None])
