"""Projections of many rows on Hopper, ready to be launched: tensor maps before the pointers."""

import operator
import struct
from typing import Any

from ..runtime.config import ITEM_SIZE
from ..runtime.gpu import multiprocessors
from ..runtime.launch import Launch, call_fields
from ..runtime.structs import bytes_behind, header
from ..runtime.tensor_map import TensorMaps, TensorMapSpec
from .few_sm90_kernels import LinearFewSm90
from .sm90_kernels import LinearSm90

structs = header("linear/params.cuh")


class LinearLaunch(Launch):
    """`LinearParams` behind tensor maps, usually at hand."""

    behind = bytes_behind(structs.LinearSm90Params, "base")  # the parameters

    def __init__(
        self, config: LinearSm90 | LinearFewSm90, device: int, params: structs.LinearParams
    ) -> None:
        grid = config.grid(params.rows, params.columns, multiprocessors(device))
        super().__init__(config, device, grid, params)
        self.tail += self.behind
        names = call_fields(params)
        self.mapped = operator.itemgetter(*(names.index(name) for name in config.boxes))
        specs = [tensor_map(config, name, params) for name in config.boxes]
        self.maps = TensorMaps(specs, device)

    def __call__(self, stream: Any, *pointers: int, workspace: int = 0) -> None:
        maps = self.maps[self.mapped(pointers)]
        self.start(stream, maps + self.pack(*pointers) + self.tail)


class LinearFewLaunch(LinearLaunch):
    """As many stages as shared memory has room for, no more of it than that, threads as needed."""

    def __init__(
        self, config: LinearFewSm90, device: int, params: structs.LinearParams, norm: bool
    ) -> None:
        stages = config.stages(params.columns, params.depth, norm, multiprocessors(device))
        self.behind = struct.pack("i", stages) + bytes_behind(structs.LinearFewSm90Params, "stages")
        super().__init__(config, device, params)
        self.block = (config.norm_threads if norm else config.threads,)
        self.shared_memory = config.smem_bytes(stages, params.depth, norm)


def tensor_map(
    config: LinearSm90 | LinearFewSm90, name: str, params: structs.LinearParams
) -> TensorMapSpec:
    """The map of one of the arrays; an absent one has address 0 and so no map."""
    rows, columns, depth = params.rows, params.columns, params.depth
    width, height, stride = {
        "x": (depth, rows, params.x_stride),
        "weight": (depth, columns, params.weight_stride),
        "gate_weight": (depth, columns, params.gate_stride),
        "residual": (columns, rows, params.residual_stride),
        "out": (columns, rows, params.out_stride),
    }[name]
    # Of a single row the stride does not matter, but it must be valid.
    step = (stride if height > 1 else width) * ITEM_SIZE[config.dtype]
    dims, steps = (width, height, 1, 1), (step, step, step)
    return TensorMapSpec(config.dtype, dims, steps, config.boxes[name])
