"""Decoding in plain NumPy: the oracle of the tests, and the way of a call on the CPU.

Blocks and attention compute in float64 for float64 arrays, else in float32. Sampling gives the same
bits as ``cuda_src/decode/sample.cu``: weights are integers, and every operation on floats before is
float32 and rounded by itself. Arrays have been checked, but for what a GPU alone knows too: an
index that does not exist is an error in `append` and `embedding`, and gives NaN in a stack of
blocks, as does a sequence that has no room left.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from ..norm.reference import ACTIVATIONS, norm
from ..runtime.array import Array, compute_dtype
from ..runtime.philox import philox
from ..runtime.structs import header

ONE = header("decode/probability.cuh").ONE
TERMS = [
    numpy.float32(float.fromhex(term))
    for term in ("1.e974fap-10", "1.277856p-7", "1.c91ce6p-5", "1.ebdb56p-3", "1.62e4bap-1", "1p0")
]  # of the polynomial of 2^x
LARGEST_MANTISSA = numpy.float32(float.fromhex("1.fffffep0"))


def embedding(
    library: Any,
    token_weight: Array,
    position_weight: Array | None,
    tokens: Array,
    positions: Array | None,
) -> Array:
    """`cupyflash.decode.embedding.embedding` on arrays of a library on the CPU."""
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


def append(
    function: str,
    library: Any,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    sequences: Array | None,
) -> None:
    """`cache_append` on arrays of a library on the CPU."""
    rows = list(range(len(k))) if sequences is None else library.to_list(sequences)
    positions = library.to_list(positions)
    _require_indices(function, "sequences", rows, k_cache.shape[0])
    _require_indices(function, "positions", positions, k_cache.shape[1])
    for row, (sequence, position) in enumerate(zip(rows, positions)):
        k_cache[sequence, position] = k[row]
        v_cache[sequence, position] = v[row]


def _require_indices(function: str, name: str, indices: list[int], size: int) -> None:
    if indices and not 0 <= min(indices) <= max(indices) < size:
        fact = f"{name} must be from 0 to {size - 1}"
        raise ValueError(f"{function}: {fact}, got {min(indices)} to {max(indices)}")


# Stacks of transformer blocks -----------------------------------------------------------------


def exact(x: Array) -> Array:
    """No rounding; the yardstick of the tests rounds each intermediate result to a dtype."""
    return x


def embed(
    tokens: Array, lengths: Array, token_embedding: Array, position_embedding: Array
) -> Array:
    """(batch, width): embedding of the token and of its position, NaN where there is none."""
    wide = compute_dtype(token_embedding)
    known = (tokens >= 0) & (tokens < len(token_embedding))
    known &= (lengths >= 0) & (lengths < len(position_embedding))
    token, position = numpy.where(known, tokens, 0), numpy.where(known, lengths, 0)
    x = token_embedding[token].astype(wide) + position_embedding[position].astype(wide)
    return numpy.where(known[:, None], x, numpy.nan)


def stack(
    x: Array,
    blocks: Sequence[Any],
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    eps: float,
    rounded: Callable[[Array], Array] = exact,
) -> tuple[Array, Array, Array]:
    """All blocks: (x, new keys, new values), the last two (layers, batch, heads, head_dim).

    Args:
        blocks: of `BlockWeights`.
        k_cache: (layers, batch, max_length, heads, head_dim), as v_cache; only read.
        rounded: what happens to each intermediate result.
    """
    wide = compute_dtype(k_cache)
    x, new_k, new_v = x.astype(wide), [], []
    room = (lengths >= 0) & (lengths < k_cache.shape[2])
    x = numpy.where(room[:, None], x, numpy.nan)
    for weights, keys, values in zip(blocks, k_cache, v_cache):
        w = type(weights)(*(y.astype(wide) for y in weights))
        normal = rounded(norm(False, x, w.ln1_weight, w.ln1_bias, eps)[0])
        qkv = rounded(normal @ w.qkv_weight.T + w.qkv_bias)
        q, k, v = qkv.reshape(len(x), 3, *keys.shape[-2:]).swapaxes(0, 1)
        attended = rounded(_attention(q, k, v, keys, values, numpy.where(room, lengths, 0)))
        x = rounded(x + rounded(attended @ w.proj_weight.T + w.proj_bias))
        normal = rounded(norm(False, x, w.ln2_weight, w.ln2_bias, eps)[0])
        hidden = rounded(normal @ w.up_weight.T + w.up_bias)
        hidden = rounded(ACTIVATIONS["gelu_tanh"][0](hidden))
        x = rounded(x + rounded(hidden @ w.down_weight.T + w.down_bias))
        new_k.append(k)
        new_v.append(v)
    return x, numpy.stack(new_k), numpy.stack(new_v)


def head(x: Array, weight: Array, bias: Array, head_weight: Array, eps: float) -> Array:
    """Logits (batch, vocab) after the last norm."""
    wide = compute_dtype(x)
    normal, _ = norm(False, x, weight.astype(wide), bias.astype(wide), eps)
    return normal @ head_weight.astype(wide).T


def _attention(q: Array, k: Array, v: Array, keys: Array, values: Array, lengths: Array) -> Array:
    """(batch, width): each sequence attends to its cache and to its new key."""
    out = numpy.empty_like(q)
    for b, length in enumerate(lengths):
        every_k = numpy.concatenate([keys[b, :length].astype(q.dtype), k[b][None]])
        every_v = numpy.concatenate([values[b, :length].astype(q.dtype), v[b][None]])
        scores = numpy.einsum("hd,khd->hk", q[b], every_k) / math.sqrt(q.shape[-1])
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[b] = numpy.einsum("hk,khd->hd", weights, every_v)
    return out.reshape(len(q), q.shape[1] * q.shape[2])


def stack_on_cpu(
    checked: Any, x: numpy.ndarray, k_cache: Array, v_cache: Array, lengths: Array
) -> numpy.ndarray:
    """x after all blocks of a `Stack`, the new keys and values written into the caches."""
    library, shape = checked.library, checked.shape
    blocks = [type(block)(*map(library.to_numpy, block)) for block in checked.blocks]
    caches = [library.to_numpy(y) for y in (k_cache, v_cache)]
    lengths = library.to_numpy(lengths)
    out, *new = stack(x, blocks, *caches, lengths, shape.eps)
    room = (lengths >= 0) & (lengths < k_cache.shape[2]) & ~numpy.isnan(x).all(-1)
    for b in numpy.flatnonzero(room):
        for cache, values in zip((k_cache, v_cache), new):
            cache[:, b, int(lengths[b])] = library.from_numpy(numpy.ascontiguousarray(values[:, b]))
    return out.astype(x.dtype)


def logits_on_cpu(
    checked: Any, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array
) -> numpy.ndarray:
    """(batch, vocab), of the token after ``tokens``."""
    library, shape = checked.library, checked.shape
    ends = {name: library.to_numpy(y) for name, y in checked.ends.items()}
    tables = (ends["token_embedding"], ends["position_embedding"])
    x = embed(library.to_numpy(tokens), library.to_numpy(lengths), *tables)
    x = stack_on_cpu(checked, x, k_cache, v_cache, lengths)
    last = (ends["final_weight"], ends["final_bias"], ends["head_weight"])
    return head(x, *last, shape.eps)


def next_on_cpu(
    checked: Any, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """int32 (batch,): the next tokens, -1 where there is none; and 1 where a sequence goes on."""
    logits = logits_on_cpu(checked, tokens, k_cache, v_cache, lengths)
    tokens, lengths = map(checked.library.to_numpy, (tokens, lengths))
    most = min(k_cache.shape[2], checked.shape.positions)
    known = (tokens >= 0) & (tokens < checked.shape.vocab)
    goes_on = known & (lengths >= 0) & (lengths < most)
    found = [greedy_row(row) if go else -1 for go, row in zip(goes_on, logits)]
    return numpy.array(found, "int32"), goes_on.astype("int32")


# Sampling -------------------------------------------------------------------------------------


def sample(library: Any, arrays: Sequence[Array], sampling: Any, limit: int) -> None:
    """`cupyflash.decode.sampling.sample` on arrays of a library on the CPU.

    Args:
        arrays: logits and out, and tokens, positions and ends if there is a state.
        sampling: a `Sampling` with a seed.
    """
    logits, out, *state = arrays
    places = library.to_list(state[1]) if state else [0] * len(logits)
    for row, (values, position) in enumerate(zip(library.to_numpy(logits), places)):
        if sampling.temperature == 0:
            token = greedy_row(values)
        else:
            scale, options = numpy.float32(sampling.scale), (sampling.top_k, sampling.part)
            token = sample_row(values, scale, *options, sampling.seed, (position, row))
        out[row] = token
        if state:
            tokens, positions, ends = state
            tokens[row] = max(token, 0)
            positions[row] = min(position + 1, limit)
            ends[row] = min(position + 1, limit) + 1


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
