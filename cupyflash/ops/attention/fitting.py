"""The tile of a kernel with a text of the caller's own, whose registers only the compiler knows."""

from collections.abc import Callable, Iterable

from ... import jit
from ...jit.compiler import target_arch
from ...runtime.gpu import Capability
from .kernels import AttentionKernel, Tile

# Eight registers on the stack cost less than the next smaller tile, if that is all: 112 bytes that
# are stored or loaded took 8 % of the forward of a gate, and 96 nothing that was seen.
FEW_STACK_BYTES, FEW_SPILL_BYTES = 32, 96


def fitting_tile(
    tiles: Iterable[Tile], kernel_of: Callable[[Tile], AttentionKernel], capability: Capability
) -> Tile:
    """The first tile that leaves the text enough registers, else the one that lacks least.

    The kernels are compiled one after the other until one fits; the cache remembers them.

    Args:
        tiles: the fastest first.
    """
    arch, lacking = target_arch(capability), {}
    for tile in tiles:
        built = jit.build(kernel_of(tile), arch)
        few = built.stack_bytes <= FEW_STACK_BYTES and built.spill_bytes <= FEW_SPILL_BYTES
        if few and not built.warnings:
            return tile
        lacking[tile] = built.spill_bytes
    return min(lacking, key=lacking.__getitem__)
