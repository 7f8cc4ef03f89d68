"""Attention to a cache in one launch: the kernel ``cuda_src/decode/flash_decode.cu``.

Of one sequence it is ``flash_decode_one.cu``. Of more than 16 queries of a head of keys it is
``flash_decode_tile.cu``, and to a cache of 8 bits ``flash_decode_narrow.cu`` or
``flash_decode_narrow_one.cu``, all of them behind the launch that appends.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ... import environment
from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.gpu import capability_of, multiprocessors
from ...runtime.launch import Launch, dependent_launches
from ...runtime.operation import Plan
from ...runtime.scratch import tile_counters
from ...runtime.structs import header
from . import kernels, kv_cache
from .cached import ARRAYS, CACHES, CachedOptions, CachedShape
from .cached_checks import NARROW
from .paged_rows import paged_rows

attention_structs = header("attention/params.cuh")
structs = header("decode/params.cuh")

FUNCTION = "attention_with_cache"
TENSORS = ("q", "k", "v", "k_cache", "v_cache", "out")
OLD, POSITIONS, SCALES, OUT = map(ARRAYS.index, ("k_cache", "positions", "k_scale", "out"))
MAX_CAPACITY = 2**29  # keys of a sequence, so that sums of lengths and windows fit 32 bits
MAX_WINDOW = 2**30
MAX_ROUNDS = 2**30  # of all units together, so that their sums fit 32 bits


def decode_plan(
    library: Any, shape: CachedShape, options: CachedOptions, views: Mapping[str, View]
) -> "DecodePlan | None":
    """The plan of a call that one launch computes, or None.

    It takes up to 8 new tokens of a sequence, or 64 queries of a head of keys, float16 (sm_75) or
    bfloat16 (sm_80) with a cache of that dtype or of 8 bits, head dims that are multiples of 8 (16
    with 8 bits) up to 256, and rows at multiples of 16 bytes.

    Args:
        views: of the arrays that are given, by their names in `ARRAYS`.
    """
    q, backend = views["q"], environment.current().backend
    if backend == "simt" or not (shape.aligned and _takes(shape, views)):
        return None
    capability = min(capability_of(q.device), (8, 9) if backend == "sm80" else (99, 0))
    cache = views["k_cache"].dtype
    kind = kernels.CACHE_KINDS.index(cache) if cache in NARROW else 0
    config = kernels.flash_decode(q.dtype, kind, shape, options.num_splits, capability)
    if config is None or kernels.decode_rounds(config, shape) >= MAX_ROUNDS:
        return None
    return DecodePlan(library, config, shape, options, views)


def _takes(shape: CachedShape, views: Mapping[str, View]) -> bool:
    """Whether the sizes, dtypes and strides are those of the kernel."""
    dtype, cache = views["q"].dtype, views["k_cache"].dtype
    rows = all(
        step * ITEM_SIZE.get(view.dtype, 1) % 16 == 0
        for view in (views[name] for name in TENSORS if name in views)
        for size, step in zip(view.shape[:-1], view.strides)
        if size > 1
    )
    columns = 16 if cache in NARROW else 8
    fits = shape.head_dim % columns == 0 and shape.max_length <= MAX_CAPACITY
    return rows and fits and cache in (dtype, *NARROW)


class DecodePlan(Plan):
    """Attention with a cache in one launch; one before it appends where its kernel does not."""

    def __init__(
        self,
        library: Any,
        config: kernels.FlashDecode | kernels.FlashDecodeTile,
        shape: CachedShape,
        options: CachedOptions,
        views: Mapping[str, View],
    ) -> None:
        q = views["q"]
        super().__init__(q.device)
        self.narrow = views["k_cache"].dtype in NARROW
        stored = math.prod(views["k_cache"].shape) > 0
        self.appends_first = shape.appends and not config.appends and stored
        if not config.appends:  # the kernel finds the new keys in the cache
            shape = shape._replace(appends=False)
        if self.narrow:  # and the scales in the place of k and v
            views = {**views, "k": views["k_scale"], "v": views["v_scale"]}
        self.library, self.shape = library, q.shape
        self.strides = library.strides_of_empty(q.shape, q)
        self.lse_shape = _lse_shape(shape) if options.return_lse else None
        self.empty = math.prod(q.shape) == 0
        if self.empty:
            return
        splits = options.num_splits
        grid = kernels.decode_grid(config, shape, splits, multiprocessors(q.device))
        strides = self.strides if "out" not in views else views["out"].strides
        views = {**views, "out": q._replace(strides=tuple(strides))}
        if isinstance(config, (kernels.FlashDecodeOne, kernels.FlashDecodeNarrowOne)):
            splits = max(1, grid // shape.heads_kv)
            grid = splits * shape.heads_kv
        abreast = 1 if splits else kernels.heads_abreast(shape.heads_kv, grid)
        grid -= grid % abreast
        scales = ("k", "v") if self.narrow else ()
        params = _params(shape, options._replace(num_splits=splits), views, scales, abreast)
        self.launch = Launch(config, q.device, require_grid(FUNCTION, grid, q.shape), params)
        self.parts = 0 if splits == 1 else grid * (1 if splits else 2)
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
        if self.appends_first:
            call = dict(zip(ARRAYS, arrays))
            kv_cache.append(FUNCTION, library, tuple(map(call.get, kv_cache.APPENDED)))
        stream, scratch = library.stream(self.device_id), (0, 0)
        if self.parts:
            parts = library.empty_float32((self.parts * self.part_size,), q)
            counters, _own = self.counters.address(stream, library, q, self.parts)
            scratch = library.pointer(parts), counters
        results = library.pointer(out), 0 if lse is None else library.pointer(lse)
        new = pointers[SCALES:OUT] if self.narrow else pointers[1:OLD]
        given = (pointers[0], *new, *pointers[OLD:POSITIONS])
        values = (*given, *results, *pointers[POSITIONS:SCALES], *scratch)
        argument = self.launch.argument(*values)
        if not self.appends_first:
            self.launch.start(stream, argument)
        else:
            with dependent_launches():  # all but the new rows was there before they were appended
                self.launch.start(stream, argument)
        return out, lse


def _lse_shape(shape: CachedShape) -> tuple[int, ...]:
    if shape.packed:
        return shape.heads_q, shape.total_q
    return shape.batch, shape.heads_q, shape.seqlen_q


def _params(
    shape: CachedShape,
    options: CachedOptions,
    views: Mapping[str, View],
    scales: tuple[str, ...],
    abreast: int,
) -> Any:
    """The parameters of the kernel; ``scales`` are names of ``views`` in the place of new rows."""
    left, right = (min(x, MAX_WINDOW) for x in options.window or (MAX_WINDOW, MAX_WINDOW))
    slopes = views.get("alibi_slopes")
    lse_rows = shape.total_q if shape.packed else shape.seqlen_q
    log2e, capped = math.log2(math.e), options.softcap > 0
    return structs.FlashDecodeParams(
        **{
            f"{name}_strides": _strides(view, shape.packed and name not in (*CACHES, *scales))
            for name, view in ((name, views.get(name)) for name in TENSORS)
        },
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


def _strides(view: View | None, packed: bool) -> Any:
    if view is None:
        return attention_structs.Strides()
    if packed:
        return attention_structs.Strides(0, *view.strides[:2])
    return attention_structs.Strides(*view.strides[:3])
