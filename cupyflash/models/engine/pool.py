"""The memory of all keys and values, in pages that sequences take and give back."""

from collections.abc import Iterable
from typing import Any

from ...runtime.array import Array
from .devices import device_of

PADDING = 0  # the page of rows of padding; take() never gives it away
MEMORY_PART = 0.85  # of what is free; the rest is for what steps compute
CPU_TOKENS = 2**15  # in the pages of an engine on the CPU, where nobody knows what is free


class PagePool:
    """Keys and values of all layers in pages; a page has the same number in every layer.

    Page 0 belongs to rows of padding. What a sequence leaves behind in a page stays there.

    Attributes:
        k, v: (layers, pages, page_size, heads_kv, head_dim).
        pages: their number, with the page of padding.

    Args:
        like: an array whose library, device and dtype the pool has.

    Raises:
        ValueError: fewer than two pages, other sizes below 1.
    """

    def __init__(
        self, layers: int, pages: int, page_size: int, heads_kv: int, head_dim: int, like: Array
    ) -> None:
        if pages < 2 or min(layers, page_size, heads_kv, head_dim) < 1:
            fact = "sizes must be at least 1, and pages 2, as one is for rows of padding"
            got = f"{(layers, pages, page_size, heads_kv, head_dim)}"
            raise ValueError(f"PagePool: {fact}, got {got}")
        self.pages, self.page_size = pages, page_size
        both = device_of(like).pool((2, layers, pages, page_size, heads_kv, head_dim))
        self.k, self.v = both[0], both[1]
        self._free = list(range(pages - 1, PADDING, -1))
        self._taken: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Memory of both."""
        return self.k.nbytes + self.v.nbytes

    @property
    def free(self) -> int:
        """The number of pages that nobody has."""
        return len(self._free)

    def layer(self, index: int) -> tuple[Array, Array]:
        """k_cache and v_cache of a layer, (pages, page_size, heads_kv, head_dim), views."""
        return self.k[index], self.v[index]

    def take(self, count: int) -> list[int]:
        """That many pages, the lowest numbers first if none has been given back.

        Raises:
            MemoryError: there are fewer.
        """
        if count > len(self._free):
            raise MemoryError(f"PagePool: {count} pages are wanted, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back.

        Raises:
            ValueError: a page that nobody has.
        """
        for page in pages:
            if page not in self._taken:
                raise ValueError(f"PagePool: page {page} is not in use and cannot be given back")
            self._taken.remove(page)
            self._free.append(page)

    def count(self, tokens: int) -> int:
        """The pages that so many tokens take."""
        return -(-tokens // self.page_size)


def pages_that_fit(model: Any, page_size: int, max_batch: int, length: int) -> int:
    """The pages that fit, and no more than the requests can have."""
    config, device = model.config, device_of(model.like)
    with device.current():
        free = device.free_memory()
    of_token = 2 * config.layers * config.heads_kv * config.head_dim * model.like.itemsize
    most = max_batch * -(-length // page_size)
    tokens = CPU_TOKENS if free is None else int(MEMORY_PART * free) // of_token
    return 1 + min(most, max(1, tokens // page_size))
