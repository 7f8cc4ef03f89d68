"""A diffusion step: what calls of one signature share, and how they run."""

import math
from collections.abc import Mapping
from typing import Any

from ..array import Array, View, dense_strides
from ..checks import require_grid
from ..kernel_launch import Launch, Plan
from . import kernels
from .params import DiffusionStepParams

FUNCTION = "DiffusionSampler.step"


class StepPlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self,
        library: Any,
        views: Mapping[str, View],
        aligned: bool,
        clip: float | None,
        num_steps: int,
        draw: bool,
    ) -> None:
        x, steps = views["x"], views.get("step")
        super().__init__(x.device)
        self.library, self.shape, self.strides = library, x.shape, dense_like(x)
        size = math.prod(x.shape)
        self.empty = size == 0
        if self.empty:
            return
        config = kernels.step(x.dtype, views["predicted"].dtype, draw, aligned)
        batch = x.shape[0] if x.shape else 1
        one_step = steps is None or math.prod(steps.shape) == 1
        if (size if one_step else size // batch) % config.vector:  # a thread has one step
            config = kernels.step(x.dtype, views["predicted"].dtype, draw, False)
        params = DiffusionStepParams(
            batch=batch,
            sample_size=size // batch,
            steps_stride=0 if one_step else 1,
            num_steps=num_steps,
            wide_steps=steps is not None and steps.dtype == "int64",
            clip=math.inf if clip is None else clip,
        )
        grid = require_grid(FUNCTION, config.grid(size), x.shape)
        self.launch = Launch(config, x.device, grid, params)

    def run(
        self, x: Array, pointers: tuple[int, int, int], steps: int, table: int, seed: int,
        number: int,
    ) -> Array:  # fmt: skip
        """``pointers`` of x, predicted, noise; those of the indices and of the coefficients."""
        library = self.library
        out = library.empty_strided(self.shape, self.strides, x)
        if not self.empty:
            stream = library.stream(self.device_id)
            self.launch(stream, *pointers, library.pointer(out), steps, table, seed, number)
        return out


def dense_like(x: View) -> tuple[int, ...]:
    """Strides of a dense tensor with the order of axes of x; those of length 1 do not matter."""
    axes = range(len(x.shape))
    order = sorted(axes, key=lambda axis: -x.strides[axis] if x.shape[axis] > 1 else -math.inf)
    return dense_strides(x.shape, order)
