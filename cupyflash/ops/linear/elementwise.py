"""The elementwise kernels that torch's autograd launches apart from a product.

The gate of an MLP and its gradients take one pass each. Separate operations read and write five
arrays forward and nine backward; these read and write three and five, and the backward needs no
activated gate. The gradient of the rotary embedding is a rotation by the opposite angles.
"""

import math
from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.launch import Launch
from ...runtime.operation import Plan, Plans
from ...runtime.structs import header
from . import kernels
from .checks import check_rotation
from .launches import rotary_of
from .options import Arrays, Options

structs = header("linear/params.cuh")

POSITIONS = Arrays._fields.index("positions")
_gates, _rotations = Plans(wide=3), Plans()


def gate(
    library: Any, activation: str, gate: Array, up: Array, dout: Array | None = None
) -> tuple[Array, ...]:
    """(activation(gate) * up,), or with ``dout`` the gradients (dgate, dup).

    All arrays are dense, of one shape, on a GPU.
    """
    arrays = (gate, up, dout)
    key, pointers = _gates.key(library, arrays, activation)
    plan = _gates.get(key)
    if plan is None:
        view = library.view(gate)
        plan = _gates.add(key, GatePlan(library, activation, view, key[-1], dout is not None))
    return plan(gate, pointers)


class GatePlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, library: Any, activation: str, x: View, aligned: bool, backward: bool
    ) -> None:
        super().__init__(x.device)
        self.library, self.shape, self.strides = library, x.shape, x.strides
        self.backward, self.launch = backward, None
        size = math.prod(x.shape)
        if not size:
            return
        vector = aligned and size * ITEM_SIZE[x.dtype] % 16 == 0
        config = kernels.gate(backward, x.dtype, activation, vector)
        grid = require_grid("mlp", config.grid(size), x.shape)
        self.launch = Launch(config, x.device, grid, structs.GateParams(size=size))

    def run(self, like: Array, pointers: list[int]) -> tuple[Array, ...]:
        """One launch; ``pointers`` of gate, up and dout, which come first in the struct."""
        library = self.library
        results = tuple(
            library.empty(self.shape, self.strides, like) for _ in range(1 + self.backward)
        )
        if self.launch is not None:
            to = [library.pointer(y) for y in results]
            to = [0, *to] if self.backward else [*to, 0, 0]  # out, dgate, dup
            argument = self.launch.argument(*pointers, *to)
            self.launch.start(library.stream(self.device_id), argument)
        return results


def rotate(
    library: Any, x: Array, cos: Array, sin: Array, positions: Array | None, options: Options
) -> None:
    """Rotate the heads of q and k in x (..., columns), contiguous on a GPU, where they are.

    Raises:
        As `check_rotation`: what torch traces comes here unchecked.
    """
    key, _ = _rotations.key(library, (x, cos, sin, positions), options)
    plan = _rotations.get(key)
    if plan is None:
        views = check_rotation(library, x, (cos, sin, positions), options)
        plan = _rotations.add(key, RotaryPlan(library, views, options))
    plan(x, cos, sin, positions)


class RotaryPlan(Plan):
    """The kernel for one signature."""

    def __init__(self, library: Any, views: Mapping[str, View], options: Options) -> None:
        x = views["x"]
        super().__init__(x.device)
        self.library, self.launch = library, None
        if 0 in x.shape:
            return
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        rotary = rotary_of(columns, views, options, x.shape[-2])
        params = structs.LinearParams(rows=rows, columns=columns, out_stride=columns, rotary=rotary)
        config = kernels.RotaryEmbedding(x.dtype)
        grid = require_grid("qkv_projection", config.grid(rows, rotary), x.shape)
        self.launch = Launch(config, x.device, grid, params)

    def run(self, x: Array, cos: Array, sin: Array, positions: Array | None) -> None:
        if self.launch is None:
            return
        library, pointer = self.library, self.library.pointer
        if positions is not None:
            positions = library.contiguous(positions)  # lives until the launch
        angles = pointer(cos), pointer(sin), 0 if positions is None else pointer(positions)
        argument = self.launch.argument(*[0] * (POSITIONS - 2), *angles, pointer(x))
        self.launch.start(library.stream(self.device_id), argument)
