"""Keys and values into a cache, and out of it, on a GPU; the arrays have been checked."""

import math
from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.launch import Launch
from ...runtime.operation import Plan, Plans
from ...runtime.rows import is_contiguous
from ...runtime.scratch import array_operations
from ...runtime.structs import header
from . import kernels
from .cached import CACHES

structs = header("decode/params.cuh")

_plans = Plans(wide=4)


def append(function: str, library: Any, arrays: tuple[Array | None, ...]) -> None:
    """Writes new rows; places that do not exist are left alone.

    Args:
        arrays: k, v, k_cache, v_cache, positions, page_table, sequences, slots, cu_seqlens_q,
            k_scale, v_scale. Rows go to slots; or from ``positions[b]`` of sequence b on, where k
            has four dimensions or there are cu_seqlens_q; or to key ``positions[i]`` of sequence
            ``sequences[i]``, or i.
    """
    k, v, *caches, _, _, _, _, _, k_scale, _ = arrays
    with array_operations(k):
        pages, rows = _places(library, arrays)
        columns = k.shape[-2] * k.shape[-1]
        new = (x.reshape(-1, columns).reshape(-1, *x.shape[-2:]) for x in (k, v))
        given = (*new, *caches, rows, pages)
        key, pointers = _plans.key(library, given, (function, k_scale is None))
        plan = _plans.get(key)
        if plan is None:
            views = dict(zip(("k", "v", *CACHES), map(library.view, given)))
            if k_scale is not None or not all(is_contiguous(views[x]) for x in CACHES):
                fact = "the cache must be contiguous and of the dtype of k on this GPU"
                got = f"{views['k_cache'].dtype}, strides {views['k_cache'].strides}"
                raise NotImplementedError(f"{function}: {fact}, got {got}")
            plan = _plans.add(key, AppendPlan(function, library, views, key[-1]))
        plan(pointers)


def _places(library: Any, arrays: tuple[Array | None, ...]) -> tuple[Array, Array]:
    """(pages, rows in them), int32, -1 where there is none."""
    k, _, cache, _, positions, table, sequences, slots, ends, *_ = arrays
    size = max(1, cache.shape[1])
    if slots is not None:
        int32 = library.arange(1, slots)
        return library.cast(slots // size, int32), library.cast(slots % size, int32)
    of, keys = sequences, positions
    if k.ndim == 4 or ends is not None:
        row = library.arange(math.prod(k.shape[:-2]), positions)
        if ends is None:
            of = row // max(1, k.shape[1])
            keys = positions[of] + row % max(1, k.shape[1])
        else:
            of = library.cast((row[:, None] >= ends[1:]).sum(1), row)
            keys = positions[of] + row - ends[of]
        of = of if sequences is None else sequences[of]
    elif of is None:
        of = library.arange(k.shape[0], positions)
    if table is None:
        return of, keys
    block = keys // size
    outside = (keys < 0) | (block >= table.shape[1])
    page = table[of, block.clip(0, table.shape[1] - 1)]
    return page - (page + 1) * outside, keys % size


def gather(
    function: str,
    library: Any,
    q: Array,
    caches: tuple[Array, Array],
    scales: tuple[Array | None, Array | None],
    lengths: Array,
    starts: Array | None,
    page_table: Array | None,
    sequences: Array | None,
    max_length: int,
) -> tuple[Array, Array]:
    """Keys and values, (batch, max_length, heads, head_dim) of the dtype of q: row i of sequence b
    is key ``starts[b] + i``; rows from ``lengths[b] - starts[b]`` on mean nothing.
    """
    pages, size = caches[0].shape[:2]
    keys = library.arange(max_length, lengths)[None]
    if starts is not None:
        keys = (keys + starts[:, None]).clip(0, max_length - 1)
    of = library.arange(len(lengths), lengths)[:, None]
    if page_table is not None:
        of = page_table[of, keys // size]
    elif sequences is not None:
        of = sequences[:, None]
    where = of.clip(0, pages - 1), keys % size
    found = []
    for cache, scale in zip(caches, scales):
        rows = cache[where]
        if scale is not None:
            pages_of, rows_of, heads = (1,) * (3 - scale.ndim) + tuple(scale.shape)
            factors = scale.reshape(pages_of, rows_of, heads)
            factors = factors[where[0] % pages_of, where[1] % rows_of][..., None]
            rows = library.cast(library.float32(rows) * factors, q)
        found.append(rows)
    return found[0], found[1]


class AppendPlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, function: str, library: Any, views: Mapping[str, View], aligned: bool
    ) -> None:
        k, v, cache = views["k"], views["v"], views["k_cache"]
        super().__init__(k.device)
        self.library = library
        rows, columns = k.shape[0], math.prod(k.shape[1:])
        self.empty = rows * columns == 0
        if self.empty:
            return
        params = structs.CacheAppendParams(
            rows=rows,
            k_stride=k.strides[0],
            v_stride=v.strides[0],
            columns=columns,
            batch=cache.shape[0],
            max_length=cache.shape[1],
        )
        steps = (columns, k.strides[0], v.strides[0])
        aligned = aligned and all(step * ITEM_SIZE[k.dtype] % 16 == 0 for step in steps)
        config = kernels.CacheAppend(k.dtype, kernels.vector(k.dtype, aligned))
        grid = require_grid(function, config.grid(rows * columns), k.shape)
        self.launch = Launch(config, k.device, grid, params)

    def run(self, pointers: list[int]) -> None:
        """``pointers`` of k, v, k_cache, v_cache, positions, sequences."""
        if not self.empty:
            *tensors, positions, sequences = pointers
            argument = self.launch.argument(*tensors, sequences, positions)
            self.launch.start(self.library.stream(self.device_id), argument)
