"""Philox4x32-7 as in ``cuda_src/common/philox.cuh``, and dropout with its random numbers.

Whether dropout keeps a weight, or an element of a row, depends only on the seed and on its
position, and not on the order in which a kernel visits it. So every kernel, the backward pass and
the CPU drop the same. `diffusion.reference.normal` makes the noise of the samplers from the same
numbers.

J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy

from .array import Array, array_namespace
from .checks import plain_real
from .specs import Spec, views_of
from .structs import header

INTEGERS = (int, numpy.integer)  # a union, int | numpy.integer, older Dynamos do not trace
SEEDS_END = 2**63
SEED_ARRAY = Spec([(1,), ()], "int64", optional=True, instead="an integer, None")
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF
ROW_DROPOUT_STREAM = header("norm/dropout_add.cu").ROW_DROPOUT_STREAM  # nothing else uses it


def philox(seed: int, counter: tuple[Array, Array, Array, Array]) -> list[Array]:
    """Four arrays of random 32-bit numbers.

    Args:
        seed: 64 bits, the key.
        counter: four uint64 arrays of 32-bit values, which are broadcast.
    """
    xp = array_namespace(counter[0])
    left_factor, right_factor = map(xp.uint64, MULTIPLIERS)
    low, half = xp.uint64(LOW), xp.uint64(32)
    keys = seed & LOW, seed >> 32 & LOW
    a, b, c, d = xp.broadcast_arrays(*counter)
    for _ in range(ROUNDS):
        left, right = left_factor * a, right_factor * c
        a, b = (right >> half) ^ b ^ xp.uint64(keys[0]), right & low
        c, d = (left >> half) ^ d ^ xp.uint64(keys[1]), left & low
        keys = tuple(key + step & LOW for key, step in zip(keys, KEY_STEPS))
    return [a, b, c, d]


def keep_mask(seed: int, threshold: int, heads: Array, rows: range, cols: range) -> Array:
    """True where a weight stays.

    Args:
        threshold: weights are dropped with probability ``threshold / 2**16``.
        heads: uint64 (n,), the index sequence * heads_q + head.
        rows: a contiguous range of queries of the sequence.
        cols: a contiguous range of keys of the sequence.

    Returns:
        bool (n, len(rows), len(cols)).
    """
    xp = array_namespace(heads)
    # One counter serves rows r and r + 8 and columns c, c + 1, c + 8 and c + 9 of a 16 x 16 block.
    row_blocks = range(rows.start // 16, -(-rows.stop // 16))
    col_blocks = range(cols.start // 16, -(-cols.stop // 16))
    x = xp.arange(row_blocks.start * 8, row_blocks.stop * 8, dtype="uint64")[:, None]
    y = xp.arange(col_blocks.start * 4, col_blocks.stop * 4, dtype="uint64")
    counter = (x, y, heads[:, None, None], xp.zeros(1, "uint64"))
    words = xp.stack(philox(seed, counter))
    halves = xp.stack([words & xp.uint64(0xFFFF), words >> xp.uint64(16)])
    # (odd column, lower rows, right columns, head, row block, row, column block, pair)
    halves = halves.reshape(2, 2, 2, len(heads), len(row_blocks), 8, len(col_blocks), 4)
    kept = (halves >= threshold).transpose(3, 4, 1, 5, 6, 2, 7, 0)
    kept = kept.reshape(len(heads), 16 * len(row_blocks), 16 * len(col_blocks))
    row, col = rows.start - 16 * row_blocks.start, cols.start - 16 * col_blocks.start
    return kept[:, row : row + len(rows), col : col + len(cols)]


def dropout_threshold(dropout_p: float) -> int:
    """Weights whose 16 random bits are less than this are dropped: p in steps of 2^-16, below 1."""
    return min(round(dropout_p * 65536), 65535)


def dropout_scale(threshold: int) -> float:
    """The factor of the weights that are kept, 1 / (1 - p)."""
    return 65536 / (65536 - threshold)


def keep_rows(seed: int, threshold: int, rows: range, columns: int) -> Array:
    """True where dropout before a norm keeps an element of a row, bool (len(rows), columns).

    Args:
        threshold: elements are dropped with probability ``threshold / 2**16``.
    """
    # One counter serves eight neighbouring columns.
    row = numpy.arange(rows.start, rows.stop, dtype="uint64")[:, None]
    column = numpy.arange(-(-columns // 8), dtype="uint64")
    stream = numpy.full(1, ROW_DROPOUT_STREAM, "uint64")
    words = philox(seed, (column, row & numpy.uint64(LOW), row >> numpy.uint64(32), stream))
    words = numpy.stack(words, axis=-1).astype("<u4")  # (row, eight columns, word)
    halves = words.view("<u2")  # the lower half of a word first
    return (halves >= threshold).reshape(len(rows), 8 * len(column))[:, :columns]


class FirstWeight(NamedTuple):
    """The place of the first weight of a call that computes a part of more.

    Attributes:
        head: sequence * heads_q + head of its first head, among all.
        row, col: of its first query and key in their sequence, multiples of 16.
    """

    head: int
    row: int
    col: int


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of one call.

    Attributes:
        seed: the seed of the call.
        threshold: weights are dropped with probability ``threshold / 2**16``.
        first_sequence: index, in the batch of the call, of the first sequence of the arrays that
            `factors` gets.
        first: where the weights of that sequence begin, if the call is a part; then it is the only
            one of these arrays.
    """

    seed: int
    threshold: int
    first_sequence: int
    first: FirstWeight | None = None

    @classmethod
    def of(
        cls, dropout_p: float, seed: int, first_sequence: int, first: FirstWeight | None = None
    ) -> "Dropout | None":
        """The dropout of a call, or None if it drops nothing."""
        threshold = dropout_threshold(dropout_p)
        return cls(seed, threshold, first_sequence, first) if threshold else None

    def factors(self, weights: Array, row: int, col: int) -> Array:
        """0 or 1 / (1 - p) for weights (batch, heads_kv, group, m, n) from this row and column."""
        xp = array_namespace(weights)
        batch, heads_kv, group, m, n = weights.shape
        first = self.first_sequence * heads_kv * group
        if self.first is not None:
            first, row, col = self.first.head, self.first.row + row, self.first.col + col
        heads = xp.arange(first, first + batch * heads_kv * group, dtype="uint64")
        kept = keep_mask(self.seed, self.threshold, heads, range(row, row + m), range(col, col + n))
        return kept.reshape(weights.shape) * weights.dtype.type(dropout_scale(self.threshold))


