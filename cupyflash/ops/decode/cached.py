"""A call of attention to a cache of keys and values in pages: its arrays, shape and options.

Key j of sequence b is row ``j % page_size`` of page ``page_table[b, j // page_size]``. A contiguous
cache is one page for each sequence, without a table: page ``sequences[b]``, or b.
"""

from typing import NamedTuple

ARRAYS = (  # the order of the arrays of a call; those that are absent are None
    "q", "k", "v", "k_cache", "v_cache", "positions", "page_table", "sequences", "cu_seqlens_q",
    "alibi_slopes", "sinks", "leftpad", "k_scale", "v_scale", "out",
)  # fmt: skip
CACHES = ("k_cache", "v_cache")  # the names of the arrays that decoding writes
UNLIMITED = 2**31 - 1  # a side of a window that hides nothing
MAX_SPLITS = 128


class CachedShape(NamedTuple):
    """The sizes of a checked call.

    Attributes:
        batch: sequences.
        seqlen_q: the most queries of a sequence, which are all its queries unless packed.
        total_q: rows of q: those of all sequences together, ``batch * seqlen_q`` unless packed.
        num_pages: pages of the cache; its first axis.
        page_size: keys of a page; the length of a contiguous cache.
        max_pages: the width of the table, 1 without one: a sequence has at most ``max_pages *
            page_size`` keys.
        packed: q, k and v are (total_q, heads, head_dim), and there are cu_seqlens_q.
        appends: k and v are there; they are written to the cache from ``positions`` on.
        counted: the keys of the new tokens are among those that queries see, so that a sequence has
            ``positions + its queries`` keys; else it has ``positions``. True if ``appends``.
        aligned: the addresses of q, k, v, the caches and out are multiples of 16.
        new_keys: the rows of k of each sequence, where they are not those of q; else None. These
            keys enter the cache in a launch of their own.
        computes_scales: k_scale and v_scale have the shape (num_pages, page_size, heads_kv), and
            what is appended gets scales of its own, which are written there.
    """

    batch: int
    seqlen_q: int
    total_q: int
    heads_q: int
    heads_kv: int
    head_dim: int
    num_pages: int
    page_size: int
    max_pages: int
    packed: bool
    appends: bool
    counted: bool
    aligned: bool = False
    new_keys: int | None = None
    computes_scales: bool = False

    @property
    def pages(self) -> tuple[int, int, int]:
        """(num_pages, page_size, heads_kv), the shape of a scale for each row of each head."""
        return self.num_pages, self.page_size, self.heads_kv

    @property
    def max_length(self) -> int:
        """The most keys that a sequence can have."""
        return self.max_pages * self.page_size


class CachedOptions(NamedTuple):
    """The options of a checked call.

    Attributes:
        scale: of the scores.
        causal: query i of n sees no key behind ``length - n + i``.
        window: (left, right), the keys seen on each side of that key, each from 0 to `UNLIMITED`;
            None if neither side hides a key.
        softcap: 0 is none.
        num_splits: the number of parts of the keys of every sequence, from 1 to `MAX_SPLITS`; 0
            leaves it to the plan.
    """

    scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    num_splits: int = 0
    return_lse: bool = False
