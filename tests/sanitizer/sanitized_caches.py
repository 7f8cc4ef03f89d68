"""Caches and moved rows, for compute-sanitizer: ``DTYPE``.

Sequences of several lengths attend to pages and to rows, with one new token and with tiles of them,
their keys divided among blocks whose parts one of them merges; prompts go on with a paged past;
caches have 8 bits; rows go to other places by number, and are summed.
"""

import sys

import cupy

import cupyflash
from cupyflash.ops.linear.head_norm import head_norm
from cupyflash.ops.transfer import kernels
from cupyflash.testing.cached import CachedCase, CachedProblem

cupy.cuda.set_allocator(None)
(dtype,) = sys.argv[1:]


def array(x, dtype=None):
    return cupy.asarray(x, dtype)


def make(*shape):
    return cupy.random.standard_normal(shape).astype(dtype)


def integers(*values):
    return cupy.asarray(values, "int32")


for case in (
    CachedCase(dtype),
    CachedCase(dtype, page=0, option="softcap", length="full"),
    CachedCase(dtype, page=1, option="sliding", tokens=3, head_dim=40),
    CachedCase(dtype, option="splits", tokens=2, group=4, head_dim=128),
    CachedCase(dtype, option="sinks", tokens=6, group=4, head_dim=64),
    CachedCase(dtype, option="slopes", tokens=40, group=2, head_dim=128, packed=True),
    CachedCase(dtype, option="leftpad", tokens=5, head_dim=256, strided=True),
    CachedCase(dtype, option="in the cache", tokens=9, group=2),
):
    cupyflash.attention_with_cache(**CachedProblem(case, array).arguments, return_lse=True)
# One long sequence beside short ones, so that blocks share its keys.
for head_dim in (64, 128):
    caches = [make(130, 64, 2, head_dim) for _ in "kv"]
    new = [make(3, 1, heads, head_dim) for heads in (8, 2, 2)]
    table = cupy.arange(3 * 100, dtype="int32").reshape(3, 100) % 130
    lengths = integers(5000, 0, 70)
    cupyflash.attention_with_cache(*new, *caches, lengths, page_table=table)
    scales = [cupy.full((130, 64, 2), 0.01, "float32") for _ in "kv"]
    narrow = [cupy.zeros((130, 64, 2, head_dim), "int8") for _ in "kv"]
    options = {"k_scale": scales[0], "v_scale": scales[1]}
    for count, tokens in ((3, 1), (3, 4), (1, 1)):  # one has a kernel of its own
        new = [make(count, tokens, heads, head_dim) for heads in (8, 2, 2)]
        seen = {"page_table": table[:count], **options}
        cupyflash.attention_with_cache(*new, *narrow, lengths[:count], **seen)
# Prompts on a past in pages: a tile of queries, and several.
for head_dim, page in ((64, 16), (128, 7), (128, 128)):
    pool = [make(600 // page + 1, page, 2, head_dim) for _ in "kv"]
    q, starts = make(330, 4, head_dim), integers(0, 30, 330)
    blocks = -(-300 // page)
    table = cupy.arange(2 * blocks, dtype="int32").reshape(2, blocks) % len(pool[0])
    keys = integers(0, 250, 550)
    cupyflash.flash_attn_varlen_func(
        q, *pool, starts, keys, 300, 300, causal=True, block_table=table
    )
# Queries and keys of a layer, normalised by heads.
rotary = cupyflash.Rotary(*cupy.ones((2, 20, 32), "float32"), integers(3, 0, 19))
head_norm(make(3, 4, 64), make(3, 2, 64), make(64), make(64), rotary=rotary, eps=1e-6)
# Rows of 64 and of 6 bytes to places in two other memories; sums of up to three rows.
stream, device = cupy.cuda.get_current_stream(), 0
memories = [cupy.zeros(4096, "uint8") for _ in range(2)]
for width in (64, 6):
    rows = cupy.ones((5, width), "uint8")
    moves = integers(0, 0, 3, 1, 4, 0, 1, 2, 7)
    of_rows = kernels.Rows(rows.data.ptr, width, 0, 0, width, width)
    peers = [x.data.ptr for x in memories]
    kernels.put_rows(device, stream, peers, moves.data.ptr, 3, [of_rows])
for columns in (64, 3):
    slots, sums = make(6, columns), make(2, columns)
    parts = integers(0, 3, 1, 3, 2, 2)
    where = [(slots.data.ptr, sums.data.ptr, columns)]
    kernels.sum_rows(device, stream, dtype, parts.data.ptr, 2, where)
cupy.cuda.Device().synchronize()
