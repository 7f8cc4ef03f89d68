"""What this package needs to know of a kernel."""

import ctypes
from typing import Protocol


class Kernel(Protocol):
    """One instantiation of one ``__global__`` template; `cupyflash.runtime.config` makes them.

    Attributes:
        source: path of its file below ``cuda_src/``.
        params: the structure that it takes by value.
        name: of the ``__global__`` function.
        expression: NVRTC's name expression, ``flash_fwd_sm80<bfloat16_t, 128, …>``.
        shared_memory: dynamic shared memory of a block, in bytes.
    """

    source: str
    params: type[ctypes.Structure]
    name: str
    expression: str
    shared_memory: int
