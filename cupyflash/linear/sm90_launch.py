"""Projections of many rows on Hopper, ready to be launched: tensor maps before the pointers."""

import operator
from typing import Any

from ..kernel_config import ITEM_SIZE
from ..kernel_launch import Launch, call_fields, multiprocessors
from ..tensor_map import TensorMaps, TensorMapSpec
from .params import LinearParams, LinearSm90Params
from .sm90_kernels import LinearSm90

PADDING = bytes(LinearSm90Params.padding.size)


class LinearLaunch(Launch):
    """`LinearParams` behind tensor maps, usually at hand; a block for each multiprocessor."""

    def __init__(self, config: LinearSm90, device: int, params: LinearParams) -> None:
        grid = config.grid(params.rows, params.columns, multiprocessors(device))
        super().__init__(config, device, grid, params)
        names = call_fields(params)
        self.mapped = operator.itemgetter(*(names.index(name) for name in config.boxes))
        specs = [tensor_map(config, name, params) for name in config.boxes]
        self.maps = TensorMaps(specs, device)

    def __call__(self, stream: Any, *pointers: int, workspace: int = 0) -> None:
        maps = self.maps[self.mapped(pointers)]
        self.start(stream, maps + self.pack(*pointers) + self.tail + PADDING)


def tensor_map(config: LinearSm90, name: str, params: LinearParams) -> TensorMapSpec:
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
