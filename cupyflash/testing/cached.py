"""Problems of attention with a cache: the arrays of a call, and what it must give, in float64.

Everything that no sequence owns is NaN: free pages, rows behind the length, and rows that a window
or the left padding hides from all queries. The table has no page where it needs none.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy

from .tolerance import to_numpy64

HEADS_KV = 2
BATCH = 4
NO_PAGES = (-1, 2**31 - 1)  # what stands in a table where no key of the sequence is
LENGTHS = {  # keys before the call, of pages of this size, and of sequences with so much room
    "zero": lambda page, room: 0,
    "one": lambda page, room: 1,
    "page-1": lambda page, room: page - 1,
    "page": lambda page, room: page,
    "page+1": lambda page, room: page + 1,
    "full": lambda page, room: room,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all keys": {"causal": False},
    "sliding": {"window": (4, None)},
    "window": {"causal": False, "window": (3, 2)},
    "softcap": {"softcap": 2.5, "scale": 0.3},
    "splits": {"num_splits": 3},
    **dict.fromkeys(("slopes", "slopes of sequences", "sinks", "leftpad", "in the cache"), {}),
}


@dataclasses.dataclass(frozen=True)
class CachedCase:
    """What a problem is made of.

    Attributes:
        page: keys of a page; 0 is a contiguous cache.
        option: of `OPTIONS`.
        tokens: new tokens of a sequence; of packed ones, of the longest.
        group: query heads of a key head.
        length: of `LENGTHS`, of the first sequence.
        packed: sequences have tokens of their own, some none.
        strided: keys and values, and the pages of two layers, lie between each other.
    """

    dtype: str
    page: int = 16
    option: str = "plain"
    tokens: int = 1
    group: int = 1
    length: str = "page+1"
    head_dim: int = 64
    packed: bool = False
    strided: bool = False


class CachedProblem:
    """The arguments of a call, and its results.

    Args:
        array: makes an array of the library from values in NumPy, in a dtype if one is given.

    Attributes:
        arguments: of `cupyflash.attention_with_cache`.
        after: the caches as they must be after the call, in float64.
    """

    def __init__(self, case: CachedCase, array: Callable[..., Any]) -> None:
        self.case, self.array = case, array
        rng = self.rng = numpy.random.default_rng(list(str(case).encode()))
        page = case.page or 40
        blocks = -(-(page + case.tokens + 12) // page) if case.page else 1
        self.page, self.room = page, max(0, blocks * page - case.tokens)
        tokens = [case.tokens] * BATCH
        if case.packed:
            tokens = [case.tokens, 1, 0, -(-case.tokens // 2)]
        first = min(LENGTHS[case.length](page, self.room), self.room)
        past = [first, rng.integers(0, self.room + 1), 0, self.room]
        self.tokens, self.past = numpy.array(tokens), numpy.array(past)
        self.lengths = self.past + self.tokens
        self.options = dict(OPTIONS[case.option])
        self.leftpad = numpy.zeros(BATCH, int)
        if case.option == "leftpad":
            self.leftpad = numpy.array([first // 2, past[1], 30, 1])
        self.seen = numpy.minimum(self.leftpad, self.lengths)
        if "window" in self.options:
            behind = self.lengths - self.tokens - self.options["window"][0]
            self.seen = numpy.maximum(self.seen, behind)
        self._make_table(blocks)
        self._make_arrays()

    def _make_table(self, blocks: int) -> None:
        """The pages of the sequences in an order of chance, and others in between."""
        self.num_pages = BATCH * blocks + 3
        pages = self.rng.permutation(self.num_pages)
        self.table = pages[: BATCH * blocks].reshape(BATCH, blocks).astype("int32")
        self.shown = self.table.copy()
        for b in range(BATCH):
            begin = min(self.seen[b], self.past[b]) // self.page
            end = -(-self.lengths[b] // self.page)
            for block in (*range(begin), *range(end, blocks)):
                self.shown[b, block] = (*NO_PAGES, pages[-1])[block % 3]

    def _make_arrays(self) -> None:
        case, array, rng = self.case, self.array, self.rng
        heads, rows = HEADS_KV * case.group, (BATCH, case.tokens)
        if case.packed:
            rows = (int(self.tokens.sum()),)
        normal = lambda *shape: rng.standard_normal(shape, "float32")  # noqa: E731
        make = lambda *shape: array(normal(*shape), case.dtype)  # noqa: E731
        q, *new = (make(*rows, n, case.head_dim) for n in (heads, HEADS_KV, HEADS_KV))
        in_cache = case.option == "in the cache"
        layers = numpy.full(
            (self.num_pages, 2, 2, self.page, HEADS_KV, case.head_dim), numpy.nan, "float32"
        )
        for b, j in self._keys(self.seen, self.lengths if in_cache else self.past):
            layers[self._place(b, j)] = normal(2, HEADS_KV, case.head_dim)
        if case.strided:
            whole = array(layers, case.dtype)
            caches = [whole[:, 1, side] for side in (0, 1)]
        else:
            caches = [array(layers[:, 1, side].copy(), case.dtype) for side in (0, 1)]
        self.after = [to_numpy64(x).copy() for x in caches]
        starts = numpy.cumsum(self.tokens) - self.tokens
        if not in_cache:
            flat = [to_numpy64(x).reshape(-1, HEADS_KV, case.head_dim) for x in new]
            for b, j in self._keys(self.past, self.lengths):
                page, _, _, i = self._place(b, j)
                for cache, x in zip(self.after, flat):
                    cache[page, i] = x[starts[b] + j - self.past[b]]
        self.arguments = {"q": q, "k": new[0], "v": new[1]}
        self.arguments |= dict(zip(("k_cache", "v_cache"), caches)) | self.options
        if in_cache:
            self.arguments |= {"k": None, "v": None}
        self._add_integers(starts)
        self._add_option(heads)

    def _add_integers(self, starts: numpy.ndarray) -> None:
        integers = lambda x: self.array(numpy.asarray(x, "int32"))  # noqa: E731
        more = {"positions": integers(self.past)}
        pages = {"page_table": self.shown} if self.case.page else {"sequences": self.table[:, 0]}
        if self.case.packed:
            pages["cu_seqlens_q"] = [*starts, self.tokens.sum()]
            more["max_seqlen_q"] = int(self.tokens.max())
        if self.leftpad.any():
            pages["leftpad"] = self.leftpad
        self.arguments |= more | {name: integers(x) for name, x in pages.items()}

    def _add_option(self, heads: int) -> None:
        """Arrays of one number a head."""
        self.slopes, self.sinks = numpy.zeros((BATCH, heads)), None
        if self.case.option.startswith("slopes"):
            of_sequences = self.case.option != "slopes"
            shape = (BATCH, heads) if of_sequences else (heads,)
            slopes = self.rng.uniform(0, 0.5, shape).astype("float32")
            self.slopes = numpy.broadcast_to(slopes, (BATCH, heads)).astype("float64")
            self.arguments["alibi_slopes"] = self.array(slopes)
        if self.case.option == "sinks":
            self.sinks = self.rng.standard_normal(heads).astype("float32")
            self.arguments["sinks"] = self.array(self.sinks)

    def _place(self, b: int, j: int) -> tuple[int, int, slice, int]:
        """The index in ``layers`` of key j of sequence b."""
        return int(self.table[b, j // self.page]), 1, slice(None), int(j % self.page)

    def _keys(self, starts: numpy.ndarray, ends: numpy.ndarray) -> list[tuple[int, int]]:
        return [(b, j) for b in range(BATCH) for j in range(max(0, starts[b]), ends[b])]

    def expected(
        self, dtype: str = "float64", weights_dtype: str | None = None
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(out, lse), computed in a dtype, the weights rounded to another."""
        q = to_numpy64(self.arguments["q"])
        packed = self.case.packed
        out, lse = numpy.zeros(q.shape), numpy.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), 0.0)
        starts = numpy.cumsum(self.tokens) - self.tokens
        for b in range(BATCH):
            rows = slice(starts[b], starts[b] + self.tokens[b])
            at, lse_at = ((rows,), (slice(None), rows)) if packed else ((b,), (b,))
            where = [(self.table[b, j // self.page], j % self.page) for _, j in self._of(b)]
            k, v = (
                numpy.array([cache[x] for x in where]).reshape(-1, HEADS_KV, self.case.head_dim)
                for cache in self.after
            )
            out[at], lse[lse_at] = self._sequence(b, q[at], k, v, dtype, weights_dtype or dtype)
        return out, lse

    def _of(self, b: int) -> list[tuple[int, int]]:
        return [(b, j) for j in range(self.lengths[b])]

    def _sequence(
        self, b: int, q: Any, k: Any, v: Any, dtype: str, weights_dtype: str
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(out, lse) of a sequence, by the definition."""
        scale = self.options.get("scale", self.case.head_dim**-0.5)
        k, v = (numpy.repeat(x, self.case.group, 1).astype(dtype) for x in (k, v))
        scores = numpy.einsum("ihd,jhd->hij", q.astype(dtype), k) * numpy.dtype(dtype).type(scale)
        if softcap := self.options.get("softcap"):
            scores = softcap * numpy.tanh(scores / softcap)
        place = numpy.arange(len(q))[:, None] + len(k) - len(q)
        key = numpy.arange(len(k))
        scores = scores - (self.slopes[b][:, None, None] * abs(place - key)).astype(dtype)
        left, right = self.options.get("window") or (None, None)
        seen = key >= self.leftpad[b]
        seen = seen & (key <= place + (0 if self.options.get("causal", True) else right or 99999))
        seen &= key >= place - (99999 if left is None else left)
        sinks = numpy.full(scores.shape[0], -numpy.inf) if self.sinks is None else self.sinks
        sinks = numpy.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1)).astype(dtype)
        scores = numpy.concatenate([numpy.where(seen, scores, -numpy.inf), sinks], 2)
        largest = scores.max(2, keepdims=True)
        weights = numpy.exp(scores - numpy.where(largest == -numpy.inf, 0, largest))
        total = weights.sum(2)
        with numpy.errstate(divide="ignore"):
            lse = numpy.where(total > 0, largest[..., 0] + numpy.log(total), -numpy.inf)
        rounded = weights[..., :-1].astype(weights_dtype).astype(dtype)
        values = numpy.where(numpy.isnan(v), 0, v)
        out = numpy.einsum("hij,jhd->ihd", rounded, values)
        return out / numpy.where(total > 0, total, 1).T[..., None], lse
