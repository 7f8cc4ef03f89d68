"""Scores and masks that people write, for tests and benchmarks of ``score=`` and ``mask=``.

The names follow the field: FlexAttention's gallery (attention-gym), T5 (arXiv:1910.10683), Swin
(arXiv:2103.14030), NATTEN (arXiv:2204.07143), streaming sinks (arXiv:2309.17453), block diffusion
(arXiv:2503.09573), Graphormer (arXiv:2106.05234), sandwich (arXiv:2212.10356).

Functions use torch's operations only, so that they run on whole tensors, too, as FlexAttention and
the float64 of the tests run them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

HEADS, LENGTH = 4, 64  # of the arrays that a case makes
SIDE = 8  # of a square image of LENGTH pixels


class Case(NamedTuple):
    """A score or a mask.

    Attributes:
        make: of the arrays, the function of (score, batch, head, query, key), or of a mask.
        arrays: makes them from a generator of random numbers.
        is_mask: it is one.
    """

    make: Callable[..., Callable]
    arrays: Callable[[torch.Generator], tuple[Tensor, ...]] = lambda rng: ()
    is_mask: bool = False


def _normal(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda rng: (torch.randn(shape, generator=rng),)


def _documents(rng: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, 4, (LENGTH,), generator=rng).sort().values.int(),)


def _t5_bucket(distance: Tensor) -> Tensor:
    """32 buckets: one for each of the first 8 distances of a side, then by their logarithm."""
    side, gap = (distance > 0) * 16, distance.abs()
    far = 8 + (torch.log((gap + 1e-6) / 8) / math.log(16) * 8).to(torch.int32)
    return side + torch.where(gap < 8, gap, torch.clamp(far, 8, 15))


def _t5(table: Tensor) -> Callable:
    return lambda s, b, h, q, k: s + table[_t5_bucket(k - q), h]


def _swin(table: Tensor) -> Callable:
    def score(s, b, h, q, k):  # noqa: ANN001, ANN202
        rows, cols = q // SIDE - k // SIDE + SIDE - 1, q % SIDE - k % SIDE + SIDE - 1
        return s + table[h, rows * (2 * SIDE - 1) + cols]

    return score


def _natten(kernel: int = 3) -> Callable:
    def mask(b, h, q, k):  # noqa: ANN001, ANN202
        row, col = q // SIDE, q % SIDE
        half = kernel // 2
        row, col = row.clamp(half, SIDE - 1 - half), col.clamp(half, SIDE - 1 - half)
        return ((k // SIDE - row).abs() <= half) & ((k % SIDE - col).abs() <= half)

    return mask


def _spread(x: Tensor) -> Tensor:
    """The lower bits of a number, a zero between them: Morton order has two of these."""
    x = (x | x << 2) & 0x33
    return (x | x << 1) & 0x55


def _morton(b, h, q, k):  # noqa: ANN001, ANN202
    of_q = _spread(q % SIDE) | _spread(q // SIDE) << 1
    of_k = _spread(k % SIDE) | _spread(k // SIDE) << 1
    return of_q >= of_k


def _tiled_window(tile: int = 4) -> Callable:
    """Sliding tile attention: tiles of an image see the tiles beside them."""

    def mask(b, h, q, k):  # noqa: ANN001, ANN202
        rows = (q // SIDE // tile - k // SIDE // tile).abs()
        return (rows + (q % SIDE // tile - k % SIDE // tile).abs()) <= 1

    return mask


def _block_diffusion(block: int = 8) -> Callable:
    """A noisy half, then a clean half: blocks see themselves and what came before, clean."""
    half = LENGTH // 2

    def mask(b, h, q, k):  # noqa: ANN001, ANN202
        clean_q, clean_k = q >= half, k >= half
        of_q, of_k = q % half // block, k % half // block
        own = (of_q == of_k) & (clean_q == clean_k)
        before = (of_q > of_k) & clean_k & ~clean_q
        return own | before | (of_q >= of_k) & clean_k & clean_q

    return mask


def _shared_prefix(ends: Tensor) -> Callable:
    """Answers behind one prompt, which see the prompt and themselves; ends[i] is that of each."""
    prompt = 16

    def mask(b, h, q, k):  # noqa: ANN001, ANN202
        same = (q < ends[0]) == (k < ends[0])
        return (k <= q) & ((k < prompt) | same)

    return mask


GALLERY = {
    # scores
    "alibi": Case(lambda x: lambda s, b, h, q, k: s - x[h] * (q - k).abs(), _normal(HEADS)),
    "softcap": Case(lambda: lambda s, b, h, q, k: 3 * torch.tanh(s / 3)),
    "distance table": Case(
        lambda x: lambda s, b, h, q, k: s + x[h, torch.clamp(k - q, -15, 15) + 15],
        _normal(HEADS, 31),
    ),
    "t5": Case(_t5, _normal(32, HEADS)),
    "swin": Case(_swin, _normal(HEADS, (2 * SIDE - 1) ** 2)),
    "gate": Case(
        lambda x, y: lambda s, b, h, q, k: s * torch.sigmoid(x[b, q]) + y[b, k],
        lambda rng: (torch.randn(2, LENGTH, generator=rng), torch.randn(2, LENGTH, generator=rng)),
    ),
    "tanh": Case(lambda x: lambda s, b, h, q, k: torch.tanh(s * x[h]), _normal(HEADS)),
    "temperature": Case(lambda x: lambda s, b, h, q, k: s * x, _normal()),
    "query temperature": Case(
        lambda x: lambda s, b, h, q, k: s * torch.exp(x[h, q]), _normal(HEADS, LENGTH)
    ),
    "activation": Case(lambda: lambda s, b, h, q, k: torch.nn.functional.gelu(s)),
    "silu": Case(lambda: lambda s, b, h, q, k: torch.nn.functional.silu(s) + s.relu()),
    "squares": Case(lambda: lambda s, b, h, q, k: s / (1 + s**2) + torch.sqrt(s.abs() + 1)),
    "graph": Case(
        lambda x, hops: lambda s, b, h, q, k: s + x[h, hops[q, k]],
        lambda rng: (
            torch.randn(HEADS, 5, generator=rng),
            torch.randint(0, 5, (LENGTH, LENGTH), generator=rng),
        ),
    ),
    "sandwich": Case(
        lambda x: lambda s, b, h, q, k: s + x[h] * torch.cos((q - k) / 10.0) * torch.sin(q * 0.1),
        _normal(HEADS),
    ),
    "dense bias": Case(
        lambda x: lambda s, b, h, q, k: s + x[b, h, q, k], _normal(2, HEADS, LENGTH, LENGTH)
    ),
    "masked by -inf": Case(lambda: lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))),
    "power": Case(  # a learned exponent, of a distance that is 0 on the diagonal
        lambda x: lambda s, b, h, q, k: s - ((q - k).abs() / 16.0) ** x[h],
        lambda rng: (torch.rand(HEADS, generator=rng) + 0.5,),
    ),
    "whole parts": Case(  # of quotients and roots that are whole numbers
        lambda: lambda s, b, h, q, k: s + 4 * torch.floor(k / 41) - torch.floor(torch.sqrt(q * 1.0))
    ),
    # masks
    "causal": Case(lambda: lambda b, h, q, k: q >= k, is_mask=True),
    "prefix lm": Case(lambda: lambda b, h, q, k: (k < 16) | (q >= k), is_mask=True),
    "window": Case(lambda: lambda b, h, q, k: (q - k).abs() <= 7, is_mask=True),
    "dilated": Case(
        lambda: lambda b, h, q, k: (q >= k) & (q - k <= 24) & ((q - k) % 3 == 0), is_mask=True
    ),
    "window by head": Case(
        lambda x: lambda b, h, q, k: (q >= k) & (q - k < x[h]),
        lambda rng: (torch.tensor([4, 8, 16, 64]),),
        is_mask=True,
    ),
    "streaming": Case(lambda: lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 12)), is_mask=True),
    "documents": Case(
        lambda x: lambda b, h, q, k: (x[q] == x[k]) & (q >= k), _documents, is_mask=True
    ),
    "global tokens": Case(
        lambda x: lambda b, h, q, k: ((q - k).abs() < 5) | x[q] | x[k],
        lambda rng: (torch.rand(LENGTH, generator=rng) < 0.1,),
        is_mask=True,
    ),
    "jagged": Case(
        lambda x: lambda b, h, q, k: k < x[b], lambda rng: (torch.tensor([64, 23]).int(),), True
    ),
    "natten": Case(_natten, is_mask=True),
    "morton": Case(lambda: _morton, is_mask=True),
    "tiled window": Case(_tiled_window, is_mask=True),
    "block diffusion": Case(_block_diffusion, is_mask=True),
    "shared prefix": Case(_shared_prefix, lambda rng: (torch.tensor([40, 64]),), is_mask=True),
    "dense mask": Case(
        lambda x: lambda b, h, q, k: x[b, q, k],
        lambda rng: (torch.rand(2, LENGTH, LENGTH, generator=rng) < 0.5,),
        is_mask=True,
    ),
}
