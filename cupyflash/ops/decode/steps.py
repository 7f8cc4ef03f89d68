"""Attention with a cache in steps: append, the forward kernels on what is in the cache.

Keys of pages are gathered before, unless the forward kernel reads pages where they lie (paged.py).
No length leaves the GPU: each sequence has room for as many keys as its row of the table, and the
forward is told on the GPU how many of them count.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.array import Array, View, dense_strides
from ...runtime.scratch import array_operations
from ..attention.checks import check
from ..attention.dispatch import forward
from ..attention.options import Extras, Options, plain_options
from ..attention.planning import backend_of
from . import kv_cache
from .cached import ARRAYS, UNLIMITED, CachedOptions, CachedShape
from .cached_checks import NARROW
from .kv_cache import APPENDED
from .paged import paged_plan, table_of


class StepsPlan:
    """The plan of calls that no single launch computes."""

    def __init__(
        self,
        function: str,
        library: Any,
        shape: CachedShape,
        options: CachedOptions,
        views: Mapping[str, View],
    ) -> None:
        self.function, self.library = function, library
        self.shape, self.options = shape, options
        lengths = (shape.seqlen_q, shape.max_length) if shape.packed else None
        self.plain = plain_options(
            function,
            causal=options.causal,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            layout="thd-bshd" if shape.packed else "bshd",
            max_seqlens=lengths,
        )
        self.paged = paged_plan(function, library, shape, self.plain, views)
        by_pages = views.keys() & {"page_table", "sequences", "leftpad"}
        narrow = views["k_cache"].dtype in NARROW
        self.gathers = self.paged is None and (bool(by_pages) or narrow)
        if self.paged is None and views["q"].device >= 0:
            self._require_backend(views)

    def _require_backend(self, views: Mapping[str, View]) -> None:
        """Raises the error of a forward that no backend computes, before a cache is written."""
        q, shape, caches = views["q"], self.shape, ("k_cache", "v_cache")
        keys = [views[name]._replace(dtype=q.dtype) for name in caches]
        if self.gathers:
            sizes = (shape.batch, shape.max_length, shape.heads_kv, shape.head_dim)
            keys = [View(sizes, dense_strides(sizes, range(4)), q.dtype, q.device)] * 2
        extras = {name: views[name] for name in Extras._fields if name in views}
        extras["seqused_k"] = views["positions"]._replace(strides=(1,))
        tensors = dict(zip("qkv", (q, *keys)))
        problem = check(self.function, tensors, Options(*self.plain), extras)
        if 0 not in q.shape:
            problem = dataclasses.replace(problem, aligned=shape.aligned)
            backend_of(self.function, problem, backward=False)

    def __call__(
        self, arrays: tuple[Array | None, ...], pointers: object = None
    ) -> tuple[Array, Array | None]:
        """(out, lse); ``arrays`` are those of `ARRAYS`."""
        call = dict(zip(ARRAYS, arrays))
        function, library, q = self.function, self.library, call["q"]
        with array_operations(q):
            if self.shape.appends:
                kv_cache.append(function, library, tuple(map(call.get, APPENDED)))
            lengths, starts = self._lengths(call)
            k, v, counts = call["k_cache"], call["v_cache"], lengths
            if self.gathers:
                k, v = kv_cache.gather(
                    function, library, q, (k, v), (call["k_scale"], call["v_scale"]),
                    lengths, starts, call["page_table"], call["sequences"], self.shape.max_length,
                )  # fmt: skip
                counts = lengths if starts is None else lengths - starts
            extras = Extras(
                cu_seqlens_q=call["cu_seqlens_q"],
                alibi_slopes=call["alibi_slopes"],
                sinks=call["sinks"],
                seqused_k=counts,
            )
            need_lse = self.options.return_lse
            if self.paged:
                given = (q, k, v, *extras._replace(bias=table_of(call)))
                given = [0 if x is None else library.pointer(x) for x in given]
                out, lse = self.paged(q, given, need_lse)
            else:
                out, lse = forward(function, library, (q, k, v, *extras), (self.plain, need_lse))
            if call["out"] is not None:
                call["out"][...] = out
                out = call["out"]
        return out, lse

    def _lengths(self, call: Mapping[str, Array | None]) -> tuple[Array, Array | None]:
        """The keys of each sequence, and the first that is seen; None: the first of all."""
        ends, lengths, new = call["cu_seqlens_q"], call["positions"], self.shape.seqlen_q
        if ends is not None:
            new = ends[1:] - ends[:-1]
        if self.shape.counted:
            lengths = lengths + new
        lengths, starts = lengths.clip(0, self.shape.max_length), call["leftpad"]
        left = UNLIMITED if self.options.window is None else self.options.window[0]
        if self.gathers and left < UNLIMITED:
            first = (lengths - new - left).clip(min=0)
            starts = first if starts is None else first.clip(min=starts)
        return lengths, None if starts is None else starts.clip(min=0).clip(max=lengths)


class AppendsBefore:
    """The plan of calls that append another number of keys than they have queries.

    Args:
        new_keys: of each sequence.
        plan: of the same call without k and v, which it finds in the cache.
    """

    def __init__(self, function: str, library: Any, new_keys: int, plan: Any) -> None:
        self.function, self.library, self.new_keys, self.plan = function, library, new_keys, plan

    def __call__(
        self, arrays: Sequence[Array | None], pointers: Sequence[int]
    ) -> tuple[Array, Array | None]:
        """(out, lse).

        Args:
            arrays: those of `ARRAYS`.
            pointers: theirs, 0 for None.
        """
        call, addresses = dict(zip(ARRAYS, arrays)), dict(zip(ARRAYS, pointers))
        with array_operations(call["q"]):
            kv_cache.append(self.function, self.library, tuple(map(call.get, APPENDED)))
            lengths = call["positions"] + self.new_keys
        call |= {"k": None, "v": None, "positions": lengths}
        addresses |= {"k": 0, "v": 0, "positions": self.library.pointer(lengths)}
        return self.plan(tuple(call.values()), list(addresses.values()))
