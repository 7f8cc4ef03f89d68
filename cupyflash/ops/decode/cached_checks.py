"""The checks of a call with a paged cache: from its arrays and options to a `CachedShape`."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy

from ...runtime.array import Array, View, dense_strides
from ...runtime.checks import short
from ...runtime.overlap import Written, item_size
from ...runtime.specs import Spec, views_of
from ..attention.checks import HEAD_DIMS
from ..attention.checks import check as check_attention
from ..attention.names import caller_name
from ..attention.options import Options
from .cached import ARRAYS, UNLIMITED, CachedOptions, CachedShape

NARROW = ("int8", "float8_e4m3fn")  # of caches that have scales
SEQUENCES = Spec(("batch",), "int32", optional=True)
# A scale may have fewer axes and lengths of 1, as it broadcasts; each has lengths of its own.
SCALES = {
    name: Spec([axes[n:] for n in range(4)], "float32", "free", optional=True)
    for name in ("k_scale", "v_scale")
    for axes in [tuple(f"{axis} of {name}" for axis in ("pages", "rows", "heads"))]
}


def check(
    function: str,
    library: Any,
    arrays: tuple[Array | None, ...],
    options: CachedOptions,
    max_seqlen_q: int | None,
    counted: bool,
) -> tuple[CachedShape, CachedOptions, dict[str, View]]:
    """The shape of a call, its options as numbers, and views of the arrays that are there.

    Args:
        arrays: those of `ARRAYS`.
        options: the scale may be None, and so may a side of the window, or -1.
        max_seqlen_q: the longest sequence of packed queries; None: that is not known.
        counted: the queries are those of the new tokens, so that k has the rows of q, and of a call
            without k and v as in `CachedShape`.

    Raises:
        TypeError: dtypes, libraries, None where an array is needed.
        ValueError: shapes, strides, devices, options, scales.
        NotImplementedError: gradients, transforms, tensors without memory.
    """
    given = dict(zip(ARRAYS, arrays))
    packed = given["cu_seqlens_q"] is not None
    say = functools.partial(name_of, function)
    _check_presence(function, given, packed, max_seqlen_q)
    positions = getattr(given["positions"], "shape", ())
    lengths = {"batch + 1": positions[0] + 1} if packed and len(positions) == 1 else {}
    by_table, by_sequences = given["page_table"] is not None, given["sequences"] is not None
    specs = _specs(packed, by_table, by_sequences, packed or counted)
    views = views_of(function, library, specs, arrays, say=say, head_dim=HEAD_DIMS, **lengths)
    cache, q = views["k_cache"], views["q"]
    batch = views["positions"].shape[0]
    rows = q.shape[0] if packed else math.prod(q.shape[:2])
    longest = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    of_q = packed or "k" not in views or views["k"].shape[1] == q.shape[1]
    shape = CachedShape(
        batch=batch,
        seqlen_q=longest if packed else q.shape[1],
        total_q=rows,
        heads_q=q.shape[-2],
        heads_kv=cache.shape[2],
        head_dim=q.shape[-1],
        num_pages=cache.shape[0],
        page_size=cache.shape[1],
        max_pages=views["page_table"].shape[1] if "page_table" in views else 1,
        packed=packed,
        appends="k" in views,
        counted="k" in views or counted,
        new_keys=None if of_q else views["k"].shape[1],
    )
    shape = shape._replace(computes_scales=check_scales(function, views, shape.pages))
    return shape, _check_options(function, shape, q, options), views


class WrittenCaches(Written):
    """The arrays of calls that write to caches.

    The two caches of a table, or of slots, may be views of one pool of pages: whole pages are then
    those of the one or of the other, as their numbers say.

    Args:
        function, views, written: as of `Written`.
        caches: the names of the two, in ``views``.
    """

    def __init__(
        self, function: str, views: Mapping[str, View], written: list[str], caches: tuple[str, str]
    ) -> None:
        super().__init__(function, views, written)
        first, second = (views[name] for name in caches)
        self.caches = {self.names.index(name) for name in caches}
        self.page = first.strides[0] * item_size(first.dtype)
        if first.strides != second.strides:
            self.page = 0

    def _check_pair(self, i: int, j: int, distance: int) -> None:
        whole_pages = self.page and distance and distance % self.page == 0
        if {i, j} != self.caches or not whole_pages:
            super()._check_pair(i, j, distance)


def name_of(function: str, name: str) -> str:
    """The name of an array of `ARRAYS` as the caller of this function wrote it."""
    return name if name in ("k", "v") else caller_name(function, name)


@functools.cache
def _specs(packed: bool, by_table: bool, by_sequences: bool, rows_of_q: bool) -> dict[str, Spec]:
    """The spec of each array of `ARRAYS`; k has ``rows_of_q``, or rows of its own."""
    rows = ("total",) if packed else ("batch", "seqlen")
    new_rows = rows if rows_of_q else ("batch", "seqlen_new")
    pages = ("num_pages", "page_size")
    if not by_table:
        pages = ("sequences" if by_sequences else "batch", "max_length")
    new = Spec((*new_rows, "heads_kv", "head_dim"), strides=1, optional=True)
    dtype = " or ".join(("like q", *NARROW))
    slopes = Spec([("heads_q",), ("batch", "heads_q")], "float32", 1, optional=True)
    q = Spec((*rows, "heads_q", "head_dim"), strides=1)
    return {
        "q": q,
        "k": new,
        "v": new,
        "k_cache": Spec((*pages, "heads_kv", "head_dim"), dtype, 1),
        "v_cache": Spec((*pages, "heads_kv", "head_dim"), "like k_cache", 1),
        "positions": Spec(("batch",), "int32"),
        "page_table": Spec(("batch", "max_pages"), "int32", 1, optional=True),
        "sequences": SEQUENCES,
        "cu_seqlens_q": Spec(("batch + 1",), "int32", optional=True),
        "alibi_slopes": slopes,
        "sinks": Spec(("heads_q",), "float32 or like q", optional=True),
        "leftpad": SEQUENCES,
        **SCALES,
        "out": q._replace(optional=True),
    }


def _check_presence(
    function: str, given: Mapping[str, Array | None], packed: bool, max_seqlen_q: int | None
) -> None:
    """Arrays that go together, or that exclude each other."""
    say = functools.partial(name_of, function)
    if (given["k"] is None) != (given["v"] is None):
        missing = "k" if given["k"] is None else "v"
        fact = "k and v must both be arrays, or both None"
        raise TypeError(f"{function}: {fact}, got None as {missing}")
    if given["page_table"] is not None and given["sequences"] is not None:
        fact = f"{say('sequences')} must be None beside a {say('page_table')}, whose rows say it"
        raise ValueError(f"{function}: {fact}, got {short(given['sequences'])}")
    if max_seqlen_q is not None and not packed:
        fact = f"max_seqlen_q must be None without {say('cu_seqlens_q')}"
        raise ValueError(f"{function}: {fact}, got {max_seqlen_q}")


def check_scales(function: str, views: dict[str, View], pages: tuple[int, int, int]) -> bool:
    """Whether new rows get scales of their own; ``views`` of scales get three axes.

    Args:
        pages: (num_pages, page_size, heads_kv).

    Raises:
        ValueError: no scales beside a cache of 8 bits, scales beside any other, their shapes.
    """
    narrow, own = views["k_cache"].dtype in NARROW, []
    for name in SCALES:
        said = name_of(function, name)
        if (name in views) != narrow:
            fact = f"{said} must be float32 beside a cache of {' or '.join(NARROW)}, and None "
            got = f"{'an array' if name in views else 'None'} and {views['k_cache'].dtype}"
            raise ValueError(f"{function}: {fact}beside any other, got {got}")
        if not narrow:
            continue
        view = views[name]
        missing = 3 - len(view.shape)
        if missing < 0 or not all(n in (1, m) for n, m in zip(view.shape, pages[missing:])):
            fact = f"{said} must broadcast to (num_pages, page_size, heads_kv) = {pages}"
            raise ValueError(f"{function}: {fact}, got {view.shape}")
        steps = [0 if n == 1 else step for n, step in zip(view.shape, view.strides)]
        views[name] = view._replace(shape=pages, strides=(*[0] * missing, *steps))
        own.append(view.shape == pages)
    if own and own[0] != own[1]:
        said = " and ".join(name_of(function, name) for name in SCALES)
        fact = f"{said} must both have the shape {pages}, and be computed for new tokens, or none"
        raise ValueError(f"{function}: {fact}, got one")
    return any(own)


def _check_options(
    function: str, shape: CachedShape, q: View, options: CachedOptions
) -> CachedOptions:
    """The options as numbers, those of attention checked as it checks them."""
    rows = {"q": shape.heads_q, "k": shape.heads_kv, "v": shape.heads_kv}
    lengths = {"q": shape.seqlen_q, "k": shape.max_length, "v": shape.max_length}
    views = {}
    for name, heads in rows.items():
        sizes = (shape.batch, lengths[name], heads, shape.head_dim)
        views[name] = View(sizes, dense_strides(sizes, range(4)), q.dtype, q.device)
    plain = Options(causal=options.causal, scale=options.scale, window=options.window)
    problem = check_attention(function, views, plain._replace(softcap=options.softcap))
    window = options.window
    if window is not None:
        window = tuple(UNLIMITED if x in (None, -1) else x for x in window)
        window = None if window == (UNLIMITED, UNLIMITED) else window
    return options._replace(causal=bool(options.causal), scale=problem.shape.scale, window=window)


def check_values(
    function: str,
    library: Any,
    arrays: tuple[Array | None, ...],
    shape: CachedShape,
    options: CachedOptions,
) -> None:
    """The values of int32 arrays, which only the CPU and a debugged GPU read.

    Raises:
        ValueError: offsets of sequences that are none, a length that is negative or beyond the
            table, an entry outside the cache among the pages of keys that a query sees.
    """
    call = dict(zip(ARRAYS, arrays))
    ends = call["cu_seqlens_q"]
    if ends is not None:
        _check_ends(function, library.to_list(ends), shape)
    new, lengths, starts = sequences_of(library, call, shape, options)
    say = functools.partial(name_of, function)
    if shape.batch == 0:
        return
    past, last = lengths - new, shape.max_length - new
    if past.min() < 0 or (past > last).any():
        fact = f"{say('positions')} must be from 0 to {last.min()}, so that all tokens are in"
        raise ValueError(f"{function}: {fact} the cache, got {past.min()} to {past.max()}")
    if call["leftpad"] is not None and min(library.to_list(call["leftpad"])) < 0:
        fact = f"{say('leftpad')} must be at least 0"
        raise ValueError(f"{function}: {fact}, got {min(library.to_list(call['leftpad']))}")
    if call["sequences"] is not None:
        _check_pages(function, say("sequences"), library.to_list(call["sequences"]), shape)
    if call["page_table"] is None:
        return
    table = numpy.asarray(library.to_list(call["page_table"]))
    first = numpy.minimum(starts, past) if shape.appends else starts
    size = shape.page_size
    for row, begin, end in zip(table, first, lengths):
        seen = slice(begin // size, -(-end // size) if end > begin else 0)
        _check_pages(function, say("page_table"), row[seen].tolist(), shape)


def sequences_of(
    library: Any, call: Mapping[str, Array | None], shape: CachedShape, options: CachedOptions
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """The keys that come, all keys then, and the first that a query sees, of each sequence.

    The keys that come are those that count beside ``positions``. The first key is the number of
    keys where no query sees any.
    """
    positions = numpy.asarray(library.to_list(call["positions"]), "int64")
    queries = numpy.full(shape.batch, shape.seqlen_q)
    if call["cu_seqlens_q"] is not None:
        queries = numpy.diff(numpy.asarray(library.to_list(call["cu_seqlens_q"]), "int64"))
    new = queries if shape.counted else numpy.zeros_like(queries)
    if shape.new_keys is not None:
        new = numpy.full(shape.batch, shape.new_keys)
    lengths = positions + new
    starts = numpy.zeros_like(lengths)
    if call["leftpad"] is not None:
        starts = numpy.asarray(library.to_list(call["leftpad"]), "int64")
    if options.window is not None:
        starts = numpy.maximum(starts, lengths - queries - options.window[0])
    return new, lengths, numpy.minimum(starts, lengths)


def _check_ends(function: str, ends: list[int], shape: CachedShape) -> None:
    name = name_of(function, "cu_seqlens_q")
    lengths = [b - a for a, b in zip(ends, ends[1:])]
    if ends[0] != 0 or ends[-1] != shape.total_q or min(lengths, default=0) < 0:
        fact = f"{name} must start with 0, not decrease and end with the {shape.total_q} rows"
        raise ValueError(f"{function}: {fact}, got {ends}")
    if max(lengths, default=0) > shape.seqlen_q:
        fact = f"{name} must have no sequence longer than max_seqlen_q = {shape.seqlen_q}"
        raise ValueError(f"{function}: {fact}, got {ends}")


def _check_pages(function: str, name: str, pages: list[int], shape: CachedShape) -> None:
    if pages and not 0 <= min(pages) <= max(pages) < shape.num_pages:
        fact = f"{name} must be from 0 to {shape.num_pages - 1} where a sequence has keys"
        raise ValueError(f"{function}: {fact}, got {min(pages)} to {max(pages)}")
