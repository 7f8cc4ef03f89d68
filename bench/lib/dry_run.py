"""Which kernels a call would launch on a GPU, found on a machine without one.

The plans of the package are made as on that GPU, by default one of 132 multiprocessors of Hopper
(H100, H200), for uninitialised tensors in the memory of the host; loading and launching of kernels
are taken out.
"""

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from cupyflash import jit
from cupyflash.runtime import scratch
from cupyflash.runtime.gpu import Card

HOPPER = Card((9, 0), 132, 50 << 20)


def nothing(config: Any, device: int) -> Callable[..., None]:
    """Stands for `jit.load`, and for a kernel that does nothing."""
    return lambda *arguments, **options: None


@contextlib.contextmanager
def hopper(card: Card = HOPPER, load: Callable[[Any, int], Any] = nothing) -> Iterator[None]:
    """Calls with torch's CPU tensors make their plans for this GPU and launch nothing.

    In a process that does nothing else: the package remembers what it was told of the GPU.

    Args:
        load: stands for `jit.load`: the function that takes the launches of a kernel.
    """
    import cupy
    import torch

    from bench.lib import data
    from cupyflash.runtime import gpu, launch, tensor_map, torch_library

    library = torch_library.TorchLibrary
    view = library.view
    with contextlib.ExitStack() as stack:
        change = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        change(data, "DEVICE", "cpu")
        change(jit, "load", load)
        change(torch.Tensor, "is_cuda", property(lambda self: self.device.type == "cpu"))
        change(library, "view", lambda self, x: view(self, x)._replace(device=0))
        change(library, "device", lambda self, x: 0)
        change(library, "gpu_allocator", lambda self: torch._C._dynamo.guards._empty_strided_cpu)
        change(library, "stream", lambda self, device: torch_library.raw_stream(0))
        change(cupy.cuda, "Device", _device(card))
        change(cupy.cuda.runtime, "getDevice", lambda: 0)
        change(cupy.cuda.runtime, "setDevice", lambda device: None)
        change(cupy.cuda.runtime, "memsetAsync", lambda *arguments: None)
        change(gpu.driver, "multiprocessor_limit", lambda: None)
        change(
            launch,
            "_clusters_of_all",
            lambda config, device: card.multiprocessors // config.cluster,
        )
        change(launch, "dependent_possible", lambda capability: False)
        change(tensor_map.TensorMapSpec, "encode", lambda self, pointer: bytes(128))
        change(scratch, "TileCounters", lambda device, width=scratch.COUNTERS: _Counters(width))
        yield


def _device(card: Card) -> type:
    """Returns the class of CuPy's devices, all of this kind."""

    class Device(contextlib.nullcontext):
        compute_capability = "{}{}".format(*card.capability)
        attributes = types.MappingProxyType(
            {
                "MultiProcessorCount": card.multiprocessors,
                "L2CacheSize": card.l2_bytes,
                "CooperativeLaunch": 1,
            }
        )

    return Device


class _Counters:
    """The counters of a device, which are 0 between launches; emulated kernels count on them."""

    def __init__(self, width: int) -> None:
        self.memory = (ctypes.c_int * width)()

    def __call__(self, stream: Any) -> bytes:
        return scratch.pack_pointer(ctypes.addressof(self.memory))

    def address(self, stream: Any, library: Any, like: Any, count: int = 0) -> tuple[int, Any]:
        if count <= len(self.memory):
            return ctypes.addressof(self.memory), None
        own = library.zeros_int32(count, like)
        return library.pointer(own), own

    def is_capturing(self, stream: Any) -> bool:
        return False
