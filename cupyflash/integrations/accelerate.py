"""cupyflash under the context parallelism of accelerate (``ParallelismConfig(cp_size=...)``).

`register` before ``Accelerator.prepare``; ``accelerator.maybe_context_parallel`` then divides its
buffers among the ranks of "cp" and computes attention by `cupyflash.parallel`. Windows and sinks of
each layer stay where the model has ``attn_implementation="cupy_attention"``: accelerate's hooks,
which take all masks away and refuse such models, are left out. Positions and labels are
buffers as well, because the model would count positions from 0 on each rank.
"""

import functools
from typing import Any

from ..parallel.buffers import context_parallel

FUNCTION = "cupyflash.integrations.accelerate"
NEEDED = "needs accelerate with ParallelismConfig.cp_size (1.10 or newer)"
METHOD = "_prepare_cp"  # of Accelerator, which makes the block of maybe_context_parallel


def register() -> None:
    """Put `context_parallel` in the place of torch's in accelerate.

    Raises:
        ImportError: no accelerate, or one without context parallelism.
    """
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ImportError(f"{FUNCTION}.register: {NEEDED}, got: {error}") from error
    if not hasattr(Accelerator, METHOD):
        raise ImportError(f"{FUNCTION}.register: {NEEDED}, got one without {METHOD}")
    setattr(Accelerator, METHOD, prepare)


def prepare(accelerator: Any, *arguments: Any) -> tuple[Any, ...]:
    """What `Accelerator.prepare` calls with models, optimizers and loaders, which stay as they are.

    Their order of ranks is that of the axis "cp" of the accelerator's mesh.
    """
    mesh = accelerator.torch_device_mesh["cp"]
    accelerator._cp_context = functools.partial(context_parallel, mesh=mesh)
    return arguments
