"""Which tile the kernels of a pass have: the tuned one if there is one, else the built-in choice.

This is consulted once for each plan. A tile of the tuning file is used only if it is one of the
candidates of the backend and its kernel compiles without spills, as every built-in one does.
"""

from types import ModuleType
from typing import Any, NamedTuple

from .. import jit
from ..jit.compiler import target_arch
from ..runtime import tuning
from ..runtime.config import KernelConfig
from ..runtime.gpu import Capability, architecture
from .backends.config import Tile
from .problem import Features

STATIC_BYTES = 3 * 1024  # of shared memory, at most: constants, barriers


class Choice(NamedTuple):
    """The built-in choice depends on these arguments of ``forward`` of a backend."""

    dtype: str
    head_dim: int
    features: Features
    capability: Capability


def key_of(backend: ModuleType, choice: Choice, backward: bool) -> str:
    """The key in the tuning file: "attention fwd sm90 bfloat16 128 masked short=2", say."""
    features = [
        name if value is True else f"{name}={value}"
        for name, value in choice.features._asdict().items()
        if value
    ]
    name = backend.__name__.rpartition(".")[2]
    words = ("attention", "bwd" if backward else "fwd", name, choice.dtype, choice.head_dim)
    return " ".join(map(str, (*words, *features)))


def kernels(
    backend: ModuleType,
    choice: Choice,
    device: int,
    *,
    backward: bool,
    tile: Tile | None = None,
) -> tuple[KernelConfig, ...]:
    """The kernels of a pass in launch order.

    Args:
        tile: use this one of `candidates`, whatever the tuning file says.
    """
    if tile is None:
        key = key_of(backend, choice, backward)
        tile = tuning.tile(device, key)
        if tile is not None and (reason := _refusal(backend, choice, backward, tile)):
            tuning.ignored(key, reason)
            tile = None
    tiles = () if tile is None else (tile,)
    return backend.backward(*choice, *tiles) if backward else (backend.forward(*choice, *tiles),)


def candidates(backend: ModuleType, choice: Choice, backward: bool) -> dict[Tile, KernelConfig]:
    """The main kernel of a pass by tile, where its shared memory suffices; the built-in one first.

    It is empty for a pass that has one kernel only.
    """
    tiles = backend.candidates(*choice[1:], backward=backward)
    found = {tile: _main(backend, choice, backward, tile) for tile in tiles}
    limit = architecture(choice.capability).shared_memory * 1024 - STATIC_BYTES
    return {tile: x for tile, x in found.items() if x.shared_memory <= limit or tile == tiles[0]}


def fault(built: jit.Built) -> str:
    """Why a compiled kernel is no candidate, or ""."""
    if built.spill_bytes or built.stack_bytes:
        return "it spills registers"
    return "the compiler complains about it" if built.warnings else ""


def _refusal(backend: ModuleType, choice: Choice, backward: bool, tile: Tile) -> str:
    """Why a tile is not used, or ""."""
    config = candidates(backend, choice, backward).get(tile)
    if config is None:
        return f"{tile} is no tile of this kernel"
    try:
        return fault(jit.build(config, target_arch(choice.capability)))
    except RuntimeError as error:  # it does not compile, or CUPYFLASH_NO_JIT forbids to
        return str(error).partition("\n")[0]


def _main(backend: ModuleType, choice: Choice, backward: bool, tile: Tile) -> Any:
    """The one kernel of a pass that has tiles of this size."""
    if not backward:
        return backend.forward(*choice, tile)
    return backend.backward(*choice, tile)[1]
