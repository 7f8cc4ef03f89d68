"""The kernel of dropout before a norm."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..runtime.config import ITEM_SIZE, KernelConfig, vector_width, weight_dtypes
from ..runtime.structs import header

structs = header("norm/dropout_add.cu")


@dataclasses.dataclass(frozen=True)
class DropoutAdd(KernelConfig):
    """Elementwise: a thread has ``vector`` columns of a row.

    Attributes:
        out: dtype of the result and of the residual.
    """

    source: ClassVar[str] = "norm/dropout_add.cu"
    params: ClassVar[type[structs.DropoutAddParams]] = structs.DropoutAddParams
    threads: ClassVar[int] = structs.THREADS

    dtype: str
    out: str
    vector: int

    def grid(self, rows: int, columns: int) -> int:
        """Number of blocks."""
        return -(-rows * -(-columns // self.vector) // structs.THREADS)


def dropout_add(dtype: str, out: str, aligned: bool) -> DropoutAdd:
    """The kernel, which reads 16 bytes of x at a time where that is possible."""
    return DropoutAdd(dtype, out, vector_width(dtype) if aligned else 1)


def configurations() -> Iterator[DropoutAdd]:
    """Everything that `dropout_add` can return."""
    for dtype, aligned in itertools.product(ITEM_SIZE, (False, True)):
        for out in weight_dtypes(dtype):
            yield dropout_add(dtype, out, aligned)
