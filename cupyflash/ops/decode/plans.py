"""Attention to a cache in one launch: the kernel ``cuda_src/decode/flash_decode.cu``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ... import environment
from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.gpu import capability_of, multiprocessors
from ...runtime.launch import Launch
from ...runtime.operation import Plan
from ...runtime.scratch import tile_counters
from ...runtime.structs import header
from . import kernels
from .cached import ARRAYS, CachedOptions, CachedShape

attention_structs = header("attention/params.cuh")
structs = header("decode/params.cuh")

FUNCTION = "attention_with_cache"
TENSORS = ("q", "k", "v", "k_cache", "v_cache", "out")
POSITIONS, SCALES, OUT = map(ARRAYS.index, ("positions", "k_scale", "out"))
MAX_CAPACITY = 2**29  # keys of a sequence, so that sums of lengths and windows fit 32 bits
MAX_KEYS = 2**31 - 1  # of a sequence, for kernels that know no windows
MAX_WINDOW = 2**30
MAX_ROUNDS = 2**30  # of all units together, so that their sums fit 32 bits


def decode_plan(
    library: Any, shape: CachedShape, options: CachedOptions, views: Mapping[str, View]
) -> "DecodePlan | None":
    """The plan of a call that one launch computes, or None.

    It takes up to 8 new tokens of a sequence, or 16 queries of a head of keys, float16 (sm_75) or
    bfloat16 (sm_80) with a cache of that dtype, head dims that are multiples of 8 up to 256, and
    rows at multiples of 16 bytes.

    Args:
        views: of the arrays that are given, by their names in `ARRAYS`.
    """
    q, backend = views["q"], environment.current().backend
    if backend == "simt" or not (shape.aligned and _takes(shape, views)):
        return None
    capability = min(capability_of(q.device), (8, 9) if backend == "sm80" else (99, 0))
    config = kernels.flash_decode(q.dtype, shape, capability)
    if config is None or kernels.decode_rounds(config, shape) >= MAX_ROUNDS:
        return None
    return DecodePlan(library, config, shape, options, views)


def _takes(shape: CachedShape, views: Mapping[str, View]) -> bool:
    """Whether the sizes, dtypes and strides are those of the kernel."""
    tensors = [views[name] for name in TENSORS if name in views]
    item = ITEM_SIZE[views["q"].dtype]
    rows = all(
        step * item % 16 == 0
        for view in tensors
        for size, step in zip(view.shape[:-1], view.strides)
        if size > 1
    )
    same = len({view.dtype for view in tensors}) == 1
    return rows and same and shape.head_dim % 8 == 0 and shape.max_length <= MAX_CAPACITY


class DecodePlan(Plan):
    """Attention with a cache in one launch."""

    def __init__(
        self,
        library: Any,
        config: kernels.FlashDecode,
        shape: CachedShape,
        options: CachedOptions,
        views: Mapping[str, View],
    ) -> None:
        q = views["q"]
        super().__init__(q.device)
        self.library, self.shape = library, q.shape
        self.strides = library.strides_of_empty(q.shape, q)
        self.lse_shape = _lse_shape(shape) if options.return_lse else None
        self.empty = math.prod(q.shape) == 0
        if self.empty:
            return
        grid = kernels.decode_grid(config, shape, options.num_splits, multiprocessors(q.device))
        strides = self.strides if "out" not in views else views["out"].strides
        views = {**views, "out": q._replace(strides=tuple(strides))}
        abreast = 1 if options.num_splits else kernels.heads_abreast(shape.heads_kv, grid)
        grid -= grid % abreast
        params = _params(shape, options, views, abreast)
        self.launch = Launch(config, q.device, require_grid(FUNCTION, grid, q.shape), params)
        self.parts = 0 if options.num_splits == 1 else grid * (1 if options.num_splits else 2)
        self.part_size = config.part_size
        self.launch.has_scratch = self.parts > 0
        self.counters = tile_counters(q.device, kernels.DECODE_COUNTERS)

    def run(self, arrays: Sequence[Array | None], pointers: Sequence[int]) -> tuple:
        """(out, lse), lse None unless asked for.

        Args:
            arrays: in the order of `ARRAYS`.
            pointers: theirs, 0 for None.
        """
        library, q, out = self.library, arrays[0], arrays[OUT]
        if out is None:
            out = library.empty(self.shape, self.strides, q)
        lse = None if self.lse_shape is None else library.empty_float32(self.lse_shape, q)
        if self.empty:
            return out, lse
        stream, scratch = library.stream(self.device_id), (0, 0)
        if self.parts:
            parts = library.empty_float32((self.parts * self.part_size,), q)
            counters, _own = self.counters.address(stream, library, q, self.parts)
            scratch = library.pointer(parts), counters
        results = library.pointer(out), 0 if lse is None else library.pointer(lse)
        values = (*pointers[:POSITIONS], *results, *pointers[POSITIONS:SCALES], *scratch)
        self.launch.start(stream, self.launch.argument(*values))
        return out, lse


def _lse_shape(shape: CachedShape) -> tuple[int, ...]:
    if shape.packed:
        return shape.heads_q, shape.total_q
    return shape.batch, shape.heads_q, shape.seqlen_q


def _params(
    shape: CachedShape, options: CachedOptions, views: Mapping[str, View], abreast: int
) -> Any:
    left, right = (min(x, MAX_WINDOW) for x in options.window or (MAX_WINDOW, MAX_WINDOW))
    slopes = views.get("alibi_slopes")
    lse_rows = shape.total_q if shape.packed else shape.seqlen_q
    log2e, capped = math.log2(math.e), options.softcap > 0
    return structs.FlashDecodeParams(
        **{f"{name}_strides": _strides(shape, name, views.get(name)) for name in TENSORS},
        lse_batch_stride=0 if shape.packed else shape.heads_q * lse_rows,
        lse_head_stride=lse_rows,
        alibi_batch_stride=slopes.strides[0] if slopes and len(slopes.shape) == 2 else 0,
        pages=paged_rows(views),
        batch=shape.batch,
        seqlen=shape.seqlen_q,
        heads_kv=shape.heads_kv,
        group=shape.heads_q // shape.heads_kv,
        head_dim=shape.head_dim,
        appends=shape.appends,
        counted=shape.counted,
        num_splits=options.num_splits,
        abreast=abreast,
        window_left=left,
        window_right=0 if options.causal else right,
        scale_log2=log2e * (options.softcap if capped else options.scale),
        to_tanh=options.scale / options.softcap if capped else 0.0,
    )


def _strides(shape: CachedShape, name: str, view: View | None) -> Any:
    if view is None:
        return attention_structs.Strides()
    if shape.packed and not name.endswith("_cache"):
        return attention_structs.Strides(0, *view.strides[:2])
    return attention_structs.Strides(*view.strides[:3])


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
