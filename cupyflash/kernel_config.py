"""What every kernel configuration is: a frozen dataclass whose fields are the template parameters.

A subclass names its source file and its parameter struct; its fields have the names of the kernel's
template parameters in lower case (``dtype`` is ``T``) and stand in the same order, so that the
dataclass *is* the instantiation. ``tests/test_params.py`` compares them with the source.
"""

import ctypes
import dataclasses
import enum
from typing import ClassVar, NamedTuple

CPP_TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float"}
ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
Capability = tuple[int, int]  # compute capability: (major, minor)


def has_clusters(capability: Capability) -> bool:
    """Whether kernels for clusters of blocks are made for such a GPU."""
    return (9, 0) <= capability < (12, 0)


def weight_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of weight and bias beside a tensor of ``dtype``."""
    return tuple(dict.fromkeys((dtype, "float32")))


class Access(enum.IntEnum):
    """How a kernel can read the tensors of a problem; each way includes those before it."""

    ELEMENT = 0
    VECTOR = 1  # every pointer and stride is a multiple of 16 bytes
    TENSOR_MAP = 2  # and no stride is zero, negative or too large for a tensor map


SHORT = 1536
# The tensor-core kernels compute tanh with an absolute error near 1e-7, which the softcap
# multiplies; beyond this one the error of a score would show in the weights of 16-bit results.
MAX_FAST_SOFTCAP = 4096.0


class Features(NamedTuple):
    """What a problem needs beside plain attention.

    Attributes:
        masked: some query does not see every key, because of a causal mask or a window.
        short: no sequence has more than `SHORT` queries.
        bias: 0 for none, 1 in the dtype of q, 2 bool, 3 float32.
        bias_boxes: a tensor map can describe the bias, which is in the dtype of q.
        wide_softcap: the softcap is above `MAX_FAST_SOFTCAP`.
    """

    softcap: bool = False
    alibi: bool = False
    masked: bool = False
    short: bool = False
    bias: int = 0
    dropout: bool = False
    bias_boxes: bool = False
    wide_softcap: bool = False


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
        """Threads of a block: the template parameter, unless a kernel counts them otherwise."""
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