def require_probability(function: str, dropout_p: Any) -> float:
    """``dropout_p`` as a plain number, which must be at least 0 and less than 1.

    Raises:
        As `plain_real`; ValueError if it is out of bounds.
    """
    dropout_p = plain_real(function, "dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        fact = "dropout_p must be at least 0 and less than 1"
        raise ValueError(f"{function}: {fact}, got {dropout_p}")
    return dropout_p


def is_number(seed: Any) -> bool:
    """Whether a seed is an integer of Python or NumPy, and not an array."""
    return isinstance(seed, INTEGERS) and not isinstance(seed, bool)


def seed_array(
    function: str, library: Any, like: Array, seed: Any, dropout_p: float
) -> Array | None:
    """An array of the library for a seed on the device of ``like``; None without dropout.

    Args:
        seed: an integer; None, which draws one from the generator of the library; or an array,
            which is returned as it is.

    Raises:
        ValueError: an integer out of range.
    """
    if is_number(seed):
        if not 0 <= seed < SEEDS_END:
            fact = "dropout_seed must be at least 0 and less than 2**63"
            raise ValueError(f"{function}: {fact}, got {seed}")
        return library.seed(int(seed), like) if dropout_p else None
    if not dropout_p:
        return None
    return library.random_seed(like) if seed is None else seed


def require_seed_array(function: str, library: Any, like: Array, seed: Any) -> None:
    """A seed must be as `SEED_ARRAY` says, in the library and on the device of x.

    Raises:
        As `views_of`.
    """
    first = "x", library.view(like)
    views_of(function, library, {"dropout_seed": SEED_ARRAY}, (seed,), first=first)
