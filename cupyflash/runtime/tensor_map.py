"""Tensor maps of sm_90, which describe an array to the copy engine (TMA) that loads tiles of it.

A map (CUtensorMap) is an opaque struct that the driver fills in. It holds the address of the array,
so there is one for each address. Encoding a map takes microseconds, so encoded maps are kept.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from ctypes import c_int, c_uint32, c_uint64, c_void_p

from . import driver
from .config import ITEM_SIZE
from .structs import header

structs = header("attention/params.cuh")

MAX_ENCODED = 256  # maps kept for a kernel, as addresses may change with every call
MAX_MAP_STRIDE = 2**40  # bytes; strides are less than this
BOX_COLUMNS = 64  # 128 bytes, the widest tile with the 128-byte swizzle

# Values of enumerations in cuda.h: CUtensorMapDataType, CUtensorMapInterleave, …
_DTYPES = {"float32": 7, "float16": 6, "bfloat16": 9}
_NONE, _L2_PROMOTION_256B, _FILL_ZEROS = 0, 3, 0
_SWIZZLES = {64: 2, 128: 3}  # keys: bytes of a row of the tile
_ALIGNMENT = 64
_ARGUMENT_TYPES = (c_void_p, c_int, c_uint32, *[c_void_p] * 5, *[c_int] * 4)


@dataclasses.dataclass(frozen=True)
class TensorMapSpec:
    """All of a tensor map except the address of the array.

    Attributes:
        dims: columns (head_dim), rows, heads, batch.
        strides: strides of rows, heads and batch, in bytes.
        box_rows, box_columns: size of the tile that one copy moves ("box" in cuda.h). In shared
            memory it has rows of 64 or 128 bytes, with the swizzle of that length.
    """

    dtype: str
    dims: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box_rows: int
    box_columns: int = BOX_COLUMNS

    def encode(self, pointer: int) -> bytes:
        """The 128 bytes of the map for an address; zeros for address 0 (an array without elements).

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
            _SWIZZLES[self.box_columns * ITEM_SIZE[self.dtype]],
            _L2_PROMOTION_256B,
            _FILL_ZEROS,
        )
        if status:
            asked = f"{self} at address {pointer:#x}"
            raise RuntimeError(f"cupyflash: cuTensorMapEncodeTiled failed with {status}: {asked}")
        return memory.raw[start : start + size]


class TensorMaps(dict[tuple[int, ...], bytes]):
    """The encoded maps of one kernel as consecutive bytes, by the addresses of their arrays.

    Allocators return the same addresses again and again, so a call usually finds all its maps here,
    or else most of them in the caches of `encoders`.
    """

    def __init__(self, specs: Sequence[TensorMapSpec], device: int) -> None:
        super().__init__()
        self.encoders = [functools.lru_cache(MAX_ENCODED)(spec.encode) for spec in specs]
        self.device = device

    def __missing__(self, pointers: tuple[int, ...]) -> bytes:
        import cupy

        # The encoder needs a context, and this may be the first call of CUDA in this thread.
        cupy.cuda.runtime.setDevice(self.device)
        maps = b"".join(encode(x) for encode, x in zip(self.encoders, pointers, strict=True))
        if len(self) >= MAX_ENCODED:
            self.clear()
        self[pointers] = maps
        return maps
