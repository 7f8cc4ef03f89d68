"""The tile that the kernels of a pass have: the tuned one if there is one, else the built-in.

This is consulted once for each plan. A tile of the tuning file is used only if it is one of the
candidates of the backend and its kernel compiles without spills, as every built-in one does.
"""

from ... import jit
from ...jit.compiler import target_arch
from ...runtime import tuning
from ...runtime.config import KernelConfig
from ...runtime.gpu import architecture
from .backends import BACKENDS
from .kernels import Tile
from .kind import Kind

STATIC_BYTES = 3 * 1024  # the most of shared memory for constants, barriers


def key_of(backend: str, kind: Kind, backward: bool) -> str:
    """The key in the tuning file: "attention fwd sm90 bfloat16 128 masked short=2", say."""
    features = [
        name if value is True else f"{name}={value}"
        for name, value in kind.features._asdict().items()
        if value
    ]
    words = ("attention", "bwd" if backward else "fwd", backend, kind.dtype, kind.head_dim)
    return " ".join(map(str, (*words, *features)))


def tile_of(backend: str, kind: Kind, device: int, *, backward: bool) -> Tile | None:
    """The tile of the tuning file, or None for the built-in choice."""
    key = key_of(backend, kind, backward)
    tile = tuning.tile(device, key)
    if tile is None:
        return None
    reason = _refusal(backend, kind, backward, tile)
    if reason:
        tuning.ignored(key, reason)
    return None if reason else tile


def candidates(backend: str, kind: Kind, backward: bool) -> dict[Tile, KernelConfig]:
    """The main kernel of a pass by tile, where its shared memory suffices; the built-in one first.

    It is empty for a pass that has one kernel only.
    """
    of = BACKENDS[backend]
    found = of.backward_candidates(kind) if backward else of.forward_candidates(kind)
    limit = architecture(kind.capability).shared_memory * 1024 - STATIC_BYTES
    built_in = next(iter(found), None)
    return {tile: x for tile, x in found.items() if x.shared_memory <= limit or tile == built_in}


def fault(built: jit.Built) -> str:
    """Why a compiled kernel is no candidate, or ""."""
    if built.spill_bytes or built.stack_bytes:
        return "it spills registers"
    return "the compiler complains about it" if built.warnings else ""


def _refusal(backend: str, kind: Kind, backward: bool, tile: Tile) -> str:
    """Why a tile is not used, or ""."""
    config = candidates(backend, kind, backward).get(tile)
    if config is None:
        return f"{tile} is no tile of this kernel"
    try:
        return fault(jit.build(config, target_arch(kind.capability)))
    except RuntimeError as error:  # it does not compile, or CUPYFLASH_NO_JIT forbids to
        return str(error).partition("\n")[0]
