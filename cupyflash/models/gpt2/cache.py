"""The preallocated cache of keys and values, and how much memory a run takes."""

from typing import Any

from cupyflash.decode.kv_cache import cache_append

from ...runtime.array import Array
from .config import Gpt2Config

# Of a token of a prompt, in widths: x, its norm, q, k, v, attention, and the MLP's hidden layer,
# some of them twice, as an output lives beside what it is computed from.
ACTIVATION_WIDTHS = 16


class KvCache:
    """Keys and values of all layers, (layers, batch, max_length, heads, head_dim) each.

    Past the end of a sequence lies whatever an earlier one left, which may be NaN.
    """

    def __init__(
        self, config: Gpt2Config, xp: Any, dtype: Any, batch: int, max_length: int
    ) -> None:
        shape = (config.layers, batch, max_length, config.heads, config.head_dim)
        self.k, self.v = xp.zeros(shape, dtype), xp.zeros(shape, dtype)
        self.batch, self.max_length = batch, max_length

    @property
    def nbytes(self) -> int:
        """Memory of both."""
        return self.k.nbytes + self.v.nbytes

    def append(
        self, layer: int, k: Array, v: Array, positions: Array, sequences: Array | None = None
    ) -> None:
        """k, v (…, heads, head_dim) of new tokens; see `cache_append`."""
        shape = (-1, *self.k.shape[3:])
        k, v = k.reshape(shape), v.reshape(shape)
        cache_append(k, v, self.k[layer], self.v[layer], positions, sequences)


class Room:
    """A context in which running out of memory names the batch and the length that would fit.

    Args:
        item: bytes of a number.
        length: of the longest sequence with its new tokens.
        free: bytes that can be allocated; None: nobody knows.
        every: whether logits of every token are kept, not only of the last ones.

    Raises:
        MemoryError: ahead if the estimate does not fit, or whatever runs out within.
    """

    def __init__(
        self, config: Gpt2Config, item: int, batch: int, length: int, free: int | None, every: bool
    ) -> None:
        of_logits = config.vocabulary * (4 + item)
        of_token = (ACTIVATION_WIDTHS + 2 * config.layers) * config.width * item
        self.of_token = of_token + of_logits * every
        self.of_sequence = of_logits * (not every)
        self.batch, self.length, self.free = batch, length, free

    @property
    def needed(self) -> int:
        """Estimate in bytes."""
        return self.batch * (self.of_sequence + self.length * self.of_token)

    def __enter__(self) -> None:
        if self.free is not None and self.needed > self.free:
            raise MemoryError(self.text(self.free))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, MemoryError):  # CuPy's is one, too; the estimate was too low
            known = self.needed if self.free is None else min(self.free, self.needed)
            raise MemoryError(self.text(known // 2)) from error

    def text(self, free: int) -> str:
        """What is needed, and what would fit."""
        batch = free // (self.of_sequence + self.length * self.of_token)
        length = max(0, free // self.batch - self.of_sequence) // self.of_token
        return (
            f"Gpt2: batch {self.batch} of length {self.length} needs {self.needed / 2**30:.3g} "
            f"GiB, {free / 2**30:.3g} GiB can be used: batch {batch} of that length or length "
            f"{length} of that batch would fit"
        )


def free_memory(xp: Any) -> int | None:
    """Bytes that can be allocated on the current GPU; None on the CPU, where nobody knows."""
    if xp.__name__ != "cupy":
        return None
    free, _ = xp.cuda.runtime.memGetInfo()
    return free + xp.get_default_memory_pool().free_bytes()
