"""Keys and values into a cache, and out of it, on a GPU; the arrays have been checked."""

import math
from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.launch import Launch
from ...runtime.operation import Plan, Plans
from ...runtime.structs import header
from . import kernels
from .paged_rows import paged_rows

attention_structs = header("attention/params.cuh")
structs = header("decode/params.cuh")

APPENDED = (
    *("k", "v", "k_cache", "v_cache", "positions", "page_table", "sequences", "slots"),
    *("cu_seqlens_q", "k_scale", "v_scale"),
)
GATHERED = (
    *("k_cache", "v_cache", "lengths", "starts", "page_table", "sequences", "k_scale", "v_scale"),
)

_appends, _gathers = Plans(wide=4), Plans(wide=2)


def append(function: str, library: Any, arrays: tuple[Array | None, ...]) -> None:
    """Writes new rows in one launch; places that do not exist are left alone.

    Args:
        arrays: those of `APPENDED`, None where there is none. Rows go to slots; or from
            ``positions[b]`` of sequence b on, where k has four dimensions or there are
            cu_seqlens_q; or to key ``positions[i]`` of sequence ``sequences[i]``, or i. Scales of
            shape (num_pages, page_size, heads) are computed and written, others divide.
    """
    key, pointers = _appends.key(library, arrays, function)
    plan = _appends.get(key)
    if plan is None:
        views = {n: library.view(x) for n, x in zip(APPENDED, arrays) if x is not None}
        plan = _appends.add(key, AppendPlan(function, library, views, key[-1]))
    plan(pointers)


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
    """Keys and values, (batch, max_length, heads, head_dim) of the dtype of q, in one launch.

    Row i of sequence b is key ``starts[b] + i``, or key i; rows from ``lengths[b] - starts[b]`` on
    are not written. A page that does not exist is read as page 0.
    """
    arrays = (*caches, lengths, starts, page_table, sequences, *scales)
    key, pointers = _gathers.key(library, (*arrays, q), (function, max_length))
    plan = _gathers.get(key)
    if plan is None:
        views = {n: library.view(x) for n, x in zip(GATHERED, arrays) if x is not None}
        new = GatherPlan(function, library, views, library.view(q), max_length, key[-1])
        plan = _gathers.add(key, new)
    return plan(q, pointers[:-1])


class AppendPlan(Plan):
    """The kernel that writes rows, for one signature."""

    def __init__(
        self, function: str, library: Any, views: Mapping[str, View], aligned: bool
    ) -> None:
        k, cache = views["k"], views["k_cache"]
        super().__init__(k.device)
        self.library = library
        *rows, heads, head_dim = k.shape
        total, table, scale = math.prod(rows), views.get("page_table"), views.get("k_scale")
        self.empty = math.prod(k.shape) * math.prod(cache.shape) == 0
        if self.empty:
            return
        packed = "cu_seqlens_q" in views
        params = structs.CacheAppendParams(
            **_cache_strides(views),
            **{f"{name}_strides": _row_strides(views[name]) for name in ("k", "v")},
            pages=paged_rows(views),
            rows=total,
            batch=views["cu_seqlens_q"].shape[0] - 1 if packed else 0,
            tokens=rows[1] if len(rows) == 2 and "slots" not in views else 0,
            num_sequences=(table or cache).shape[0],
            heads=heads,
            head_dim=head_dim,
            computes_scales=scale is not None and scale.shape == cache.shape[:3],
        )
        config = kernels.CacheAppend(k.dtype, *_kind(k.dtype, views, aligned))
        blocks = -(-total * heads * 32 // config.threads)
        self.launch = Launch(config, k.device, require_grid(function, blocks, k.shape), params)

    def run(self, pointers: list[int]) -> None:
        """``pointers`` of the arrays of `APPENDED`, 0 for None."""
        if not self.empty:
            argument = self.launch.argument(*pointers)
            self.launch.start(self.library.stream(self.device_id), argument)


class GatherPlan(Plan):
    """The kernel that reads rows, for one signature."""

    def __init__(
        self,
        function: str,
        library: Any,
        views: Mapping[str, View],
        q: View,
        max_length: int,
        aligned: bool,
    ) -> None:
        cache = views["k_cache"]
        super().__init__(cache.device)
        self.library = library
        heads, head_dim = cache.shape[2:]
        self.shape = (views["lengths"].shape[0], max_length, heads, head_dim)
        self.strides = (max_length * heads * head_dim, heads * head_dim, head_dim, 1)
        self.empty = math.prod(self.shape) * math.prod(cache.shape) == 0
        if self.empty:
            return
        config = kernels.CacheGather(q.dtype, *_kind(q.dtype, views, aligned))
        params = structs.CacheGatherParams(
            **_cache_strides(views),
            pages=paged_rows(views),
            blocks=config.blocks(max_length, heads, head_dim),
            max_length=max_length,
            heads=heads,
            head_dim=head_dim,
        )
        blocks = require_grid(function, self.shape[0] * params.blocks, self.shape)
        self.launch = Launch(config, cache.device, blocks, params)

    def run(self, q: Array, pointers: list[int]) -> tuple[Array, Array]:
        """(k, v); ``pointers`` of the arrays of `GATHERED`, 0 for None."""
        library = self.library
        k, v = (library.empty(self.shape, self.strides, q) for _ in range(2))
        if not self.empty:
            results = library.pointer(k), library.pointer(v)
            argument = self.launch.argument(*pointers[:2], *results, *pointers[2:])
            self.launch.start(library.stream(self.device_id), argument)
        return k, v


def _kind(dtype: str, views: Mapping[str, View], aligned: bool) -> tuple[int, int]:
    """(kind, vector) of a kernel that moves rows of a dtype to a cache, or from one."""
    cache, rows = views["k_cache"], [views[name] for name in ("k", "v") if name in views]
    kind = 0 if cache.dtype == dtype else kernels.CACHE_KINDS.index(cache.dtype)
    vector = kernels.vector(dtype, aligned)
    item = 1 if kind else ITEM_SIZE[dtype]
    # The vectors of a row, and those of a cache, which has fewer bytes.
    wide = all(
        step * size % (vector * size) == 0
        for view, size in [(x, ITEM_SIZE[dtype]) for x in rows]
        + [(views[name], item) for name in ("k_cache", "v_cache")]
        for n, step in zip(view.shape[:-1], view.strides)
        if n > 1
    )
    return kind, vector if wide and cache.shape[-1] % vector == 0 else 1


def _row_strides(view: View) -> Any:
    batch = 0 if len(view.shape) == 3 else view.strides[0]
    return attention_structs.Strides(batch, *view.strides[-3:-1])


def _cache_strides(views: Mapping[str, View]) -> dict[str, Any]:
    """The strides of both caches and of their scales, which broadcast."""
    found = {}
    for name in ("k_cache", "v_cache"):
        found[f"{name}_strides"] = attention_structs.Strides(*views[name].strides[:3])
    for name in {"k_scale", "v_scale"} & views.keys():
        view = views[name]
        steps = [0 if n == 1 else step for n, step in zip(view.shape, view.strides)]
        steps = [*[0] * (3 - len(steps)), *steps]
        found[f"{name}_strides"] = attention_structs.Strides(*steps)
    return found
