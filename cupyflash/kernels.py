"""Kernels beside attention: configurations and the heuristics that pick them, one module a topic.

They are plain CUDA, most of them the same for every GPU. Each module has
``configurations(capability)``, which yields everything that its operations can launch.
"""

from types import ModuleType

from .baselines import kernels as baselines
from .decode import kernels as decode
from .diffusion import kernels as diffusion
from .linear import few_sm90_kernels as linear_few_sm90
from .linear import kernels as linear
from .linear import sm90_kernels as linear_sm90
from .norm import group_norm_kernels as group_norm
from .norm import kernels as norm
from .transformer import kernels as transformer

TOPICS: dict[str, ModuleType] = {
    "norm": norm,
    "group_norm": group_norm,
    "diffusion": diffusion,
    "baselines": baselines,
    "linear": linear,
    "linear_sm90": linear_sm90,
    "linear_few_sm90": linear_few_sm90,
    "decode": decode,
    "transformer": transformer,
}
