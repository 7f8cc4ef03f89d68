"""Calls of attention to a cache in pages, compared with float64 (test_paged_decode.py).

``python tests/decode/paged_calls.py FOLDER PART ...`` runs kernels on the CPU, emulated, and
compiles them into the folder; a part is one of `PARTS`. What no sequence owns is NaN, and entries
of the table that no key needs are no pages or those of others.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

from cupyflash.ops.decode import kernels, kv_cache, plans
from cupyflash.ops.decode.cached import ARRAYS, UNLIMITED, CachedOptions, CachedShape
from cupyflash.ops.decode.cached_checks import check_scales
from cupyflash.runtime.lookup import library_of
from cupyflash.testing import assert_close_to_float64, to_numpy64

OUTSIDE = (-1, 2**31 - 1, 10**6)  # entries that are no pages
PARTS = ("few", "tile", "narrow")  # of the cases, by their kernels
GUARDS = 3  # pages that no sequence has


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        positions: keys of each sequence before its new tokens.
        tokens: new ones of each sequence, or of all of them; a tuple is packed.
        page: keys of a page; 0 is a contiguous cache.
        appends: the new keys are arguments; else they are counted among the keys of the cache, or
            not.
    """

    positions: tuple[int, ...]
    tokens: "int | tuple[int, ...]" = 1
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 64
    page: int = 16
    dtype: str = "float16"
    appends: bool = True
    counted: bool = True
    causal: bool = True
    window: "tuple[int, int] | None" = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    leftpad: "tuple[int, ...] | None" = None
    shuffled: bool = False  # sequences of a contiguous cache are not in their order
    num_splits: int = 0

    @property
    def batch(self) -> int:
        return len(self.positions)

    @property
    def packed(self) -> bool:
        return isinstance(self.tokens, tuple)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.tokens if self.packed else (self.tokens,) * self.batch

    @property
    def launches(self) -> list[str]:
        """The kernel of attention, and what may come before it."""
        rows = max(self.counts) * self.group
        if rows > 16 and self.head_dim <= 128:
            return ["flash_decode_tile", "cache_append"]
        return ["flash_decode_one" if self.of_one else "flash_decode"]

    @property
    def of_one(self) -> bool:
        """Whether the kernel is one for a single sequence."""
        rows = max(self.counts) * self.group
        one = self.batch == 1 and rows <= (16 if self.head_dim <= 128 else 8)
        return one and not self.num_splits

    @property
    def lengths(self) -> list[int]:
        return [p + n * self.counted for p, n in zip(self.positions, self.counts)]


