"""The tile of a kernel with a text of the caller's own, whose registers only the compiler knows."""

from collections.abc import Callable, Iterable

from ... import jit
from ...jit.compiler import target_arch
from ...runtime.gpu import Capability
from .kernels import AttentionKernel, Tile

# Eight registers on the stack cost less than the next smaller tile.
FEW_STACK_BYTES = 32


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
        if built.stack_bytes <= FEW_STACK_BYTES and not built.warnings:
            return tile
        lacking[tile] = built.spill_bytes
    return min(lacking, key=lacking.__getitem__)
