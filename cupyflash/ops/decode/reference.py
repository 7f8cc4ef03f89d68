"""Decoding in plain NumPy: the oracle of the tests, and the path of a call on the CPU.

Sampling gives the same bits as ``cuda_src/decode/sample.cu``: weights are integers, and every
operation on floats before is float32 and rounded by itself. Arrays have been checked, but for what
a GPU alone knows too: an index that does not exist is an error in `embedding`.
"""

from collections.abc import Sequence
from typing import Any

import numpy

from ...runtime import loaded
from ...runtime.array import Array, silent
from ...runtime.philox import philox
from ...runtime.structs import header
from ..attention.reference import attention_varlen
from .cached import ARRAYS
from .cached_checks import sequences_of

ONE = header("decode/probability.cuh").ONE
TERMS = [
    numpy.float32(float.fromhex(term))
    for term in ("1.e974fap-10", "1.277856p-7", "1.c91ce6p-5", "1.ebdb56p-3", "1.62e4bap-1", "1p0")
]  # of the polynomial of 2^x
LARGEST_INT8, LARGEST_E4M3 = 127, 448
LARGEST_MANTISSA = numpy.float32(float.fromhex("1.fffffep0"))


def embedding(
    library: Any,
    token_weight: Array,
    position_weight: Array | None,
    tokens: Array,
    positions: Array | None,
) -> Array:
    """`cupyflash.ops.decode.embedding.embedding` on arrays of a library on the CPU."""
    out = None
    for name, indices, weight in (
        ("tokens", tokens, token_weight),
        ("positions", positions, position_weight),
    ):
        if indices is None:
            continue
        indices, table = library.to_numpy(indices), library.to_numpy(weight)
        _require_indices("embedding", name, indices.ravel().tolist(), len(table))
        rows = table[indices]
        out = rows if out is None else out.astype("float32") + rows.astype("float32")
    dtype = library.to_numpy(token_weight).dtype
    return library.from_numpy(numpy.asarray(out, dtype), token_weight)


@silent
def append(
    library: Any,
    k: Array,
    v: Array,
    caches: Sequence[Array],
    slots: numpy.ndarray,
    scales: Sequence[Array | None] = (None, None),
) -> None:
    """Writes rows of keys and values into a cache of a library on the CPU.

    Args:
        k, v: (rows, heads, head_dim).
        caches: those of keys and of values, (num_pages, page_size, heads, head_dim).
        slots: (rows,), the row ``page * page_size + i`` of the cache; -1 skips.
        scales: of caches of 8 bits, float32. Those of shape (num_pages, page_size, heads) are
            computed and written, one of a head of a row; others divide what is written.
    """
    kept = slots >= 0
    where = tuple(map(library.from_numpy, numpy.divmod(slots[kept], max(1, caches[0].shape[1]))))
    for new, cache, scale in zip((k, v), caches, scales):
        rows = new if kept.all() else new[library.from_numpy(numpy.flatnonzero(kept))]
        if scale is None:
            cache[where] = rows
        else:
            _put_narrow(library, library.to_numpy(rows).astype("float32"), cache, scale, where)