class Call:
    """The arrays of a case, and what must come out."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.device = case, device
        self.rng = numpy.random.default_rng(abs(hash(repr(case))) % 2**32)
        self.dtype = getattr(torch, case.dtype)
        heads_q, total = case.heads_kv * case.group, sum(case.counts)
        self.most = max(max(case.positions) + max(case.counts), 1) + 2
        self.q = self._random(total, heads_q)
        self.new = [self._random(total, case.heads_kv) for _ in range(2)]
        # The keys of each sequence, from which the pages are filled.
        self.past = [[self._random(n, case.heads_kv) for n in case.lengths] for _ in range(2)]
        starts = numpy.cumsum([0, *case.counts])
        self.rows = [slice(a, b) for a, b in zip(starts, starts[1:])]
        if case.appends:
            for new, past in zip(self.new, self.past):
                for keys, position, rows in zip(past, case.positions, self.rows):
                    keys[position:] = new[rows]
        self._make_pages()
        slopes = self.rng.uniform(0.1, 0.5, (case.batch, heads_q)).astype("float32")
        self.alibi = self._tensor(slopes) if case.alibi else None
        self.sinks = self._tensor(self.rng.normal(size=heads_q), "float32") if case.sinks else None

    def _tensor(self, x: Any, dtype: "str | None" = None) -> torch.Tensor:
        return torch.tensor(numpy.asarray(x, dtype)).to(self.device)

    def _random(self, rows: int, heads: int) -> torch.Tensor:
        x = self.rng.normal(size=(rows, heads, self.case.head_dim)).astype("float32")
        return torch.tensor(x).to(self.device, self.dtype)

    def _make_pages(self) -> None:
        case = self.case
        page = case.page or self.most
        per_sequence = -(-self.most // page)
        pages = case.batch * per_sequence + GUARDS
        shape = (pages, page, case.heads_kv, case.head_dim)
        order = self.rng.permutation(pages)[: case.batch * per_sequence]
        if not case.page and not case.shuffled:
            order = numpy.arange(case.batch)
        table = order.reshape(case.batch, per_sequence)
        self.caches = [torch.full(shape, torch.nan).to(self.device, self.dtype) for _ in range(2)]
        self.after = []
        owned = case.positions if case.appends else case.lengths
        for cache, past in zip(self.caches, self.past):
            after = cache.clone()
            for b, keys in enumerate(past):
                first = self.first_key(b)
                for j in range(first, case.lengths[b]):
                    at = table[b, j // page], j % page
                    after[at] = keys[j]
                    if j < owned[b]:
                        cache[at] = keys[j]
                for j in range(case.positions[b], case.lengths[b] if case.appends else 0):
                    after[table[b, j // page], j % page] = keys[j]
            self.after.append(after)
        self.table = self.sequences = None
        if case.page:
            for b, length in enumerate(case.lengths):
                begin, end = self.first_key(b) // page, -(-length // page)
                if case.appends:
                    begin = min(begin, case.positions[b] // page)
                for i in {*range(per_sequence)} - {*range(begin, end)}:
                    table[b, i] = (*OUTSIDE, order[0])[i % 4]
            self.table = self._tensor(table, "int32")
        elif case.shuffled:
            self.sequences = self._tensor(order, "int32")
        self.sizes, self.pages = (pages, page, per_sequence), table

    def first_key(self, b: int) -> int:
        """The first key that the first token sees."""
        left = self.case.window[0] if self.case.window else UNLIMITED
        pad = self.case.leftpad[b] if self.case.leftpad else 0
        return max(pad, self.case.lengths[b] - self.case.counts[b] - left, 0)

    def arrays(self) -> tuple:
        """In the order of `ARRAYS`."""
        case = self.case
        shaped = lambda x: x if case.packed else x.reshape(case.batch, case.tokens, *x.shape[1:])  # noqa: E731
        k, v = map(shaped, self.new) if case.appends else (None, None)
        starts = self._tensor(numpy.cumsum([0, *case.counts]), "int32") if case.packed else None
        leftpad = self._tensor(case.leftpad, "int32") if case.leftpad else None
        given = {
            **{"q": shaped(self.q), "k": k, "v": v},
            **dict(zip(("k_cache", "v_cache"), self.caches)),
            "positions": self._tensor(case.positions, "int32"),
            "page_table": self.table,
            "sequences": self.sequences,
            "cu_seqlens_q": starts,
            "alibi_slopes": self.alibi,
            "sinks": self.sinks,
            "leftpad": leftpad,
        }
        return tuple(given.get(name) for name in ARRAYS)

    def run(self, some: "list[int] | None" = None) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(out, LSE) by row and head.

        Args:
            some: numbers of sequences, for a call of these alone; not packed.
        """
        case, arrays = self.case, self.arrays()
        if some is not None:
            caches, rest = arrays[3:5], (*arrays[:3], *arrays[5:])
            rest = [x if x is None or x is self.sinks else x[some] for x in rest]
            arrays = (*rest[:3], *caches, *rest[3:])
        batch = len(arrays[5])
        library = library_of(arrays[0])
        views = {n: library.view(x) for n, x in zip(ARRAYS, arrays) if x is not None}
        pages, page, per_sequence = self.sizes
        shape = CachedShape(
            batch=batch,
            seqlen_q=max(case.counts),
            total_q=sum(case.counts) if some is None else batch * case.tokens,
            heads_q=case.heads_kv * case.group,
            heads_kv=case.heads_kv,
            head_dim=case.head_dim,
            num_pages=pages,
            page_size=page,
            max_pages=per_sequence,
            packed=case.packed,
            appends=case.appends,
            counted=case.counted,
            aligned=True,
        )
        options = CachedOptions(
            scale=case.head_dim**-0.5,
            causal=case.causal,
            window=case.window,
            softcap=case.softcap,
            num_splits=case.num_splits,
            return_lse=True,
        )
        check_scales("call", views, shape.pages)
        plan = plans.decode_plan(library, shape, options, views)
        assert plan is not None
        out, lse = plan(arrays, [0 if x is None else library.pointer(x) for x in arrays])
        if not case.packed:
            lse = lse.transpose(0, 1).reshape(lse.shape[1], -1)
        return to_numpy64(out.reshape(-1, *self.q.shape[1:])), to_numpy64(lse).T

    def expected(self, dtype: str) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(out, LSE) in float64, or in float32 with weights rounded to a dtype."""
        case, single = self.case, dtype != "float64"
        kind = "float32" if single else "float64"
        out = numpy.zeros(self.q.shape, kind)
        lse = numpy.full(self.q.shape[:2], -numpy.inf, kind)
        alibi, sinks = (None if x is None else to_numpy64(x) for x in (self.alibi, self.sinks))
        scale = numpy.dtype(kind).type(case.head_dim**-0.5)
        for b, (rows, n, length) in enumerate(zip(self.rows, case.counts, case.lengths)):
            tensors = (self.q[rows], *(past[b] for past in self.past))
            q, k, v = (to_numpy64(x).astype(kind) for x in tensors)
            keys = numpy.arange(length)
            for i, h in numpy.ndindex(n, q.shape[1]):
                diagonal = length - n + i
                left, right = case.window or (UNLIMITED, UNLIMITED)
                right = 0 if case.causal else right
                first = max(diagonal - left, case.leftpad[b] if case.leftpad else 0)
                seen = (keys >= first) & (keys <= diagonal + right)
                scores = (k[seen, h // case.group] @ q[i, h]) * scale
                if case.softcap:
                    scores = case.softcap * numpy.tanh(scores / case.softcap)
                if alibi is not None:
                    scores = scores - alibi[b, h].astype(kind) * abs(keys[seen] - diagonal)
                logits = scores if sinks is None else numpy.append(scores, sinks[h].astype(kind))
                if not len(logits):
                    continue
                largest = logits.max()
                total = numpy.exp(logits - largest).sum()
                lse[rows][i, h] = largest + numpy.log(total)
                weights = numpy.exp(scores - largest)
                if single:
                    rounded = torch.tensor(weights).to(getattr(torch, dtype)).float().numpy()
                    weights = rounded.astype(kind)
                out[rows][i, h] = weights @ v[seen, h // case.group] / total
        return out, lse

    def check(self) -> None:
        """Compares results, caches and what no sequence owns."""
        self.compare(*self.run())
        for cache, after in zip(self.caches, self.after):
            numpy.testing.assert_array_equal(to_numpy64(cache), to_numpy64(after))

    def compare(self, out: numpy.ndarray, lse: numpy.ndarray) -> None:
        """Compares results."""
        dtype = self.case.dtype
        (right, right_lse), (rounded, rounded_lse) = map(self.expected, ("float64", dtype))
        assert_close_to_float64(out, right, rounded, dtype, "out", terms=8.0)
        empty = numpy.isneginf(right_lse)
        numpy.testing.assert_array_equal(numpy.isneginf(lse), empty)
        values = (numpy.where(empty, 0, x) for x in (lse, right_lse, rounded_lse))
        assert_close_to_float64(*values, "float32", "lse", terms=32.0)


RAGGED = (0, 1, 37, 100, 16)
CASES = [
    *(Case(RAGGED, page=page, heads_kv=2, group=group, head_dim=128, dtype="bfloat16")
      for page, group in ((1, 1), (3, 4), (16, 7), (64, 8), (0, 16))),
    Case((250, 3), page=16, group=4, head_dim=72, tokens=3, window=(20, 0), sinks=True),
    Case((70, 130), page=3, group=2, tokens=2, softcap=5.0, alibi=True, causal=False),
    Case((0, 33, 64), page=0, shuffled=True, group=5, tokens=8, leftpad=(0, 5, 64)),
    Case(RAGGED, page=8, tokens=(1, 0, 3, 2, 8), heads_kv=2, group=3, window=(17, UNLIMITED)),
    Case(RAGGED, page=16, tokens=2, appends=False, counted=False, causal=False, sinks=True),
    Case((20, 60), page=16, tokens=3, appends=False, head_dim=192, group=4, window=(30, 5)),
    Case((300, 40), page=64, head_dim=256, group=9, dtype="bfloat16"),
    Case((700, 5), page=1, heads_kv=2, group=8, head_dim=128, num_splits=3),
    Case((45, 0, 9), page=3, tokens=2, head_dim=192, group=8, num_splits=1, alibi=True),
    Case((900,), page=16, tokens=(2,), appends=False, leftpad=(333,), num_splits=32),
    Case((37, 100, 260), page=16, tokens=8, heads_kv=2, group=8, head_dim=128, dtype="bfloat16"),
    Case((0, 130), page=1, tokens=(5, 3), group=7, head_dim=128, softcap=5.0, alibi=True),
    Case((64, 0, 333), page=0, tokens=4, group=16, heads_kv=2, sinks=True, window=(50, 3)),
    Case((400, 9), page=64, tokens=6, group=12, appends=False, counted=False, causal=False,
         dtype="bfloat16", head_dim=104, num_splits=3),
    Case((300,), page=3, tokens=60, leftpad=(17,), window=(100, 0)),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class NarrowCase(Case):
    """A call with a cache of 8 bits.

    Attributes:
        cache: its dtype.
        scales: the shape of its scales; "own" ones are computed for new tokens.
        spread: the values of different keys differ by up to this power of two.
    """

    cache: str = "int8"
    scales: "tuple[int, ...] | str" = "own"
    spread: int = 0

    @property
    def launches(self) -> list[str]:
        return [f"flash_decode_narrow{'_one' * self.of_one}", "cache_append"]


class NarrowCall(Call):
    """What must come out is what the numbers of the cache stand for."""

    def _make_pages(self) -> None:
        super()._make_pages()
        case, most = self.case, 127 if self.case.cache == "int8" else 448
        self.scales, caches = [], []
        for name, cache in zip("kv", self.caches):
            values = cache.float()
            if name == "v":
                powers = self._tensor(
                    self.rng.integers(-case.spread, case.spread + 1, cache.shape[:3])
                )
                values = torch.ldexp(values, powers[..., None])
            if case.scales == "own":
                scale = values.abs().amax(-1) / most
            else:
                scale = self._tensor(self.rng.uniform(0.01, 0.03, case.scales), "float32")
            narrow = values / scale.expand(values.shape[:3])[..., None]
            if case.cache == "int8":
                narrow = narrow.nan_to_num(99).round()  # scales of what nobody owns are NaN
            self.scales.append(scale)
            caches.append(narrow.clamp(-most, most).to(getattr(torch, case.cache)))
        self.caches = caches

    def arrays(self) -> tuple:
        given = dict(zip(ARRAYS, super().arrays())) | dict(zip(("k_scale", "v_scale"), self.scales))
        return tuple(given[name] for name in ARRAYS)

    def check(self) -> None:
        """Compares results with those of the cache as it is afterwards, new tokens included."""
        out, lse = self.run()
        for past, cache, scale in zip(self.past, self.caches, self.scales):
            whole = cache.float() * scale.expand(cache.shape[:3])[..., None]
            for b, keys in enumerate(past):
                new = [
                    whole[self.pages[b, j // self.sizes[1]], j % self.sizes[1]]
                    for j in range(self.first_key(b), len(keys))
                ]
                past[b] = torch.stack([*keys[: self.first_key(b)].float(), *new]) if new else keys
        self.compare(out, lse)


NARROW_CASES = [
    NarrowCase(RAGGED, page=16, heads_kv=2, group=4, head_dim=128, dtype="bfloat16"),
    NarrowCase(RAGGED, page=3, group=7, cache="float8_e4m3fn", scales=(1,), window=(40, 0)),
    NarrowCase((250, 3), page=1, group=9, head_dim=80, tokens=2, scales=(), sinks=True),
    NarrowCase((70, 130), page=64, group=8, head_dim=128, tokens=(2, 1), softcap=5.0, alibi=True,
               cache="float8_e4m3fn", spread=12),
    NarrowCase((0, 33, 64), page=0, shuffled=True, group=3, tokens=8, leftpad=(0, 5, 64),
               head_dim=192, dtype="bfloat16", cache="float8_e4m3fn", scales=(1, 1, 1)),
    NarrowCase((400, 45), page=16, appends=False, heads_kv=2, group=2, head_dim=256, spread=40,
               dtype="bfloat16", num_splits=3),
    NarrowCase((45, 70), page=8, appends=False, counted=False, causal=False, scales=(2,),
               heads_kv=2, group=8, cache="float8_e4m3fn", num_splits=1),
]  # fmt: skip
NARROW_ONE = [  # one sequence, with new tokens in two chunks, and before the padding ends
    NarrowCase((4510,), page=16, heads_kv=2, group=4, tokens=3, head_dim=128, dtype="bfloat16"),
    NarrowCase((62,), page=3, group=5, tokens=3, cache="float8_e4m3fn", spread=12),
    NarrowCase((14,), page=1, group=1, tokens=8, leftpad=(17,), head_dim=192, sinks=True),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rows:
    """A call that writes rows into a cache, and one that reads them back.

    Attributes:
        where: "slots", "keys" of a position for each row, or "packed" or "batch" after positions.
        scales: the shape of the scales of a cache of 8 bits; "own" are computed.
    """

    where: str = "slots"
    dtype: str = "bfloat16"
    cache: str = ""  # "" is the dtype
    scales: "tuple[int, ...] | str" = ()
    head_dim: int = 64
    page: int = 3

    def check(self, device: str = "cpu") -> None:
        rng = numpy.random.default_rng(len(repr(self)))
        tensor = lambda x, kind: torch.tensor(numpy.asarray(x, kind)).to(device)  # noqa: E731
        batch, heads, pages, width = 3, 2, 20, 6
        counts = (2, 2, 2) if self.where == "batch" else (4, 0, 2)
        total, starts = sum(counts), numpy.cumsum([0, *counts])
        table = rng.permutation(pages)[: batch * width].reshape(batch, width)
        positions = numpy.array([self.page + 1, 0, 2 * self.page - 1])
        of = numpy.repeat(numpy.arange(batch), counts)
        keys = positions[of] + numpy.arange(total) - starts[of]
        slots = table[of, keys // self.page] * self.page + keys % self.page
        shape = (total, heads, self.head_dim)
        new = [
            tensor(rng.normal(size=shape), "float32").to(getattr(torch, self.dtype)) for _ in "kv"
        ]
        new[0][0, 0] = 0  # whose own scale is 0
        kind = getattr(torch, self.cache or self.dtype)
        caches = [
            torch.ones((pages, self.page, heads, self.head_dim)).to(device, kind) for _ in "kv"
        ]
        before, scales = [x.float().clone() for x in caches], [None, None]
        if self.cache:
            own = self.scales == "own"
            size = (pages, self.page, heads) if own else self.scales
            scales = [tensor(rng.uniform(0.01, 0.03, size), "float32") for _ in "kv"]
        table[1, 1], where = -1, dict.fromkeys(kv_cache.APPENDED[4:9])
        if self.where == "slots":
            slots[1] = -1
            where["slots"] = tensor(slots, "int64")
        else:
            where["page_table"] = tensor(table, "int32")
            some = keys if self.where == "keys" else positions
            where["positions"] = tensor(some, "int32")
            where["sequences"] = tensor(of, "int32") if self.where == "keys" else None
            where["cu_seqlens_q"] = tensor(starts, "int32") if self.where == "packed" else None
        rows = [x.reshape(batch, 2, *shape[1:]) if self.where == "batch" else x for x in new]
        library = library_of(new[0])
        kv_cache.append("append", library, (*rows, *caches, *where.values(), *scales))
        lengths, begins = tensor(positions + counts, "int32"), tensor([1, 0, 0], "int32")
        places = (lengths, begins, tensor(table, "int32"), None, width * self.page)
        back = kv_cache.gather("gather", library, new[0], tuple(caches), tuple(scales), *places)
        for x, cache, old, scale, found in zip(new, caches, before, scales, back):
            right = self._written(x.float(), old, slots, scale)
            assert torch.equal(cache.float(), right)
            whole = right if scale is None else right * scale.expand(right.shape[:3])[..., None]
            for b, (first, last) in enumerate(zip((1, 0, 0), positions + counts)):
                for i, key in enumerate(range(first, last)):
                    page = max(table[b, key // self.page], 0)
                    row = whole[page, key % self.page].to(getattr(torch, self.dtype))
                    assert torch.equal(found[b, i], row)
                assert found[b, last - first :].isnan().all() or device != "cpu"

    def _written(self, x: Any, old: Any, slots: numpy.ndarray, scale: Any) -> torch.Tensor:
        """The cache with the rows x in their slots, as float32."""
        new, page = old.clone(), self.page
        for row, slot in zip(x, slots.tolist()):
            if slot < 0:
                continue
            if scale is not None:
                if self.scales == "own":
                    largest = 127 if self.cache == "int8" else 448
                    # On a GPU torch would multiply by the rounded inverse of a number.
                    size = row.abs().amax(-1) / torch.full_like(row[..., 0], largest)
                    assert torch.equal(scale[slot // page, slot % page], size)
                    size = torch.where(size == 0, 1.0, size)
                else:
                    size = scale.expand(old.shape[:3])[slot // page, slot % page]
                row = row / size[:, None]
                kind = getattr(torch, self.cache)
                most = (-128, 127) if self.cache == "int8" else (-448, 448)
                row = row.round() if self.cache == "int8" else row
                row = row.clamp(*most).to(kind).float()
            new[slot // page, slot % page] = row
        return new


ROWS = [
    Rows(),
    Rows("keys", "float16", head_dim=72, page=16),
    Rows("packed", "float32", head_dim=20, page=1),
    Rows("batch", head_dim=256),
    Rows("slots", cache="int8", scales="own", head_dim=128),
    Rows("packed", "float16", "float8_e4m3fn", (2,)),
    Rows("batch", "float32", "float8_e4m3fn", "own", head_dim=33),
    Rows("keys", "bfloat16", "int8", ()),
]
LONG = Case((4500, 700), page=16, head_dim=128, group=2)  # parts in groups of 8, and of 16
ONE = [  # one sequence, with new tokens in two chunks, and before the padding ends
    Case((4500,), page=16, heads_kv=2, group=8, head_dim=128, dtype="bfloat16"),
    Case((14,), page=3, tokens=8, group=2, leftpad=(17,)),
    Case((0,), page=0, tokens=3, group=5, sinks=True, head_dim=72),
    Case((900,), page=16, tokens=(2,), group=4, head_dim=192, window=(333, 0), softcap=5.0),
    Case((260,), page=64, heads_kv=3, tokens=4, group=4, appends=False, counted=False, causal=False,
         alibi=True, head_dim=128),
    Case((130,), page=1, tokens=(3,), heads_kv=2, leftpad=(20,), window=(50, UNLIMITED)),
]  # fmt: skip
LONG_TILE = Case((2500, 60), page=16, tokens=3, group=8)
FIXED_TILE = Case((70, 400, 3), page=3, tokens=5, group=4, num_splits=4, sinks=True)
FIXED = Case((70, 400, 3), page=3, heads_kv=2, group=4, head_dim=128, num_splits=4, alibi=True)


def check_fixed_splits(case: Case, device: str = "cpu") -> None:
    """The bits of a sequence do not depend on the others of the batch, nor on its place in it."""
    call = Call(case, device)
    rows = case.tokens
    whole, lse = call.run()
    for some in ([1], [2, 1], [1, 0, 2, 1, 1]):
        at = some.index(1) * rows
        part, part_lse = call.run(some)
        numpy.testing.assert_array_equal(part[at : at + rows], whole[rows : 2 * rows])
        numpy.testing.assert_array_equal(part_lse[at : at + rows], lse[rows : 2 * rows])


@contextlib.contextmanager
def grid_of(blocks: "int | None") -> Iterator[None]:
    """Calls without fixed splits have this number of blocks; None leaves it to the plan."""
    with contextlib.ExitStack() as stack:
        if blocks:
            stack.enter_context(mock.patch.object(kernels, "decode_grid", lambda *_: blocks))
        yield


def run_emulated(folder: Path, part: str) -> None:
    import emulator

    def run(case: Any, blocks: "int | None", check: Callable[[], None], *names: str) -> None:
        with emulator.hopper(folder) as launched, grid_of(blocks):
            check()
        assert names[0] in launched and {*launched} <= {*names}
        print(f"{blocks} blocks, {case}")

    if part == "narrow":
        for number, case in enumerate(NARROW_CASES):
            for blocks in (None, 1, 40) if number < 2 else (None,):
                run(case, blocks, NarrowCall(case).check, *case.launches)
        for number, case in enumerate(NARROW_ONE):  # 160 blocks give groups of parts
            for blocks in (None, 7) if number else (None, 1, 40, 160):
                run(case, blocks, NarrowCall(case).check, *case.launches)
        return
    for number, case in enumerate(CASES):
        if ("flash_decode_tile" in case.launches) != (part == "tile"):
            continue
        for blocks in (None, 1, 40) if number % 3 == 0 and not case.num_splits else (None,):
            run(case, blocks, Call(case).check, *case.launches)
    if part == "tile":
        run(LONG_TILE, 40, Call(LONG_TILE).check, *LONG_TILE.launches)
        run(FIXED_TILE, None, lambda: check_fixed_splits(FIXED_TILE), *FIXED_TILE.launches)
        return
    for blocks in (20, 75):
        run(LONG, blocks, Call(LONG).check, "flash_decode")
    for number, case in enumerate(ONE):  # 40 blocks give groups of 8, 160 of 16
        for blocks in (None, 7) if number else (None, 1, 40, 160):
            run(case, blocks, Call(case).check, "flash_decode_one")
    run(FIXED, None, lambda: check_fixed_splits(FIXED), "flash_decode")
    for rows in ROWS:
        run(rows, None, rows.check, "cache_append", "cache_gather")


if __name__ == "__main__":
    torch.set_deterministic_debug_mode("error")  # then torch.empty() is filled with NaN
    for part in sys.argv[2:]:
        run_emulated(Path(sys.argv[1]), part)
