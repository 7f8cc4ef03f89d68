"""Attention of many new tokens to a cache in pages, read where they lie by the forward kernel."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ...runtime.array import View, dense_strides
from ...runtime.gpu import card_of
from ..attention import backends
from ..attention.checks import check
from ..attention.options import Extras, Options
from ..attention.plan import ForwardPlan
from ..attention.planning import forward_plan
from ..attention.problem import canonical_strides
from .cached import CACHES, CachedShape
from .paged_rows import paged_rows

BOX_ROWS = 8  # so many rows at least must a box of the copy engine have: those of its swizzle


def table_of(given: Mapping[str, Any]) -> Any:
    """The page table of a call, or ``sequences`` where each has one page; None without both."""
    table = given.get("page_table")
    return given.get("sequences") if table is None else table


def paged_plan(
    function: str, library: Any, shape: CachedShape, plain: tuple, views: Mapping[str, View]
) -> ForwardPlan | None:
    """The plan of the forward, or None where keys must be gathered first.

    It takes caches of the dtype of q without left padding, of pages whose size is a multiple of 8,
    where the backend reads pages. The pointers are those of q, of the caches and of `Extras`, with
    the table in the place of the bias.

    Args:
        plain: the plain fields of `Options`.
        views: of the arrays that are given, by their names in `ARRAYS`.
    """
    q, cache, table = views["q"], views["k_cache"], table_of(views)
    one_page = shape.max_pages == 1
    if table is None or "leftpad" in views or cache.dtype != q.dtype or not shape.aligned:
        return None
    if math.prod((*q.shape, *cache.shape, shape.max_pages)) == 0:
        return None
    if not one_page and shape.page_size % BOX_ROWS:
        return None
    options, sizes = Options(*plain), (shape.batch, shape.max_length, *cache.shape[2:])
    keys = View(sizes, dense_strides(sizes, range(4)), q.dtype, q.device)
    extras = {name: views[name] for name in Extras._fields if name in views}
    extras["seqused_k"] = views["positions"]._replace(strides=(1,))
    problem = check(function, {"q": q, "k": keys, "v": keys}, options, extras)
    steps = {n: canonical_strides(n, views[name], options) for n, name in zip("kv", CACHES)}
    rows = paged_rows(views)
    rows.table_stride = table.strides[0]
    problem = dataclasses.replace(problem, strides={**problem.strides, **steps}, pages=rows)
    if not backends.reads_pages(problem, card_of(q.device)):
        return None
    return forward_plan(function, problem, library, q, options)
