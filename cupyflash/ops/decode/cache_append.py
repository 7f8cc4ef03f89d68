"""Keys and values of new tokens into a preallocated cache."""

from ...runtime.array import Array
from ...runtime.operation import Operation, TorchSide
from .append_dispatch import FUNCTION, SPECS, run


def cache_append(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array | None,
    sequences: Array | None = None,
    *,
    slots: Array | None = None,
    page_table: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> None:
    """k_cache[sequences[i], positions[i]] = k[i], and the same for v, in one launch.

    Arrays are NumPy or CuPy arrays or torch tensors. What lies on a GPU is not checked, as that
    would wait for it, unless CUPYFLASH_DEBUG=1: a place that does not exist is left alone. Of rows
    that go to one place, one is there afterwards. torch.compile takes the call as one operator.

    Args:
        k: (rows, heads, head_dim), float16, bfloat16 or float32; the last dimension contiguous.
        v: like k.
        k_cache: (batch, max_length, heads, head_dim), or pages (num_pages, page_size, heads,
            head_dim); dtype of k, or int8 or float8_e4m3fn with scales; the last dimension
            contiguous.
        v_cache: like k_cache.
        positions: int32 (rows,); None beside slots.
        sequences: like positions; None is 0, 1, 2, …
        slots: int64 (rows,), instead of positions: row i goes to row ``slots[i] % page_size`` of
            page ``slots[i] // page_size``, and -1 leaves it out.
        page_table: int32 (batch, max_pages): token j of sequence b is row ``j % page_size`` of page
            ``page_table[b, j // page_size]``.
        k_scale, v_scale: as in `attention_with_cache`.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices, scales, a cache that shares memory with another
            argument; on the CPU a place that does not exist.
        NotImplementedError: inputs that require a gradient, or are within a transform of
            torch.func.
    """
    arrays = (k, v, k_cache, v_cache, positions, page_table, sequences, slots, k_scale, v_scale)
    APPEND(FUNCTION, arrays, ())


def _torch_side() -> type[TorchSide]:
    from . import torch_ops

    return torch_ops.Appended


APPEND = Operation(run, _torch_side, native="k", names=lambda _, i: list(SPECS)[i])
