"""The diffusion step."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..runtime.config import ITEM_SIZE, KernelConfig, vector_width
from ..runtime.structs import header

structs = header("diffusion/params.cuh")

THREADS = 256
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
    params: ClassVar[type[structs.DiffusionStepParams]] = structs.DiffusionStepParams
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


def step(dtype: str, model: str, draw: bool, per_sample: bool, aligned: bool) -> DiffusionStep:
    """The kernel."""
    vector = vector_width(dtype) if aligned else 1
    return DiffusionStep(dtype, model, draw, per_sample, LOADS, vector)


def configurations(capability: tuple[int, int]) -> Iterator[DiffusionStep]:
    """Everything that ``step`` can return."""
    switches = itertools.product((False, True), repeat=3)
    for dtype, (draw, per_sample, aligned) in itertools.product(ITEM_SIZE, switches):
        for model in model_dtypes(dtype):
            yield step(dtype, model, draw, per_sample, aligned)
