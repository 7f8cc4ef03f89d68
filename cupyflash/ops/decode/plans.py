"""The plans of calls with a cache that one launch takes."""

import math
from collections.abc import Mapping
from typing import Any

from ... import environment
from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.gpu import capability_of, multiprocessors
from ...runtime.launch import Launch, clusters_at_once
from ...runtime.operation import Plan
from ...runtime.scratch import tile_counters
from ...runtime.structs import header
from . import kernels
from .cached import CachedOptions, CachedShape

attention_structs = header("attention/params.cuh")
structs = header("decode/params.cuh")

MAX_STEP = 2**31  # elements from key to key
TENSORS = ("q", "k", "v", "k_cache", "v_cache")
TAKEN = {*TENSORS, "positions"}


def decode_plan(
    library: Any, shape: CachedShape, options: CachedOptions, views: Mapping[str, View]
) -> "DecodePlan | None":
    """The plan of a call by one launch, or None where no kernel takes it."""
    plain = options.window is None and not (options.softcap or options.return_lse)
    causal = options.causal or shape.seqlen_q == 1
    if views.keys() != TAKEN or not (plain and causal) or shape.head_dim % 8:
        return None
    taken = attention_structs.AttentionShape(
        batch=shape.batch,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.page_size,
        head_dim=shape.head_dim,
        scale=options.scale,
    )
    config = _config(taken, views, shape.aligned)
    return None if config is None else DecodePlan(library, config, taken, views)


class DecodePlan(Plan):
    """Attention with a cache in one launch."""

    def __init__(
        self,
        library: Any,
        config: kernels.FlashDecode | kernels.FlashDecodeCluster,
        shape: attention_structs.AttentionShape,
        views: Mapping[str, View],
    ) -> None:
        q = views["q"]
        super().__init__(q.device)
        self.library, self.shape = library, q.shape
        self.strides = library.strides_of_empty(q.shape, q)
        self.empty = math.prod(q.shape) == 0
        if self.empty:
            return
        splits = kernels.splits(config, shape, clusters_at_once(config, q.device))
        params = structs.FlashDecodeParams(
            **{
                f"{name}_strides": attention_structs.Strides(*views[name].strides[:3])
                for name in TENSORS
            },
            out_strides=attention_structs.Strides(*self.strides[:3]),
            seqlen=shape.seqlen_q,
            heads_kv=shape.heads_kv,
            group=shape.heads_q // shape.heads_kv,
            head_dim=shape.head_dim,
            max_length=shape.seqlen_k,
            splits=splits,
            scale_log2=math.log2(math.e) * shape.scale,
        )
        parts = kernels.decode_units(shape) * splits
        grid = require_grid("attention_with_cache", parts * config.cluster, q.shape)
        self.launch = Launch(config, q.device, grid, params)
        self.parts_size = parts * kernels.part_size(config.head_dim) if splits > 1 else 0
        self.launch.has_scratch = splits > 1
        self.counters = tile_counters(q.device)

    def run(self, arrays: tuple[Array | None, ...], pointers: list[int]) -> tuple[Array, None]:
        """(out, None); ``arrays`` and ``pointers`` are those of `ARRAYS`."""
        out = self.library.empty(self.shape, self.strides, arrays[0])
        if not self.empty:
            library, (*tensors, positions) = self.library, pointers[:6]
            stream = library.stream(self.device_id)
            scratch = 0, 0
            if self.parts_size:
                parts = library.empty_float32((self.parts_size,), arrays[0])
                counters, _own = self.counters.address(stream, library, arrays[0])
                scratch = library.pointer(parts), counters
            values = (*tensors, library.pointer(out), positions, *scratch)
            self.launch.start(stream, self.launch.argument(*values))
        return out, None


def _config(
    shape: attention_structs.AttentionShape, views: dict[str, View], aligned: bool
) -> kernels.FlashDecode | kernels.FlashDecodeCluster | None:
    """The kernel that takes this in one launch, if there is one."""
    device, backend = views["q"].device, environment.current().backend
    steps = {
        name: [step for n, step in zip(views[name].shape[:3], views[name].strides) if n > 1]
        for name in TENSORS
    }
    item = ITEM_SIZE[views["q"].dtype]
    if not aligned or backend == "simt" or any(n * item % 16 for x in steps.values() for n in x):
        return None
    rows = [(views[name].shape[1], views[name].strides[1]) for name in TENSORS[1:]]
    if any(n > 1 and abs(step) >= MAX_STEP for n, step in rows):
        return None
    capability = min(capability_of(device), (8, 9) if backend == "sm80" else (99, 0))
    return kernels.flash_decode(views["q"].dtype, shape, capability, multiprocessors(device))
