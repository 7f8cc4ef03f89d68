"""DTensors whose tokens are divided as a shard says: their local parts, and results like them.

The tokens of such a tensor are in the order of ``shard.order``: those of rank 0, of rank 1, …
"""

from typing import Any

import torch
from torch import Tensor

from ..runtime.checks import short
from .pieces import FUNCTION
from .shard import Shard


class Sharding:
    """The mesh of q, k and v, where they are DTensors.

    Raises:
        TypeError: some are, and some are not.
        ValueError: they have other meshes, or their tokens are not divided among the ranks of the
            shard, in its order; a shard that gives ranks other numbers of tokens than torch does,
            which would take some for padding as it puts a DTensor together.
    """

    def __init__(self, shard: Shard, *tensors: Any) -> None:
        from torch.distributed.tensor import Shard as Along

        meshes = [getattr(x, "device_mesh", None) for x in tensors]
        if None in meshes:
            fact = "q, k and v must all be DTensors, or none of them"
            raise TypeError(f"{FUNCTION}: {fact}, got {[type(x).__name__ for x in tensors]}")
        self.shard, self.mesh = shard, meshes[0]
        for x in tensors:
            ranks = x.device_mesh.mesh.flatten().tolist()
            if ranks != shard.members or any(place != Along(0) for place in x.placements):
                fact = f"DTensors must be Shard(0) on each axis of a mesh of ranks {shard.members}"
                raise ValueError(f"{FUNCTION}: {fact}, got {x.placements} on {ranks}")
        counts, wanted = shard.tokens.counts.tolist(), _chunks(shard.total, self.mesh.shape)
        if counts != wanted:
            fact = f"a shard of DTensors must have {short(wanted)} tokens on its ranks, as torch"
            raise ValueError(
                f"{FUNCTION}: {fact} has, got {short(counts)}; use their local tensors"
            )

    def result(self, x: Tensor | None, tokens: int) -> Any:
        """A DTensor of this local part, which has the tokens along the axis ``tokens``."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Along

        if x is None:
            return None
        x = x.contiguous()
        shape = list(x.shape)
        shape[tokens] = self.shard.total
        stride = x.new_empty(shape, device="meta").stride()
        places = [Along(tokens)] * self.mesh.ndim
        shape = torch.Size(shape)
        return DTensor.from_local(x, self.mesh, places, shape=shape, stride=stride)


def _chunks(total: int, sizes: tuple[int, ...]) -> list[int]:
    """The tokens of each rank where torch divides them along all axes of a mesh."""
    if not sizes:
        return [total]
    most = -(-total // sizes[0])
    parts = (max(0, min(most, total - i * most)) for i in range(sizes[0]))
    return [count for part in parts for count in _chunks(part, sizes[1:])]


def sharding_of(shard: Shard, *tensors: Any) -> Sharding | None:
    """The sharding that DTensors among these have; None where none is a DTensor."""
    if any(hasattr(x, "device_mesh") for x in tensors):
        return Sharding(shard, *tensors)
    return None
