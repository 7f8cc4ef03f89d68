"""Implementations that bench parallel compares, each of q, k, v of the tokens of this rank.

All but one have the same tokens on a rank: the two chunks of a zigzag. "cupyflash-whole" leaves
packed sequences whole where `SLACK` lets it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import cupyflash
from bench.parallel.problems import Case
from bench.parallel.ring import Ring
from cupyflash.parallel import Shard, attention

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
WHOLE = "cupyflash-whole"
SLACK = 0.15  # of a shard: tokens and pairs of a rank beyond their mean
PROVIDERS = (
    "cupyflash-heads", "cupyflash-keys", WHOLE, "torch-all-gather", "torch-all-to-all", "ring",
)  # fmt: skip


def shard_of(name: str, case: Case, ranks: int) -> Shard:
    """The tokens of a rank with an implementation."""
    return Shard(case.lengths(ranks), slack=SLACK if name == WHOLE else 0.0)


@contextlib.contextmanager
def provider(name: str, case: Case, shard: Shard) -> Iterator[Function]:
    """Out of (tokens, heads, head_dim) of this rank.

    Raises:
        NotImplementedError: a case that the implementation does not have.
    """
    who, _, way = name.partition("-")
    if name == WHOLE:
        if not case.packed:
            raise NotImplementedError("one sequence has no others to leave whole")
        yield functools.partial(attention, shard=shard, **case.options)
    elif who == "cupyflash":
        yield functools.partial(attention, shard=shard, move=way, **case.options)
    elif case.window or case.packed:
        raise NotImplementedError(f"{who} has no windows and no packed sequences")
    elif who == "ring":
        yield Ring.apply
    else:
        with _context_parallel(way.replace("-", "")):
            yield _sdpa


def alone(case: Case, ranks: int, device: torch.device) -> Function:
    """Out of all tokens of the ranks, computed by one process."""
    lengths = case.lengths(ranks)
    if not case.packed:

        def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cupyflash.attention(q[None], k[None], v[None], **case.options)[0]

        return one
    ends, longest = torch.tensor([0, *lengths]).cumsum(0).int().to(device), max(lengths)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = (ends, ends, longest, longest)
        return cupyflash.flash_attn_varlen_func(q, k, v, *lengths, causal=True)

    return packed


@contextlib.contextmanager
def _context_parallel(rotation: str) -> Iterator[None]:
    """torch's own, whose tensors are already divided, by cuDNN where it can."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _attention.set_rotate_method(rotation)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    unused = torch.empty(2 * dist.get_world_size(), device="cuda")  # as it must have some buffer
    divided = context_parallel(
        mesh, buffers=[unused], buffer_seq_dims=[0], no_restore_buffers={unused}
    )
    with sdpa_kernel(backends, set_priority=True), divided:
        yield


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Key heads are repeated, as context_parallel has no GQA."""
    ratio = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    k, v = (x.repeat_interleave(ratio, dim=1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out[0].transpose(0, 1)
