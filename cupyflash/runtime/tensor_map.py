"""Tensor maps of sm_90: the arrays between which and shared memory its copy engine moves boxes.

A map (CUtensorMap) is an opaque struct that the driver fills in. It holds the array's address, so
there is one for each address; encoding takes microseconds, looking an encoded one up does not.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from ctypes import c_int, c_uint32, c_uint64, c_void_p

from . import driver
from .structs import header

structs = header("attention/params.cuh")

MAX_ENCODED = 256  # of one kernel: addresses that change with every call must not fill the memory
MAX_MAP_STRIDE = 2**40  # bytes
BOX_COLUMNS = 64  # 128 bytes, the widest box of its swizzle

# Of cuda.h: CUtensorMapDataType, CUtensorMapInterleave, …
_DTYPES = {"float32": 7, "float16": 6, "bfloat16": 9}
_NONE, _SWIZZLE_128B, _L2_PROMOTION_256B, _FILL_ZEROS = 0, 3, 3, 0
_ALIGNMENT = 64
_ARGUMENT_TYPES = (c_void_p, c_int, c_uint32, *[c_void_p] * 5, *[c_int] * 4)


@dataclasses.dataclass(frozen=True)
class TensorMapSpec:
    """A tensor map but for the array's address.

    Attributes:
        dims: columns (head_dim), rows, heads, batch.
        strides: of rows, heads and batch, in bytes.
        box_rows, box_columns: of a box.
        swizzled: 128-byte rows in shared memory, swizzled; else row after row of any length, and
            the L2 reads no more than those.
    """

    dtype: str
    dims: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box_rows: int
    box_columns: int = BOX_COLUMNS
    swizzled: bool = True

    def encode(self, pointer: int) -> bytes:
        """The 128 bytes of the map of an array; zeros for address 0, an array without elements.

        Raises:
            RuntimeError: the driver rejects it.
        """
        size = ctypes.sizeof(structs.TensorMap)
        if not pointer:
            return bytes(size)
        memory = ctypes.create_string_buffer(size + _ALIGNMENT)
        start = -ctypes.addressof(memory) % _ALIGNMENT
        status = driver.function("cuTensorMapEncodeTiled", *_ARGUMENT_TYPES)(
            ctypes.addressof(memory) + start,
            _DTYPES[self.dtype],
            4,
            pointer,
            (c_uint64 * 4)(*self.dims),
            (c_uint64 * 3)(*self.strides),
            (c_uint32 * 4)(self.box_columns, self.box_rows, 1, 1),
            (c_uint32 * 4)(1, 1, 1, 1),
            _NONE,  # interleaved
            _SWIZZLE_128B if self.swizzled else _NONE,
            _L2_PROMOTION_256B if self.swizzled else _NONE,
            _FILL_ZEROS,
        )
        if status:
            asked = f"{self} at address {pointer:#x}"
            raise RuntimeError(f"cupyflash: cuTensorMapEncodeTiled failed with {status}: {asked}")
        return memory.raw[start : start + size]


class TensorMaps(dict[tuple[int, ...], bytes]):
    """The encoded maps of one kernel in a row, by the addresses of their arrays.

    Allocators return the same addresses again and again, so that a call usually finds its maps, or
    at least most of them under other combinations of addresses.
    """

    def __init__(self, specs: Sequence[TensorMapSpec], device: int) -> None:
        super().__init__()
        self.encoders = [functools.lru_cache(MAX_ENCODED)(spec.encode) for spec in specs]
        self.device = device

    def __missing__(self, pointers: tuple[int, ...]) -> bytes:
        import cupy

        # The encoder needs a context, and this may be the first that a thread asks of CUDA.
        cupy.cuda.runtime.setDevice(self.device)
        maps = b"".join(encode(x) for encode, x in zip(self.encoders, pointers, strict=True))
        if len(self) >= MAX_ENCODED:
            self.clear()
        self[pointers] = maps
        return maps
