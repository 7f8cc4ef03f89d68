"""The hidden activations of a gated MLP from gate and up, and their gradients, in one pass each.

Separate operations read and write five arrays forward and nine backward; these read and write three
and five, and the backward needs no activated gate. All arrays are dense, of one shape, on a GPU.
"""

import math
from typing import Any

from ..runtime.array import Array, View
from ..runtime.checks import require_grid
from ..runtime.config import ITEM_SIZE
from ..runtime.launch import Launch
from ..runtime.operation import Plan, Plans
from ..runtime.structs import header
from . import kernels

structs = header("linear/params.cuh")

_plans = Plans(wide=3)


def forward(library: Any, activation: str, gate: Array, up: Array) -> Array:
    """activation(gate) * up."""
    return _results(library, activation, gate, up)[0]


def backward(
    library: Any, activation: str, gate: Array, up: Array, dout: Array
) -> tuple[Array, Array]:
    """(dgate, dup)."""
    return _results(library, activation, gate, up, dout)


def _results(library: Any, activation: str, *arrays: Array) -> tuple[Array, ...]:
    plan, pointers = _plans.find(
        library,
        arrays,
        activation,
        lambda: library.view(arrays[0]),
        lambda view, aligned: GatePlan(library, activation, view, aligned, len(arrays) == 3),
    )
    return plan(arrays[0], pointers)


class GatePlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, library: Any, activation: str, x: View, aligned: bool, backward: bool
    ) -> None:
        super().__init__(x.device)
        self.library, self.shape, self.strides = library, x.shape, x.strides
        self.num_results, self.launch = 1 + backward, None
        size = math.prod(x.shape)
        if not size:
            return
        vector = aligned and size * ITEM_SIZE[x.dtype] % 16 == 0
        config = kernels.gate(backward, x.dtype, activation, vector)
        grid = require_grid("mlp", config.grid(size), x.shape)
        self.launch = Launch(config, x.device, grid, structs.GateParams(size=size))

    def run(self, x: Array, pointers: list[int]) -> tuple[Array, ...]:
        """``pointers`` of gate, up and, backward, of dout."""
        library = self.library
        results = tuple(library.empty(self.shape, self.strides, x) for _ in range(self.num_results))
        if self.launch is not None:
            to = [library.pointer(y) for y in results]
            inputs = pointers if len(pointers) == 3 else [*pointers, 0]
            outputs = [0, *to] if self.num_results == 2 else [*to, 0, 0]
            self.launch(library.stream(self.device_id), *inputs, *outputs)
        return results
