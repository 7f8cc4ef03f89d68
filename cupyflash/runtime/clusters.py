"""How many clusters of blocks a GPU runs at once: no cluster lies in two GPCs, so not all fit."""

import ctypes
import functools
import struct
from ctypes import c_char_p, c_void_p

from .. import jit
from . import driver
from .config import KernelConfig
from .dependent_launch import pack_config
from .gpu import all_multiprocessors, multiprocessors

CLUSTER_DIMENSION = 4  # of CUlaunchAttributeID in cuda.h
pack_attribute = struct.Struct("i4x3I52x").pack  # CUlaunchAttribute: id, blocks of a cluster


def clusters_at_once(config: KernelConfig, device: int) -> int:
    """Clusters of a kernel, with ``cluster`` blocks each, that a device runs at the same time.

    Blocks alone are clusters of one, and ``blocks`` of them run on a multiprocessor.

    Raises:
        RuntimeError: the driver does not say.
    """
    found = multiprocessors(device)
    if config.cluster == 1:
        return config.blocks * found
    return max(1, _clusters_of_all(config, device) * found // all_multiprocessors(device))


@functools.cache
def _clusters_of_all(config: KernelConfig, device: int) -> int:
    """On the whole GPU."""
    import cupy

    function = jit.load(config, device)
    attribute = pack_attribute(CLUSTER_DIMENSION, config.cluster, 1, 1)
    at = ctypes.cast(attribute, c_void_p).value
    block = config.threads, 1, 1, config.shared_memory
    launch = pack_config(config.cluster, 1, 1, *block, 0, at, 1)
    count = ctypes.c_int()
    ask = driver.function("cuOccupancyMaxActiveClusters", c_void_p, c_void_p, c_char_p)
    with cupy.cuda.Device(device):
        status = driver.with_context(ask, ctypes.byref(count), function.ptr, launch)
    if status or not count.value:
        got = f"status {status}, {count.value} clusters of {config.cluster} blocks"
        raise RuntimeError(f"cupyflash: cuOccupancyMaxActiveClusters failed with {got}")
    return count.value
