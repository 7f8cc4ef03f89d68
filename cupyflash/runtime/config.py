"""What every kernel configuration is: a frozen dataclass whose fields are the template parameters.

A subclass names its source file and its parameter struct; its fields have the names of the kernel's
template parameters in lower case (``dtype`` is ``T``) and stand in the same order, so that the
dataclass *is* the instantiation. ``tests/test_params.py`` compares them with the source.
"""

import ctypes
import dataclasses
from typing import ClassVar

CPP_TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float"}
ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


def weight_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of weight and bias beside a tensor of ``dtype``."""
    return tuple(dict.fromkeys((dtype, "float32")))


def vector_width(dtype: str) -> int:
    """Elements of 16 bytes."""
    return 16 // ITEM_SIZE[dtype]


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """One instantiation of one ``__global__`` template; hashable, so it is the key of every cache.

    Attributes:
        source: path below ``cuda_src/``; its stem is the name of the kernel.
        params: the ctypes structure that the kernel takes by value.
        cooperative: the blocks wait for each other, so all of them must run at once.
        dependent: reads nothing but constants, and writes nothing, before it has waited for the
            kernel before it (dependent_launch.cuh), so it may begin while that one still runs.
        persistent: a block takes one of the ``grid`` tiles after the other, so that one block for
            each multiprocessor is enough.
        tiles_of: of a persistent kernel: its tiles are ``tile_rows`` rows of "q" or of "k".
        combine: the configuration that combines the results of blocks that share the keys of a
            tile, if this kernel (its ``split_keys()``) can do that.
    """

    source: ClassVar[str]
    params: ClassVar[type[ctypes.Structure]]
    cooperative: ClassVar[bool] = False
    dependent: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    tiles_of: ClassVar[str]
    combine: ClassVar["KernelConfig | None"] = None

    @property
    def name(self) -> str:
        """Name of the ``__global__`` function: the stem of its file."""
        return self.source.rsplit("/", 1)[-1].removesuffix(".cu")

    @property
    def expression(self) -> str:
        """The NVRTC name expression, ``flash_fwd_sm80<bfloat16_t, 128, …>``."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return f"{self.name}<{', '.join(_cpp(value) for value in values)}>"

    @property
    def threads(self) -> int:
        """Threads of a block: the template parameter, or what a class sets instead."""
        return self.num_threads

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a block in bytes."""
        return getattr(self, "smem_bytes", 0)

    def with_splits(self) -> "tuple[KernelConfig, ...]":
        """This one, and what takes its place where blocks share the keys of a tile."""
        return (self, self.split_keys(), self.combine) if self.combine else (self,)

    @property
    def boxes(self) -> dict[str, int]:
        """Rows of a box of each tensor map, in the order of the maps in front of ``params``."""
        return {}

    @property
    def bias_box_rows(self) -> int:
        """Rows of a box of the map of the bias behind ``params``; 0 without that map."""
        return 0


def _cpp(value: "str | bool | int") -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return CPP_TYPES.get(value, str(value))
