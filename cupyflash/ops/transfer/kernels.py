"""The kernels of `transfer`, and their launches for arrays that are given by their addresses."""

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from ... import jit
from ...runtime.config import ITEM_SIZE, KernelConfig, vector_width
from ...runtime.gpu import Capability
from ...runtime.structs import header

_params = header("transfer/params.cuh")
MOST_PEERS = _params.MOST_PEERS
WARP = 32  # threads that have a row together
WIDE, NARROW = 16, 2  # bytes that a thread of `PutRows` copies at a time


@dataclasses.dataclass(frozen=True)
class PutRows(KernelConfig):
    """Rows into the memory of other GPUs; ``bytes`` at a time."""

    source: ClassVar[str] = "transfer/put_rows.cu"
    threads: ClassVar[int] = header("transfer/put_rows.cu").THREADS

    bytes: int


@dataclasses.dataclass(frozen=True)
class SumRows(KernelConfig):
    """Sums of slots, ``vector`` columns of a thread at a time."""

    source: ClassVar[str] = "transfer/sum_rows.cu"
    threads: ClassVar[int] = header("transfer/sum_rows.cu").THREADS

    dtype: str
    vector: int


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that the functions below launch."""
    yield from map(PutRows, (WIDE, NARROW))
    for dtype in ITEM_SIZE:
        yield from (SumRows(dtype, vector) for vector in (vector_width(dtype), 1))


class Rows(NamedTuple):
    """Rows of an array, and where they go in the memory of a rank; all in bytes.

    Attributes:
        source: the address of the first row.
        pitch: from row to row.
        step: from what one rank gets to what the next one gets.
        place: where row 0 goes, from the beginning of the memory of a rank.
        pitch_there: from row to row there.
        width: of a row, which is contiguous.
    """

    source: int
    pitch: int
    step: int
    place: int
    pitch_there: int
    width: int


def put_rows(
    device: int, stream: Any, peers: Sequence[int], moves: int, count: int, arrays: Sequence[Rows]
) -> None:
    """Launches `PutRows`.

    Args:
        peers: the addresses of the memory of all ranks, which are multiples of 16.
        moves: the address of ``count`` moves, three int32 each: a rank, a row, and the row there.
    """
    aligned = all(not x % WIDE for array in arrays for x in array)
    params = _params.PutRowsParams(moves=moves, count=count)
    params.peers[: len(peers)] = list(peers)
    for i, array in enumerate(arrays):
        params.arrays[i] = _params.RowArray(*array)
    _launch(PutRows(WIDE if aligned else NARROW), device, stream, params, count)


def sum_rows(
    device: int,
    stream: Any,
    dtype: str,
    parts: int,
    rows: int,
    arrays: Sequence[tuple[int, int, int]],
) -> None:
    """Launches `SumRows`.

    Args:
        parts: the address of three int32 for each of so many rows: the first slot, how many there
            are, and how far the next one lies behind it.
        arrays: (address of the slots, address of the sums, columns) of each.
    """
    vector = vector_width(dtype)
    if any(slots % WIDE or out % WIDE or width % vector for slots, out, width in arrays):
        vector = 1
    params = _params.SumRowsParams(parts=parts, rows=rows)
    for i, array in enumerate(arrays):
        params.arrays[i] = _params.SumArray(*array)
    _launch(SumRows(dtype, vector), device, stream, params, rows)


def _launch(
    config: KernelConfig, device: int, stream: Any, params: ctypes.Structure, rows: int
) -> None:
    if rows:
        grid = -(-rows * WARP // config.threads)
        jit.load(config, device)(grid, config.threads, bytes(params), 0, stream.ptr)
