"""`context_parallel`: torch's context of this name, with attention of `parallel.context`."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .context import context
from .shard import Shard

FUNCTION = "parallel.context_parallel"


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    lengths: Sequence[int] | None = None,
    move: str = "auto",
) -> Iterator[Shard]:
    """A block in which buffers have the tokens of this rank, and attention is over all of them.

    It takes what ``torch.distributed.tensor.experimental.context_parallel`` takes. Where twice the
    ranks divide the tokens, a rank has the same ones as there: two chunks of a zigzag. All of
    `context` holds in the block; in particular the backward pass runs in it.

    Args:
        mesh: of one axis, or of the axes "keys" and "heads".
        buffers: tensors of all tokens, the same on all ranks, which are changed in place.
        buffer_seq_dims: the axis of the tokens of each.
        no_restore_buffers: of ``buffers``, those that keep the tokens of the rank after the block.
        lengths: of the packed sequences of a row; by default a row is one sequence.
        move: as in `attention`.

    Yields:
        The shard.

    Raises:
        ValueError: no buffers; other numbers of tokens, or of axes; a buffer that requires a
            gradient; a tensor that is no buffer.
        As `Shard`.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = list(no_restore_buffers or ())
    if not buffers or len(dims) != len(buffers):
        fact = "buffers must be at least one, and buffer_seq_dims as many"
        raise ValueError(f"{FUNCTION}: {fact}, got {len(buffers)} and {len(dims)}")
    if any(all(x is not buffer for buffer in buffers) for x in kept):
        fact = "no_restore_buffers must be among the buffers"
        raise ValueError(f"{FUNCTION}: {fact}, got another tensor")
    if any(x.requires_grad for x in buffers):
        fact = "buffers must not require a gradient, as they are changed in place"
        raise ValueError(f"{FUNCTION}: {fact}, got one that does")
    if any(not -x.dim() <= dim < x.dim() for x, dim in zip(buffers, dims)):
        fact = "buffer_seq_dims must be axes of the buffers"
        raise ValueError(f"{FUNCTION}: {fact}, got {dims}")
    tokens = {buffer.shape[dim] for buffer, dim in zip(buffers, dims)}
    lengths = (buffers[0].shape[dims[0]],) if lengths is None else tuple(lengths)
    if tokens != {sum(lengths)}:
        fact = f"buffers must have the {sum(lengths)} tokens of all sequences"
        raise ValueError(f"{FUNCTION}: {fact}, got {sorted(tokens)}")
    shard = _shard(mesh, tuple(mesh.get_all_groups()), lengths)
    given = [None if any(x is y for y in kept) else x.detach().clone() for x in buffers]
    parts = [shard.take(buffer.detach(), dim) for buffer, dim in zip(buffers, dims)]
    for buffer, part in zip(buffers, parts):
        _put(buffer, part)
    try:
        with context(shard, move=move):
            yield shard
    finally:
        for buffer, before in zip(buffers, given):
            if before is not None:
                _put(buffer, before)


@functools.lru_cache(maxsize=64)
def _shard(mesh: DeviceMesh, groups: tuple[ProcessGroup, ...], lengths: tuple[int, ...]) -> Shard:
    """The shard of these lengths; every rank enters the same blocks, and so makes the same ones.

    Args:
        groups: of the mesh, which is equal to one whose groups have been destroyed.
    """
    return Shard(lengths, mesh)


def _put(buffer: Tensor, x: Tensor) -> None:
    """Makes a tensor another one, of another shape."""
    with torch.no_grad():
        buffer.resize_(x.shape).copy_(x)
