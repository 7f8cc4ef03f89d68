"""Stacks of transformer blocks, their caches and tokens, in arrays of any library."""

import dataclasses

import numpy
from arrays import integers, normal, stored

from cupyflash import BlockStack, BlockWeights

NAMES = BlockWeights._fields


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; ``lengths`` names a mix of them."""

    dtype: str
    batch: int
    heads: int
    head_dim: int
    hidden: int
    layers: int
    max_length: int
    lengths: str
    storage: str


CASE = Case("float16", 3, 4, 64, 1024, 3, 200, "mixed", "padded")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arrays of a case."""

    blocks: list
    ends: dict
    x: object
    tokens: object
    k_cache: object
    v_cache: object
    lengths: object

    def stack(self, **options):
        return BlockStack(self.blocks, heads=self.k_cache.shape[-2], **options)


def weights(target, case, seed):
    """Of the size that training leaves them: each product is about as large as its input."""
    width, hidden = case.heads * case.head_dim, case.hidden
    shapes = {
        "ln1_weight": (width,), "ln1_bias": (width,),
        "qkv_weight": (3 * width, width), "qkv_bias": (3 * width,),
        "proj_weight": (width, width), "proj_bias": (width,),
        "ln2_weight": (width,), "ln2_bias": (width,),
        "up_weight": (hidden, width), "up_bias": (hidden,),
        "down_weight": (width, hidden), "down_bias": (width,),
    }  # fmt: skip
    made = []
    for number, name in enumerate(NAMES):
        shape, key = shapes[name], (seed, number)
        values = normal(shape, key)
        if len(shape) == 2:
            values *= shape[1] ** -0.5
        else:
            values = 0.2 * values + (name in ("ln1_weight", "ln2_weight"))
        made.append(stored(target, values, case.dtype))
    return BlockWeights(*made)


def lengths_of(case):
    most = case.max_length - 1
    mixes = {"zero": [0], "last": [most], "mixed": [0, most, most // 2, 1, most // 3]}
    return [min(x, most) for _, x in zip(range(case.batch), 8 * mixes[case.lengths])]


def make(target, case, seed=0, vocab=211, positions=400):
    width = case.heads * case.head_dim
    array = lambda shape, key, scale=1.0, mean=0.0: stored(
        target, scale * normal(shape, (seed, key)) + mean, case.dtype
    )
    shape = (case.layers, case.batch, case.max_length, case.heads, case.head_dim)
    caches = [
        stored(target, normal(shape, (seed, key)), case.dtype, case.storage) for key in (101, 102)
    ]
    ends = {
        "final_weight": array(width, 103, 0.2, 1.0),
        "final_bias": array(width, 104, 0.2),
        "head_weight": array((vocab, width), 105, width**-0.5),
        "token_embedding": array((vocab, width), 106),
        "position_embedding": array((positions, width), 107, 0.1),
    }
    tokens = numpy.random.default_rng(seed).integers(0, vocab, case.batch)
    return Problem(
        [weights(target, case, seed + 1000 * layer) for layer in range(case.layers)],
        ends,
        array((case.batch, width), 100),
        integers(target, tokens),
        *caches,
        integers(target, lengths_of(case)),
    )
