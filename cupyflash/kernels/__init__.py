"""Kernels beside attention: configurations and the heuristics that pick them, one module a topic.

They are plain CUDA, the same for every GPU. Each module has ``configurations(capability)``, which
yields everything that its operations can launch.
"""

from types import ModuleType

from . import decode, diffusion, group_norm, norm

TOPICS: dict[str, ModuleType] = {
    "norm": norm,
    "group_norm": group_norm,
    "diffusion": diffusion,
    "decode": decode,
}
