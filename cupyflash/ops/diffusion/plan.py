"""A diffusion step: its kernel, and the plan that calls of one signature share."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE, KernelConfig, vector_width
from ...runtime.launch import Launch
from ...runtime.operation import Plan
from ...runtime.rows import dense_like
from ...runtime.structs import header

structs = header("diffusion/params.cuh")

FUNCTION = "DiffusionSampler.step"
THREADS = header("diffusion/diffusion_step.cu").THREADS
LOADS = 4  # packs of a thread


@dataclasses.dataclass(frozen=True)
class DiffusionStep(KernelConfig):
    """One update of a sampler.

    Attributes:
        model: dtype of the predicted noise.
        draw: the kernel draws the noise.
        per_sample: samples have thresholds or seeds of their own.
        loads: of a thread, ``vector`` elements each.
    """

    source: ClassVar[str] = "diffusion/diffusion_step.cu"
    threads: ClassVar[int] = THREADS

    dtype: str
    model: str
    draw: bool
    per_sample: bool
    loads: int
    vector: int

    def grid(self, size: int) -> int:
        """Blocks for ``size`` elements."""
        return -(-size // (THREADS * self.loads * self.vector))


def model_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of a prediction for samples of ``dtype``."""
    return tuple(ITEM_SIZE) if dtype == "float32" else (dtype,)


def configuration(
    dtype: str, model: str, draw: bool, per_sample: bool, aligned: bool
) -> DiffusionStep:
    """The kernel, which reads 16 bytes at a time where all arrays allow it."""
    vector = vector_width(dtype) if aligned else 1
    return DiffusionStep(dtype, model, draw, per_sample, LOADS, vector)


def configurations(capability: tuple[int, int]) -> Iterator[DiffusionStep]:
    """Everything that `configuration` can return."""
    switches = itertools.product((False, True), repeat=3)
    for dtype, (draw, per_sample, aligned) in itertools.product(ITEM_SIZE, switches):
        for model in model_dtypes(dtype):
            yield configuration(dtype, model, draw, per_sample, aligned)


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
        self.launch = None
        size = math.prod(x.shape)
        if size == 0:
            return
        batch = x.shape[0] if x.shape else 1
        one_step = steps is None or math.prod(steps.shape) == 1
        per_sample = thresholding or seeds is not None
        kind = (x.dtype, views["predicted"].dtype, draw, per_sample)
        config = configuration(*kind, aligned)
        of_thread = size if one_step and not per_sample else size // batch
        if of_thread % config.vector:  # a pack is of one sample
            config = configuration(*kind, False)
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
        self,
        x: Array,
        pointers: Sequence[int],
        table: int,
        limits: Callable[[], Array] | None,
        numbers: tuple[int, int],
    ) -> Array:
        """One launch.

        Args:
            pointers: of x, predicted, noise, the indices of the steps and the seeds of the samples.
            table: pointer of the coefficients.
            limits: makes the thresholds of the samples.
            numbers: the one seed and the one index, where there are no arrays of them.
        """
        library = self.library
        out = library.empty_strided(self.shape, self.strides, x)
        if self.launch is not None:
            *inputs, steps, seeds = pointers
            thresholds = None if limits is None else limits()  # held until the launch is queued
            at_limits = 0 if thresholds is None else library.pointer(thresholds)
            arrays = (*inputs, library.pointer(out), steps, table, at_limits, seeds)
            argument = self.launch.argument(*arrays, *numbers)
            self.launch.start(library.stream(self.device_id), argument)
        return out
