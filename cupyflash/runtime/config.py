"""A kernel configuration: a frozen dataclass whose fields are the template parameters of a kernel.

A subclass names its source file, which names its struct. Its fields have the names of the kernel's
template parameters in lower case (``dtype`` is ``T``) and stand in the same order, so that the
dataclass *is* the instantiation; those that are given by name alone are no template parameters.
``tests/runtime/test_params.py`` compares them with the source.
"""

import ctypes
import dataclasses
from typing import Any, ClassVar

from .structs import argument_of

CPP_TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float"}
ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


def weight_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of weight and bias beside a tensor of ``dtype``."""
    return tuple(dict.fromkeys((dtype, "float32")))


def vector_width(dtype: str) -> int:
    """The number of elements in 16 bytes."""
    return 16 // ITEM_SIZE[dtype]


class _Argument:
    def __get__(self, config: Any, kind: type["KernelConfig"]) -> type[ctypes.Structure]:
        return argument_of(kind.source)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """One instantiation of one ``__global__`` template; hashable, so it is the key of every cache.

    Most have ``grid``, the number of blocks for a problem.

    Attributes:
        source: path below ``cuda_src/``; its stem is the name of the kernel.
        params: the ctypes structure that the kernel takes by value, as its source says.
        cooperative: the blocks wait for each other, so all of them must run at the same time.
        dependent: the kernel reads nothing but constants, and writes nothing, before it has waited
            for the kernel before it (dependent_launch.cuh), so it may begin while that one still
            runs.
    """

    source: ClassVar[str]
    params: ClassVar[Any] = _Argument()
    cooperative: ClassVar[bool] = False
    dependent: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the ``__global__`` function: the stem of its file."""
        return self.source.rsplit("/", 1)[-1].removesuffix(".cu")

    @property
    def header(self) -> str:
        """C++ that stands before the source in the program: the text of a score or mask."""
        return ""

    @property
    def argument_size(self) -> int:
        """Bytes of the argument, which `header` may lengthen."""
        return ctypes.sizeof(self.params)

    @property
    def expression(self) -> str:
        """The NVRTC name expression, ``flash_fwd_sm80<bfloat16_t, 128, …>``."""
        fields = (field for field in dataclasses.fields(self) if not field.kw_only)
        values = (getattr(self, field.name) for field in fields)
        return f"{self.name}<{', '.join(_cpp(value) for value in values)}>"

    @property
    def is_usual(self) -> bool:
        """Whether calls with default options launch it: on aligned arrays, all of one dtype."""
        dtype = getattr(self, "dtype", None)  # some are of a weight only
        return getattr(self, "vector", 0) != 1 and self.weight_dtype == (dtype or self.weight_dtype)

    @property
    def weight_dtype(self) -> str | None:
        """The dtype of the weight or the output; by default that of the rest."""
        dtype = getattr(self, "dtype", None)
        return getattr(self, "weight", getattr(self, "out", dtype))

    @property
    def threads(self) -> int:
        """Threads of a block: the template parameter, unless a class sets the number otherwise."""
        return self.num_threads

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a block in bytes."""
        return getattr(self, "smem_bytes", 0)


def _cpp(value: "str | bool | int") -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return CPP_TYPES.get(value, str(value))
