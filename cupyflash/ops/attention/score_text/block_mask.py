"""A `BlockMask` of FlexAttention as a `Mask`."""

import weakref
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from ....runtime import loaded
from ....runtime.lookup import library_of
from .remembered import names_of
from .scores import Mask
from .stand_in import Fixed

PARTIAL, FULL = 1, 2  # kinds of a block; 0 is an empty one
# The attributes of a BlockMask that list its blocks.
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")

# The mask of each BlockMask, behind the `_state` that it was made of and the versions of what it
# reads.
_masks: "weakref.WeakKeyDictionary[Any, tuple[tuple, Mask]]" = weakref.WeakKeyDictionary()


def is_block_mask(x: Any) -> bool:
    return hasattr(x, "mask_mod") and hasattr(x, "kv_num_blocks")


def mask_of(function: str, name: str, block_mask: Any, q: tuple, k: tuple) -> Mask:
    """The `Mask` of a BlockMask: full blocks are seen, and its function decides in partial ones.

    Args:
        name: of the argument, for errors.
        q, k: (batch, heads, seqlen) of the tensors.

    Raises:
        ValueError: it was made for other lengths, or for another batch or number of heads.
    """
    lengths, sizes = tuple(block_mask.seq_lengths), tuple(block_mask.shape[:2])
    if lengths != (q[2], k[2]):
        fact = f"{name} must be of the lengths {(q[2], k[2])} of queries and keys"
        raise ValueError(f"{function}: {fact}, got a BlockMask of {lengths}")
    if any(size not in (1, whole) for size, whole in zip(sizes, q[:2])):
        fact = f"{name} must have the batch and heads of the queries, {tuple(q[:2])}, or 1"
        raise ValueError(f"{function}: {fact}, got a BlockMask of {sizes}")
    state = _state(block_mask)
    known, mask = _masks.get(block_mask, (None, None))
    if mask is None or known != (state, _versions(mask.given)):
        with loaded.torch.inference_mode(False):  # later calls may record a gradient
            mask = Mask(_function_of(block_mask), blocks=_kinds(block_mask))
        if _is_computed(block_mask.kv_indices):
            mask = mask.tiles()
            _masks[block_mask] = (state, _versions(mask.given)), mask
    return mask


def _state(block_mask: Any) -> tuple:
    """The state that a BlockMask's mask is made from.

    It has the function, the names that the function reads, and the arrays with their versions. The
    names that an object or a function with branches reads are not known.
    """
    mask_mod, arrays = block_mask.mask_mod, [getattr(block_mask, name) for name in LISTS]
    named = names_of(mask_mod, arrays) if _reads(mask_mod) else None
    versions = [*map(id, arrays)], _versions(arrays)
    # A function may hold its BlockMask, which would live as long as what is kept of it.
    try:
        return weakref.ref(mask_mod), named, versions
    except TypeError:  # an object with __slots__
        return mask_mod, named, versions


def _reads(function: Any) -> bool:
    """Whether a function reads names beside its arguments."""
    if type(function) is not FunctionType:
        return False
    return bool(function.__code__.co_names or function.__closure__ or function.__defaults__)


def _versions(arrays: Iterable[Any]) -> list[int]:
    return [_version(x) for x in arrays]


def _version(x: Any) -> int:
    """How often torch has seen a change in place; 0 where nobody counts."""
    try:
        return x._version
    except (AttributeError, RuntimeError):  # no tensor; one of inference mode
        return 0


def _is_computed(x: Any) -> bool:
    """Whether what is made of a tensor now has its numbers for all later calls.

    It has none where the tensor, or a mode, is a fake, and in a CUDA graph only where that runs.
    """
    capturing = x.is_cuda and loaded.torch.cuda.is_current_stream_capturing()
    return not (capturing or library_of(x).traced(x))


def _function_of(block_mask: Any) -> Callable:
    rows, cols = map(Fixed, block_mask.BLOCK_SIZE)
    batch, heads = block_mask.shape[:2]
    mask_mod = block_mask.mask_mod

    def mask(b: Any, h: Any, q: Any, k: Any, *, blocks: Any) -> Any:
        at = (b if batch > 1 else Fixed(0), h if heads > 1 else Fixed(0), q // rows, k // cols)
        kind = blocks[at]
        return (kind == Fixed(FULL)) | ((kind == Fixed(PARTIAL)) & mask_mod(b, h, q, k))

    return mask


def _kinds(block_mask: Any) -> Any:
    """The kind of each block, uint8 (batch, heads, blocks of queries, blocks of keys)."""
    torch = loaded.torch
    rows, cols = (-(-n // size) for n, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE))
    shape = (*block_mask.shape[:2], rows, cols)
    kinds = torch.zeros(shape, dtype=torch.uint8, device=block_mask.kv_indices.device)
    lists = [getattr(block_mask, name) for name in LISTS]
    for kind, count, index in ((PARTIAL, *lists[:2]), (FULL, *lists[2:])):
        if count is None:
            continue
        count, index = count[:, :, :rows], index[:, :, :rows].long()
        used = torch.arange(index.shape[-1], device=index.device) < count[..., None]
        wide = torch.zeros((*shape[:3], cols + 1), dtype=torch.uint8, device=index.device)
        wide.scatter_(3, torch.where(used, index, cols), kind)  # unused ones go behind the last
        kinds = torch.maximum(kinds, wide[..., :cols])
    return kinds