def gather(
    library: Any,
    cache: Array,
    scale: Array | None,
    pages: numpy.ndarray,
    starts: numpy.ndarray,
    ends: numpy.ndarray,
) -> numpy.ndarray:
    """(total, heads, head_dim), the keys from ``starts`` to ``ends`` of each sequence, one
    sequence after another; float32 of a cache of 8 bits, whose scale multiplies them.

    Args:
        pages: (batch, max_pages), the pages of each sequence.
    """
    size, counts = max(1, cache.shape[1]), ends - starts
    of = numpy.repeat(numpy.arange(len(counts)), counts)
    keys = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts - starts, counts)
    where = pages[of, keys // size], keys % size
    rows = _bits(cache)[tuple(map(library.from_numpy, where))].view(cache.dtype)
    if scale is None:
        return library.to_numpy(rows)
    rows = rows.astype("float32") if isinstance(rows, numpy.ndarray) else rows.float().numpy()
    return rows * numpy.broadcast_to(library.to_numpy(scale), cache.shape[:3])[where][..., None]


@silent
def attention_with_cache(
    library: Any, arrays: Sequence[Array | None], shape: Any, options: Any
) -> tuple[Array, Array]:
    """(out, lse) of checked arrays of a library on the CPU, whose caches get k and v.

    Args:
        arrays: those of `cupyflash.ops.decode.cached.ARRAYS`.
        shape, options: a `CachedShape` and `CachedOptions`.
    """
    call = dict(zip(ARRAYS, arrays))
    new, ends, starts = sequences_of(library, call, shape, options)
    pages = _pages(library, call, shape)
    caches = (call["k_cache"], call["v_cache"]), (call["k_scale"], call["v_scale"])
    if shape.appends:
        of = numpy.repeat(numpy.arange(shape.batch), new)
        last = numpy.repeat(ends - numpy.cumsum(new), new)
        keys = last + numpy.arange(len(of))
        slots = pages[of, keys // shape.page_size] * shape.page_size + keys % shape.page_size
        rows = (x.reshape(-1, *x.shape[-2:]) for x in (call["k"], call["v"]))
        append(library, *rows, caches[0], slots, caches[1])
    k, v = (gather(library, *x, pages, starts, ends) for x in zip(*caches))
    extras = ("alibi_slopes", "sinks")
    out, lse = attention_varlen(
        library.to_numpy(call["q"]),
        k,
        v,
        None if call["cu_seqlens_q"] is None else library.to_numpy(call["cu_seqlens_q"]),
        numpy.concatenate([[0], numpy.cumsum(ends - starts)]),
        causal=options.causal,
        scale=options.scale,
        window=options.window,
        softcap=options.softcap,
        **{name: None if call[name] is None else library.to_numpy(call[name]) for name in extras},
    )
    out = library.from_numpy(out, call["q"])
    if call["out"] is not None:
        call["out"][...] = out
        out = call["out"]
    return out, library.from_numpy(lse)


def _put_narrow(
    library: Any, rows: numpy.ndarray, cache: Array, scale: Array, where: tuple[Array, Array]
) -> None:
    """Writes rows in float32 to places of a cache of 8 bits, and their scales if each has one."""
    exact = str(cache.dtype).endswith("int8")
    largest = numpy.float32(LARGEST_INT8 if exact else LARGEST_E4M3)
    if tuple(scale.shape) == tuple(cache.shape[:3]):
        scales = numpy.abs(rows).max(-1) / largest
        scale[where] = library.from_numpy(scales)
        scales = numpy.where(scales == 0, numpy.float32(1), scales)
    else:
        whole = numpy.broadcast_to(library.to_numpy(scale), cache.shape[:3])
        scales = whole[tuple(map(library.to_numpy, where))]
    values = rows / scales[..., None]
    values = numpy.clip(numpy.rint(values), -128, 127) if exact else values.clip(-largest, largest)
    _bits(cache)[where] = _bits(library.cast(library.from_numpy(values), cache))


def _bits(cache: Array) -> Array:
    """An array of a dtype that its library can index: of float8, which torch cannot, the bytes."""
    if not str(cache.dtype).removeprefix("torch.").startswith("float8"):
        return cache
    return cache.view("uint8" if isinstance(cache, numpy.ndarray) else loaded.torch.uint8)


def _pages(library: Any, call: dict[str, Array | None], shape: Any) -> numpy.ndarray:
    """(batch, max_pages), the page of each key block of a sequence."""
    if call["page_table"] is not None:
        return library.to_numpy(call["page_table"]).astype("int64")
    if call["sequences"] is not None:
        return library.to_numpy(call["sequences"]).astype("int64")[:, None]
    return numpy.arange(shape.batch)[:, None]


def _require_indices(function: str, name: str, indices: list[int], size: int) -> None:
    if indices and not 0 <= min(indices) <= max(indices) < size:
        fact = f"{name} must be from 0 to {size - 1}"
        raise ValueError(f"{function}: {fact}, got {min(indices)} to {max(indices)}")


# Sampling -------------------------------------------------------------------------------------


def sample(library: Any, arrays: Sequence[Array], sampling: Any, limit: int) -> None:
    """`cupyflash.ops.decode.sampling.sample` on arrays of a library on the CPU.

    Args:
        arrays: logits, out, tokens, positions, ends, choices; None for those that are not given.
        sampling: a `Sampling` with a seed.
    """
    logits, out, tokens, positions, ends, choices = arrays
    places = [0] * len(logits) if positions is None else library.to_list(positions)
    same = sampling.scale, sampling.top_k, sampling.part
    ways = [(*same, row, sampling.seed) for row in range(len(places))]
    if choices is not None:
        ways = [_way(words) for words in library.to_numpy(choices).view("uint32")]
    for row, (values, position) in enumerate(zip(library.to_numpy(logits), places)):
        scale, top_k, top_p, number, seed = ways[row]
        token = greedy_row(values)
        if scale and token >= 0:
            scale = numpy.float32(scale)
            token = sample_row(values, scale, top_k, top_p, seed, (position, number))
        out[row] = token
        if positions is not None:
            tokens[row] = max(token, 0)
            positions[row] = min(position + 1, limit)
            ends[row] = min(position + 1, limit) + 1


def _way(words: numpy.ndarray) -> tuple[float, int, int, int, int]:
    """Scale, top_k, top_p, number and seed from a row of choices, uint32."""
    _, top_k, top_p, number, low, high = words.tolist()
    return float(words[:1].view("float32")[0]), top_k, top_p, number, high << 32 | low


def weights(distance: numpy.ndarray, scale: float) -> numpy.ndarray:
    """2^(-scale * distance) * 2^ONE, rounded down, as uint64; all float32."""
    single = numpy.float32
    with numpy.errstate(over="ignore"):
        exponent = -(distance * single(scale))
    counts = exponent > -(ONE + 1)
    exponent = numpy.where(counts, exponent, single(0))
    whole = numpy.floor(exponent)
    x = exponent - whole
    y = numpy.full_like(x, TERMS[0])
    for term in TERMS[1:]:
        y = y * x + term
    y = numpy.minimum(y, LARGEST_MANTISSA)
    mantissa = (y.view("uint32") & numpy.uint32(0x7FFFFF)) | numpy.uint32(0x800000)
    result = mantissa.astype("uint64") << numpy.uint64(ONE - 23)
    return numpy.where(counts, result >> (-whole).astype("uint64"), numpy.uint64(0))


def last_kept(distance: numpy.ndarray, weight: numpy.ndarray, top_k: int, top_p: int) -> float:
    """The distance up to which tokens are kept; top_p in parts of 2^32, 0 is off for both."""
    order = numpy.argsort(distance, kind="stable")
    order = order[weight[order] > 0]
    last = numpy.inf
    if 0 < top_k <= len(order):
        last = distance[order[top_k - 1]]
    if top_p > 0:
        sums = numpy.cumsum(weight[order])
        kept = distance[order] <= last
        target = max(1, int(sums[kept][-1]) * top_p >> 32)
        last = distance[order[numpy.searchsorted(sums, numpy.uint64(target))]]
    return last


def sample_row(
    logits: numpy.ndarray, scale: float, top_k: int, top_p: int, seed: int, counter: tuple[int, int]
) -> int:
    """A token of one row; -1 if it is no distribution. ``scale`` is log2(e) / temperature.

    Args:
        counter: position and row.
    """
    logits = logits.astype("float32")
    largest = logits.max()
    if not -numpy.inf < largest < numpy.inf:
        return -1
    with numpy.errstate(over="ignore"):
        distance = largest - logits
    weight = weights(distance, scale)
    last = last_kept(distance, weight, top_k, top_p)
    sums = numpy.cumsum(numpy.where(distance <= last, weight, numpy.uint64(0)))
    position, row = (numpy.uint64(x & 0xFFFFFFFF) for x in counter)
    high, low, *_ = philox(seed, (position, row, numpy.uint64(0), numpy.uint64(0)))
    random = int(high) << 32 | int(low)
    part = random * int(sums[-1]) >> 64
    return int(numpy.searchsorted(sums, numpy.uint64(part), side="right"))


def greedy_row(logits: numpy.ndarray) -> int:
    """The largest logit, of equal ones the first; -1 if the row is no distribution."""
    logits = logits.astype("float32")
    return int(logits.argmax()) if -numpy.inf < logits.max() < numpy.inf else -1
