"""cupyflash under the context parallelism of diffusers.

`register` once; models with a `ContextParallelConfig` then move queries and keys as
`cupyflash.parallel` does: ``ulysses_degree`` is the move "heads", ``ring_degree`` the move "keys",
and both together are a mesh of keys and heads. The backend of the model may be any that diffusers
allows there. Nothing else of diffusers changes.
"""

import functools
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import parallel
from ..parallel.context import Context, attention_of_rows

FUNCTION = "cupyflash.integrations.diffusers"
NEEDED = "needs diffusers with ContextParallelConfig (0.36 or newer)"


def register() -> None:
    """Put `attention` in the place of what diffusers computes on several ranks.

    Raises:
        ImportError: no diffusers, or one without context parallelism.
    """
    try:
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise ImportError(f"{FUNCTION}.register: {NEEDED}, got: {error}") from error
    name = "_templated_context_parallel_attention"
    if not hasattr(attention_dispatch, name):
        raise ImportError(f"{FUNCTION}.register: {NEEDED}, got one without {name}")
    setattr(attention_dispatch, name, attention)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    _parallel_config: Any,
    **operators: Any,
) -> Tensor:
    """Attention of (batch, tokens of this rank, heads, head_dim) to the tokens of all ranks.

    Args:
        operators: of diffusers, for one rank; not used.

    Raises:
        NotImplementedError: masks, causal attention (the tokens of ranks have no order here),
            ``return_lse``, and the modes for numbers of tokens that ranks do not divide.
        ValueError: keys of other tokens, heads that the ranks do not divide.
        As `cupyflash.parallel.attention`.
    """
    config = _parallel_config.context_parallel_config
    for name, x in {
        "attn_mask": attn_mask is not None,
        "is_causal": is_causal,
        "return_lse": return_lse,
        "ulysses_anything": config.ulysses_anything,
        "ring_anything": getattr(config, "ring_anything", False),
    }.items():
        if x:
            fact = f"{name} is not built over several ranks, allowed is none"
            raise NotImplementedError(f"{FUNCTION}: {fact}, got one")
    mesh = config._mesh
    shard, move = _shard(mesh, tuple(mesh.get_all_groups()), query.shape[1])
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    options = {"scale": scale, "dropout_p": dropout_p}
    return attention_of_rows(FUNCTION, Context(shard, move), *tensors, **options)


@functools.lru_cache(maxsize=64)
def _shard(
    mesh: DeviceMesh, groups: tuple[ProcessGroup, ...], tokens: int
) -> tuple[parallel.Shard, str]:
    """The shard of as many tokens on each rank, and the move; every rank makes the same ones.

    Args:
        groups: of the mesh, which is equal to one whose groups have been destroyed.
    """
    ring, ulysses = mesh["ring"], mesh["ulysses"]
    lengths = [tokens * ring.size() * ulysses.size()]
    if ring.size() == 1 or ulysses.size() == 1:
        part, move = (ulysses, "heads") if ring.size() == 1 else (ring, "keys")
        return parallel.Shard(lengths, part, zigzag=False), move
    both = mesh["ring", "ulysses"]
    pair = [both.get_group("ring"), both.get_group("ulysses")]
    names = ("keys", "heads")
    both = DeviceMesh.from_group(pair, both.device_type, mesh=both.mesh, mesh_dim_names=names)
    return parallel.Shard(lengths, both, zigzag=False), "auto"
