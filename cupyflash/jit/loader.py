"""From a configuration to a function on a device."""

import threading
from typing import TYPE_CHECKING

from .arch import target_arch
from .builder import build
from .kernel import Kernel

if TYPE_CHECKING:
    import cupy

_functions: dict[tuple[Kernel, int], "cupy.cuda.Function"] = {}
_lock = threading.Lock()


def load(config: Kernel, device_id: int) -> "cupy.cuda.Function":
    """The kernel of ``config``, loaded on a device and ready to launch with its shared memory.

    Compiles at most once a process, also when many threads ask at once. Raises as
    `cupyflash.jit.build` does, and RuntimeError for a GPU that NVRTC does not know.
    """
    function = _functions.get((config, device_id))
    if function is None:
        with _lock:
            function = _functions.get((config, device_id))
            if function is None:
                function = _functions[config, device_id] = _load(config, device_id)
    return function


def _load(config: Kernel, device_id: int) -> "cupy.cuda.Function":
    import cupy

    device = cupy.cuda.Device(device_id)
    built = build(config, target_arch(divmod(int(device.compute_capability), 10)))
    with device:
        kernel = cupy.RawModule(path=str(built.path)).get_function(built.lowered_name)
        kernel.max_dynamic_shared_size_bytes = config.shared_memory
        return kernel.kernel
