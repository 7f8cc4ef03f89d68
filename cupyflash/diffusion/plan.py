"""A diffusion step: what calls of one signature share, and how they run."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.array import Array, View
from ..runtime.checks import require_grid
from ..runtime.launch import Launch
from ..runtime.operation import Plan
from ..runtime.rows import dense_like
from ..runtime.structs import header
from . import kernels

structs = header("diffusion/params.cuh")

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
        thresholding: bool,
    ) -> None:
        x, steps, seeds = views["x"], views.get("step"), views.get("seed")
        super().__init__(x.device)
        self.library, self.shape, self.strides = library, x.shape, dense_like(x)
        size = math.prod(x.shape)
        self.empty = size == 0
        if self.empty:
            return
        batch = x.shape[0] if x.shape else 1
        one_step = steps is None or math.prod(steps.shape) == 1
        per_sample = thresholding or seeds is not None
        kind = (x.dtype, views["predicted"].dtype, draw, per_sample)
        config = kernels.step(*kind, aligned)
        of_thread = size if one_step and not per_sample else size // batch
        if of_thread % config.vector:  # a pack is of one sample
            config = kernels.step(*kind, False)
        params = structs.DiffusionStepParams(
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
        self, x: Array, pointers: tuple[int, int, int], tables: tuple[int, int],
        limits: Callable[[], Array] | None, seeds: int, seed: int, number: int,
    ) -> Array:  # fmt: skip
        """One launch.

        Args:
            pointers: of x, predicted, noise.
            tables: pointers of the indices and of the coefficients.
            limits: makes the thresholds of the samples.
            seeds: pointer of those of the samples.
        """
        library = self.library
        out = library.empty_strided(self.shape, self.strides, x)
        if not self.empty:
            thresholds = None if limits is None else limits()  # held until the launch is queued
            of_samples = 0 if limits is None else library.pointer(thresholds), seeds
            stream = library.stream(self.device_id)
            self.launch(stream, *pointers, library.pointer(out), *tables, *of_samples, seed, number)
        return out
