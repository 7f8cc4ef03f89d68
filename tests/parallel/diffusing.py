"""A step of a diffusion transformer whose tokens several ranks divide."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cupyflash
from cupyflash.integrations.diffusers import _shard, attention, register


def model_and_inputs():
    import diffusers

    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    shapes = {
        "hidden_states": (2, 32, 4), "encoder_hidden_states": (2, 8, 32),
        "pooled_projections": (2, 32), "timestep": (2,),
    }  # fmt: skip
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    inputs["img_ids"] = torch.arange(96.0).reshape(32, 3)
    inputs["txt_ids"] = torch.zeros(8, 3)
    return model, inputs


def step(ring=0, ulysses=0, **anything):
    """(loss, out, {name: gradient}); of several ranks the sums of gradients.

    diffusers gathers out on all ranks, and each hands down the gradient of its own tokens.
    """
    import diffusers

    model, inputs = model_and_inputs()
    if ring:
        register()
        torch.accelerator.device_count = lambda: 1  # diffusers asks for a GPU of each rank
        config = diffusers.ContextParallelConfig(
            ring_degree=ring, ulysses_degree=ulysses, **anything
        )
        model.enable_parallelism(config=config)
    out = model(**inputs, return_dict=False)[0]
    loss = out.square().sum()
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    if ring:
        assert _shard.cache_info().currsize, "attention of diffusers has run"
        for x in gradients.values():
            dist.all_reduce(x)
    return loss.detach(), out.detach(), gradients


def both_degrees():
    """The largest difference of attention of two by two ranks from that of one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    config = SimpleNamespace(_mesh=mesh, ulysses_anything=False, ring_anything=False)
    q, k, v = torch.randn(3, 2, 40, 4, 16, generator=torch.Generator().manual_seed(0))
    mine = slice(10 * dist.get_rank(), 10 * (dist.get_rank() + 1))
    config = SimpleNamespace(context_parallel_config=config)
    out = attention(*(x[:, mine] for x in (q, k, v)), _parallel_config=config)
    return (out - cupyflash.attention(q, k, v)[:, mine]).abs().max().item()


def refused():
    """The text of the error of a mode that is not built."""
    try:
        step(1, dist.get_world_size(), ulysses_anything=True)
    except NotImplementedError as error:
        return str(error)
