"""Kernels beside attention: configurations and the heuristics that pick them, one module a topic.

They are plain CUDA, most of them the same for every GPU. Each module has
``configurations(capability)``, which yields everything that its operations can launch.
"""

from types import ModuleType

from . import baselines, decode, diffusion, group_norm, linear, linear_sm90, norm, transformer

TOPICS: dict[str, ModuleType] = {
    "norm": norm,
    "group_norm": group_norm,
    "diffusion": diffusion,
    "baselines": baselines,
    "linear": linear,
    "linear_sm90": linear_sm90,
    "decode": decode,
    "transformer": transformer,
}
