"""The rotary embedding alone: its gradient is a rotation by the opposite angles."""

import math
from collections.abc import Mapping
from typing import Any

from ..runtime.array import Array, View
from ..runtime.checks import require_grid
from ..runtime.launch import Launch
from ..runtime.operation import Plan, Plans
from ..runtime.structs import header
from . import kernels
from .checks import check_rotation
from .projection import rotary_of
from .reference import Arrays, Options

structs = header("linear/params.cuh")

FUNCTION = "qkv_projection"
POSITIONS = Arrays._fields.index("positions")
_plans = Plans()


def turn(
    library: Any, x: Array, cos: Array, sin: Array, positions: Array | None, options: Options
) -> None:
    """Rotate the heads of q and k in x (..., columns), contiguous on a GPU, where they are.

    Raises:
        As `check_rotation`: what torch traces comes here unchecked.
    """
    plan, _ = _plans.find(
        library,
        (x, cos, sin, positions),
        options,
        lambda: check_rotation(FUNCTION, library, x, (cos, sin, positions), options),
        lambda views, _: RotaryPlan(library, views, options),
    )
    plan(x, cos, sin, positions)


class RotaryPlan(Plan):
    """The kernel for one signature."""

    def __init__(self, library: Any, views: Mapping[str, View], options: Options) -> None:
        x, cos, positions = views["x"], views["cos"], views.get("positions")
        super().__init__(x.device)
        self.library, self.launch = library, None
        if 0 in x.shape:
            return
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        rotary = rotary_of(columns, cos, positions, options, x.shape[-2])
        params = structs.LinearParams(rows=rows, columns=columns, out_stride=columns, rotary=rotary)
        config = kernels.RotaryEmbedding(x.dtype)
        grid = require_grid(FUNCTION, config.grid(rows, rotary), x.shape)
        self.launch = Launch(config, x.device, grid, params)

    def run(self, x: Array, cos: Array, sin: Array, positions: Array | None) -> None:
        if self.launch is None:
            return
        library, pointer = self.library, self.library.pointer
        if positions is not None:
            positions = library.contiguous(positions)  # lives until the launch
        angles = pointer(cos), pointer(sin), 0 if positions is None else pointer(positions)
        self.launch(library.stream(self.device_id), *[0] * (POSITIONS - 2), *angles, pointer(x))
