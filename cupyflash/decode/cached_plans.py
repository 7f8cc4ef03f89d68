"""How attention to a cache runs: in one launch, or as `cache_append` and `attention`."""

import math
from typing import Any

from ..attention.dispatch import forward_without_gradient
from ..attention.extras import NO_EXTRAS
from ..runtime.array import Array, View
from ..runtime.checks import require_grid
from ..runtime.launch import Launch, clusters_at_once
from ..runtime.operation import Plan
from ..runtime.overlap import Written
from ..runtime.rows import is_contiguous
from ..runtime.scratch import allocations_held, tile_counters
from ..runtime.structs import header
from . import kernels
from .kv_cache import CACHES, append

attention_structs = header("attention/params.cuh")
structs = header("decode/params.cuh")

FUNCTION = "attention_with_cache"
TENSORS = ("q", "k", "v", "k_cache", "v_cache")


class DecodePlan(Plan):
    """One launch.

    Attributes:
        written: for the check of the addresses.
    """

    def __init__(
        self,
        library: Any,
        config: kernels.FlashDecode | kernels.FlashDecodeCluster,
        shape: attention_structs.AttentionShape,
        views: dict[str, View],
    ) -> None:
        q = views["q"]
        super().__init__(q.device)
        self.written = Written(FUNCTION, views, CACHES)
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
        grid = require_grid(FUNCTION, parts * config.cluster, q.shape)
        self.launch = Launch(config, q.device, grid, params)
        self.parts_size = parts * kernels.part_size(config.head_dim) if splits > 1 else 0
        self.launch.has_scratch = splits > 1
        self.counters = tile_counters(q.device)

    def run(self, arrays: tuple[Array, ...], pointers: list[int]) -> Array:
        """Of q, k, v, k_cache, v_cache, positions."""
        out = self.library.empty(self.shape, self.strides, arrays[0])
        if not self.empty:
            library, (*tensors, positions) = self.library, pointers
            stream = library.stream(self.device_id)
            scratch = 0, 0
            if self.parts_size:
                parts = library.empty_float32((self.parts_size,), arrays[0])
                counters, _own = self.counters.address(stream, library, arrays[0])
                scratch = library.pointer(parts), counters
            self.launch(stream, *tensors, library.pointer(out), positions, *scratch)
        return out


class SeparatePlan:
    """What one launch does not take: `cache_append`, then `attention`.

    Attributes:
        written: for the check of the addresses.
    """

    def __init__(
        self, library: Any, shape: attention_structs.AttentionShape, views: dict[str, View]
    ) -> None:
        self.written = Written(FUNCTION, views, CACHES)
        for name in CACHES:
            if not is_contiguous(views[name]):
                fact = f"{name} must be contiguous unless up to {kernels.MAX_TOKENS} aligned tokens"
                fact += " of 16 bits on a GPU of sm_75 or later attend"
                got = f"strides {views[name].strides}"
                raise NotImplementedError(f"{FUNCTION}: {fact}, got {got}")
        self.library, self.seqlen, self.scale = library, shape.seqlen_q, shape.scale
        self.last = shape.seqlen_k - shape.seqlen_q
        self.rows = (shape.batch * shape.seqlen_q, shape.heads_kv * shape.head_dim)

    def __call__(self, arrays: tuple[Array, ...], pointers: object = None) -> Array:
        """Of q, k, v, k_cache, v_cache, positions."""
        with allocations_held(self.library):
            return self._run(*arrays)

    def _run(
        self, q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array, positions: Array
    ) -> Array:
        if self.library.on_cpu(q):
            self._check_positions(positions)
        where, sequences = positions, None
        if self.seqlen != 1:
            tokens = self.library.arange(self.seqlen, positions)
            where = (positions[:, None] + tokens).reshape(-1)
            sequences = self.library.arange(self.rows[0], positions) // self.seqlen
        # By way of whole rows, which copies heads that do not lie side by side.
        new = (x.reshape(self.rows).reshape(self.rows[0], *x.shape[2:]) for x in (k, v))
        append(FUNCTION, *new, k_cache, v_cache, where, sequences)
        options = (self.seqlen > 1, self.scale, None, 0.0, "bshd", None, 0.0)
        extras = NO_EXTRAS._replace(seqused_k=positions + self.seqlen)
        arrays = (q, k_cache, v_cache)
        return forward_without_gradient(FUNCTION, self.library, *arrays, options, extras, False)[0]

    def _check_positions(self, positions: Array) -> None:
        places = self.library.to_list(positions)
        if places and not 0 <= min(places) <= max(places) <= self.last:
            fact = f"positions must be from 0 to {self.last}, so that all tokens are in the cache"
            raise ValueError(f"{FUNCTION}: {fact}, got {min(places)} to {max(places)}")
