"""Plans of single kernels: all that calls of one signature share.

`cupyflash.decode.stack_plan` has that of a whole stack of transformer blocks.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..runtime.array import Array, View
from ..runtime.checks import require_grid
from ..runtime.config import ITEM_SIZE
from ..runtime.launch import Launch, clusters_at_once
from ..runtime.operation import Plan
from ..runtime.overlap import Written
from ..runtime.scratch import tile_counters
from ..runtime.structs import header
from . import kernels
from .checks import CACHES

attention_structs = header("attention/params.cuh")
structs = header("decode/params.cuh")


class DecodePlan(Plan):
    """Attention with a cache in one launch.

    Attributes:
        written: for the check of the addresses, as in the other plans.
    """

    def __init__(
        self,
        function: str,
        library: Any,
        config: kernels.FlashDecode | kernels.FlashDecodeCluster,
        shape: attention_structs.AttentionShape,
        views: Mapping[str, View],
    ) -> None:
        q = views["q"]
        super().__init__(q.device)
        self.written = Written(function, views, CACHES)
        self.library, self.shape = library, q.shape
        self.strides = library.strides_of_empty(q.shape, q)
        self.empty = math.prod(q.shape) == 0
        if self.empty:
            return
        splits = kernels.splits(config, shape, clusters_at_once(config, q.device))
        params = structs.FlashDecodeParams(
            **{
                f"{name}_strides": attention_structs.Strides(*views[name].strides[:3])
                for name in ("q", "k", "v", *CACHES)
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
        grid = require_grid(function, parts * config.cluster, q.shape)
        self.launch = Launch(config, q.device, grid, params)
        self.parts_size = parts * kernels.part_size(config.head_dim) if splits > 1 else 0
        self.launch.has_scratch = splits > 1
        self.counters = tile_counters(q.device)

    def run(self, arrays: tuple[Array, ...], pointers: list[int]) -> Array:
        """The result; ``arrays`` and ``pointers`` are of q, k, v, k_cache, v_cache, positions."""
        out = self.library.empty(self.shape, self.strides, arrays[0])
        if not self.empty:
            library, (*tensors, positions) = self.library, pointers
            stream = library.stream(self.device_id)
            scratch = 0, 0
            if self.parts_size:
                parts = library.empty_float32((self.parts_size,), arrays[0])
                counters, _own = self.counters.address(stream, library, arrays[0])
                scratch = library.pointer(parts), counters
            values = (*tensors, library.pointer(out), positions, *scratch)
            self.launch.start(stream, self.launch.argument(*values))
        return out


class AppendPlan(Plan):
    """New keys and values into a cache."""

    def __init__(
        self, function: str, library: Any, views: Mapping[str, View], aligned: bool
    ) -> None:
        k, v, cache = views["k"], views["v"], views["k_cache"]
        super().__init__(k.device)
        self.written = Written(function, views, CACHES)
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


class EmbeddingPlan(Plan):
    """Rows of the tables of tokens and positions."""

    def __init__(self, library: Any, views: Mapping[str, View], aligned: bool) -> None:
        weight, tokens = views["token_weight"], views["tokens"]
        super().__init__(weight.device)
        vocabulary, columns = weight.shape
        self.library, self.shape = library, (*tokens.shape, columns)
        self.strides = library.strides_of_empty(
            self.shape, View(self.shape, (0,) * len(self.shape), weight.dtype, weight.device)
        )
        rows = math.prod(tokens.shape)
        self.empty = rows * columns == 0
        if self.empty:
            return
        positions = views.get("position_weight")
        params = structs.EmbeddingParams(
            rows=rows,
            columns=columns,
            vocabulary=vocabulary,
            context=positions.shape[0] if positions else 0,
        )
        vector = kernels.vector(weight.dtype, aligned)
        config = kernels.Embedding(weight.dtype, vector if columns % vector == 0 else 1)
        grid = require_grid("embedding", config.grid(rows * columns), self.shape)
        self.launch = Launch(config, weight.device, grid, params)

    def run(self, token_weight: Array, pointers: list[int]) -> Array:
        """``pointers`` of token_weight, position_weight, tokens, positions."""
        out = self.library.empty(self.shape, self.strides, token_weight)
        if not self.empty:
            tokens_weight, positions_weight, tokens, positions = pointers
            stream = self.library.stream(self.device_id)
            values = (tokens, positions, tokens_weight, positions_weight, self.library.pointer(out))
            self.launch.start(stream, self.launch.argument(*values))
        return out


class SamplePlan(Plan):
    """Tokens from logits.

    Args:
        views: of logits, then of the arrays that are written.
        sampling: a `Sampling`.
    """

    def __init__(self, library: Any, views: Mapping[str, View], sampling: Any, limit: int) -> None:
        logits = views["logits"]
        super().__init__(logits.device)
        self.written = Written("sample", views, tuple(views)[1:])
        self.library = library
        rows, columns = logits.shape
        self.empty = rows == 0
        if self.empty:
            return
        params = structs.SampleParams(
            stride=logits.strides[0],
            columns=columns,
            top_k=sampling.top_k,
            top_p=sampling.part,
            limit=limit,
            scale=sampling.scale,
        )
        config = kernels.Sample(logits.dtype, sampling.temperature == 0)
        self.launch = Launch(config, logits.device, require_grid("sample", rows, rows), params)

    def run(self, pointers: list[int], seed: int) -> None:
        """``pointers`` of logits and out, and of tokens, positions and ends if there is a state."""
        if not self.empty:
            logits, out, *state = pointers
            tokens, positions, ends = state or (0, 0, 0)
            stream = self.library.stream(self.device_id)
            values = (logits, positions, out, tokens, ends, seed)
            self.launch.start(stream, self.launch.argument(*values))
