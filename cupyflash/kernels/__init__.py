"""Kernels beside attention: configurations and the heuristics that pick them, one module a topic.

They are plain CUDA, most of them the same for every GPU. Each module has
``configurations(capability)``, which yields everything that its operations can launch.
"""

from types import ModuleType

from . import diffusion, group_norm, norm, transformer

TOPICS: dict[str, ModuleType] = {
    "norm": norm,
    "group_norm": group_norm,
    "diffusion": diffusion,
    "transformer": transformer,
}
