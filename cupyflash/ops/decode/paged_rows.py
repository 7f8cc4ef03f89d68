"""How kernels find the rows of keys in a cache: ``cuda_src/decode/paged_rows.cuh``."""

from collections.abc import Mapping
from typing import Any

from ...runtime.array import View
from ...runtime.structs import header

structs = header("decode/params.cuh")

MAX_KEYS = 2**31 - 1  # of a sequence, for kernels that know no windows


def paged_rows(views: Mapping[str, View]) -> Any:
    """The struct of the same name, by which kernels find the rows of keys."""
    table = views.get("page_table")
    pages, size = views["k_cache"].shape[:2]
    shift, multiplier = division(max(size, 1))
    length = size * (table.shape[1] if table else 1) if pages else 0
    return structs.PagedRows(
        table_stride=table.strides[0] if table else 0,
        multiplier=multiplier,
        shift=shift,
        page_size=size,
        num_pages=pages,
        capacity=min(length, MAX_KEYS),
    )


def division(divisor: int) -> tuple[int, int]:
    """(shift, multiplier) of ``PagedRows::page_of`` in paged_rows.cuh, for divisors below 2^31."""
    shift = (divisor - 1).bit_length()
    return shift, (1 << (31 + shift)) // divisor + 1
