"""Checked problems of attention without arrays, for tests of the rules that pick kernels."""

from cupyflash.ops.attention.checks import check
from cupyflash.ops.attention.options import Options
from cupyflash.runtime.array import View, dense_strides
from cupyflash.runtime.gpu import Card

HOPPER = Card((9, 0), 132, 60 << 20)


def problem_of(batch, heads, queries, keys, head_dim, causal=False, window=None, **extras):
    """A problem in float16; ``heads`` of queries and of keys, ``extras`` as views."""
    views = {}
    for name, rows, count in (("q", queries, heads[0]), *((x, keys, heads[1]) for x in "kv")):
        views[name] = view(batch, rows, count, head_dim)
    return check("f", views, Options(causal=causal, window=window), extras)


def view(*shape, dtype="float16"):
    """A dense array on GPU 0."""
    return View(shape, dense_strides(shape, range(len(shape))), dtype, 0)
