"""Attention to caches in pages: every option by pairs, against the definition in float64."""

import numpy
import pytest
from arrays import integers, normal, stored
from matrix import covering, each_case, each_library

from cupyflash import attention_with_cache
from cupyflash.ops.decode.cache_append import cache_append
from cupyflash.testing import assert_close_to_float64, to_numpy64
from cupyflash.testing.cached import LENGTHS, OPTIONS, CachedCase, CachedProblem


def cases(target):
    """Any two values of two fields occur together."""
    return covering(
        CachedCase,
        {
            "dtype": list(target.dtypes),
            "page": [1, 2, 3, 8, 16, 64, 100, 0],
            "option": list(OPTIONS),
            "tokens": [1, 2, 5, 9, 17],
            "group": [1, 3, 4, 8],
            "length": list(LENGTHS),
            "head_dim": [64, 72, 96, 128, 256],
            "packed": [False, True],
            "strided": [False, True],
        },
    )


def check(problem, out, lse):
    """The results, and the caches after the call."""
    dtype = problem.case.dtype
    right, right_lse = problem.expected()
    half = "float16" if dtype == "float16" else None
    rounded, rounded_lse = problem.expected("float32", half)
    assert_close_to_float64(to_numpy64(out), right, rounded, dtype, "out", terms=8.0)
    none = numpy.isneginf(right_lse)
    numpy.testing.assert_array_equal(numpy.isneginf(to_numpy64(lse)), none)
    found = numpy.where(none, 0, to_numpy64(lse))
    right_lse, rounded_lse = (numpy.where(none, 0, x) for x in (right_lse, rounded_lse))
    assert_close_to_float64(found, right_lse, rounded_lse, "float32", "lse", terms=8.0)
    for name, after in zip(("k_cache", "v_cache"), problem.after):
        numpy.testing.assert_array_equal(to_numpy64(problem.arguments[name]), after)


@each_case(cases)
def test_pages(target, case):
    """Nothing is read that no sequence owns, and nothing else in the cache changes."""
    problem = CachedProblem(case, target.array)
    check(problem, *attention_with_cache(**problem.arguments, return_lse=True))


@each_library()
def test_out_is_written(target):
    problem = CachedProblem(CachedCase(target.dtypes[0], tokens=3, packed=True), target.array)
    right = attention_with_cache(**problem.arguments)
    out = stored(target, numpy.full(tuple(right.shape), numpy.nan), target.dtypes[0], "padded")
    assert attention_with_cache(**problem.arguments, out=out) is out
    numpy.testing.assert_array_equal(to_numpy64(out), to_numpy64(right))


def good(target, **changed):
    """The arguments of a right call."""
    case = CachedCase(target.dtypes[0], **{"tokens": 2, "page": 8} | changed)
    return CachedProblem(case, target.array).arguments


@each_library()
def test_bad_input(target):
    paged, packed, flat = good(target), good(target, packed=True), good(target, page=0)
    q, cache, table = paged["q"], paged["k_cache"], paged["page_table"]
    ones = lambda *shape: target.array(numpy.ones(shape, "float32"))
    caches = lambda dtype: {
        name: target.array(numpy.zeros(cache.shape, dtype)) for name in ("k_cache", "v_cache")
    }
    one = {"k_scale": ones(1), "v_scale": ones(1)}
    int8, own = caches("int8") | one, ones(*cache.shape[:3])
    for error, match, good_call, changed in (
        (TypeError, "page_table must be int32", paged, {"page_table": ones(4, 3)}),
        (
            ValueError,
            r"page_table must have shape \(4, max_pages\)",
            paged,
            {"page_table": table[0]},
        ),
        (ValueError, "v_cache must have shape", paged, {"v_cache": cache[:, :3]}),
        (ValueError, "sequences must be None beside", paged, {"sequences": paged["positions"]}),
        (ValueError, r"q must have shape \(total, heads_q, head_dim\)", packed, {"q": q}),
        (ValueError, r"cu_seqlens_q must have shape \(5,\)", packed, {"cu_seqlens_q": table[0]}),
        (ValueError, "max_seqlen_q must be None without", paged, {"max_seqlen_q": 2}),
        (ValueError, "max_seqlen_q must be from 0", packed, {"max_seqlen_q": -1}),
        (ValueError, "num_splits must be from 0 to 128", paged, {"num_splits": 129}),
        (ValueError, "window must be", paged, {"window": (-2, 0)}),
        (ValueError, "softcap must be 0", paged, {"softcap": -1.0}),
        (ValueError, "causal must be True", paged, {"causal": "top-left"}),
        (ValueError, r"leftpad must have shape \(4,\)", paged, {"leftpad": table[0, :1]}),
        (TypeError, "k_cache must be .*, int8 or float8_e4m3fn, got", paged, caches("uint8")),
        (ValueError, "k_scale must be float32 beside a cache of int8", paged, caches("int8")),
        (ValueError, "k_scale must be .* None beside any other", paged, one),
        (ValueError, "k_scale must broadcast", paged, int8 | {"k_scale": ones(7)}),
        (ValueError, "k_scale must have shape", paged, int8 | {"k_scale": own[None]}),
        (ValueError, "k_scale and v_scale must both have", paged, int8 | {"k_scale": own}),
        (ValueError, "k_scale is written", paged, int8 | {"k_scale": own, "v_scale": own}),
        (ValueError, "out is written, so it must share no memory with q", paged, {"out": q}),
        (ValueError, "out must have shape", paged, {"out": q[:1]}),
        (TypeError, "k and v must both be arrays", flat, {"v": None}),
    ):
        with pytest.raises(error, match=f"^attention_with_cache: {match}"):
            attention_with_cache(**good_call | changed)


@each_library()
def test_values_on_the_cpu(target):
    """Tables and lengths are checked where they are known; nothing has been written then."""
    if target.gpu:
        pytest.skip("values that lie on a GPU are not read")
    paged, packed = good(target), good(target, packed=True, tokens=4)
    flat = good(target, page=0)
    windowed = good(target, option="sliding")

    def changed(call, name, *place, value):
        values = numpy.array(to_numpy64(call[name]), "int32")
        values[place] = value
        return call | {name: integers(target, values)}

    for match, call in (
        ("page_table must be from 0 to", changed(paged, "page_table", 0, 0, value=-1)),
        ("page_table must be from 0 to", changed(paged, "page_table", 3, 0, value=99)),
        ("page_table must be from 0 to", changed(windowed, "page_table", 3, -1, value=-1)),
        ("sequences must be from 0 to", changed(flat, "sequences", 1, value=7)),
        ("positions must be from 0 to", changed(paged, "positions", 0, value=-1)),
        ("positions must be from 0 to", changed(paged, "positions", 0, value=1000)),
        ("leftpad must be at least 0", paged | {"leftpad": integers(target, [0, -1, 0, 0])}),
        ("cu_seqlens_q must start with 0", changed(packed, "cu_seqlens_q", 0, value=1)),
        ("cu_seqlens_q must start with 0", changed(packed, "cu_seqlens_q", -1, value=3)),
        ("cu_seqlens_q must have no sequence longer", packed | {"max_seqlen_q": 3}),
    ):
        before = to_numpy64(call["k_cache"]).copy()
        with pytest.raises(ValueError, match=f"^attention_with_cache: {match}"):
            attention_with_cache(**call)
        numpy.testing.assert_array_equal(to_numpy64(call["k_cache"]), before)


@each_library()
def test_empty(target):
    """No sequences, no tokens, no pages."""
    dtype = target.dtypes[0]
    make = lambda *shape: target.array(numpy.zeros(shape), dtype)
    none, cache = integers(target, []), make(5, 4, 2, 64)
    table = integers(target, numpy.zeros((0, 3)))
    q, k = make(0, 2, 4, 64), make(0, 2, 2, 64)
    out, lse = attention_with_cache(
        q, k, k, cache, make(5, 4, 2, 64), none, page_table=table, return_lse=True
    )
    assert tuple(out.shape) == (0, 2, 4, 64) and tuple(lse.shape) == (0, 4, 2)
    q, k = make(2, 0, 4, 64), make(2, 0, 2, 64)
    table = integers(target, numpy.zeros((2, 0)))
    zero = integers(target, [0, 0])
    out = attention_with_cache(q, k, k, cache, make(5, 4, 2, 64), zero, page_table=table)
    assert tuple(out.shape) == (2, 0, 4, 64)


SLOTS = [7, -1, 16, 0, 19]


@each_library()
def test_append_by_slots_and_by_table(target):
    """Each row where its slot says, -1 nowhere; a table says the same by positions."""
    for dtype in target.dtypes:
        k, v = (stored(target, normal((5, 3, 24), i), dtype, "padded") for i in (0, 1))
        make = lambda dtype=dtype: stored(target, numpy.full((4, 5, 3, 24), numpy.nan), dtype)
        caches, by_table = (make(), make()), (make(), make())
        cache_append(k, v, *caches, None, slots=target.array(numpy.array(SLOTS)))
        kept = [i for i, slot in enumerate(SLOTS) if slot >= 0]
        for cache, x in zip(caches, (k, v)):
            after = numpy.full((4, 5, 3, 24), numpy.nan)
            for i in kept:
                after[SLOTS[i] // 5, SLOTS[i] % 5] = to_numpy64(x)[i]
            numpy.testing.assert_array_equal(to_numpy64(cache), after)
        table = integers(target, [[-1, 3], [1, 0]])
        places = {"positions": integers(target, [2, 6, 5, 9]), "sequences": [1, 0, 1, 0]}
        places["sequences"] = integers(target, places["sequences"])
        rows = [0, 2, 3, 4]
        new = (stored(target, to_numpy64(x)[rows], dtype) for x in (k, v))
        cache_append(*new, *by_table, **places, page_table=table)
        for cache, again in zip(caches, by_table):
            numpy.testing.assert_array_equal(to_numpy64(again), to_numpy64(cache))


@each_library()
def test_bad_places(target):
    k, cache = (stored(target, numpy.zeros(x), "float32") for x in ((2, 3, 8), (4, 5, 3, 8)))
    other = stored(target, numpy.zeros((4, 5, 3, 8)), "float32")
    two = integers(target, [0, 1])
    slots = target.array(numpy.array([0, 1]))
    call = {"k": k, "v": k, "k_cache": cache, "v_cache": other, "positions": two}
    for match, changed in (
        ("slots alone int64", {"slots": slots}),
        ("slots alone int64", {"positions": None}),
        ("slots alone int64", {"positions": None, "slots": slots, "sequences": two}),
        ("slots must be int64", {"positions": None, "slots": two}),
    ):
        with pytest.raises(TypeError, match=f"^cache_append: .*{match}"):
            cache_append(**call | changed)
    if target.gpu:
        return
    table = {"page_table": integers(target, [[0, -1], [1, 2]])}
    for match, changed in (
        ("slots must be from -1 to 19", {"positions": None, "slots": slots + 19}),
        ("page_table must be from 0 to 3", table | {"positions": two + 5}),
        ("positions must be from 0 to 9", table | {"positions": two + 9}),
        ("sequences must be from 0 to 1", table | {"sequences": two + 1}),
    ):
        with pytest.raises(ValueError, match=f"^cache_append: {match}"):
            cache_append(**call | changed)
    assert not to_numpy64(cache).any()


@each_library()
def test_one_pool_of_pages(target):
    """Keys and values may be views of one pool, a whole page apart; other overlaps are refused."""
    problem = CachedProblem(CachedCase(target.dtypes[0], page=8, tokens=2), target.array)
    right = to_numpy64(attention_with_cache(**problem.arguments))
    after = problem.after
    problem = CachedProblem(problem.case, target.array)
    caches = [to_numpy64(problem.arguments[name]) for name in ("k_cache", "v_cache")]
    pool = target.array(numpy.stack(caches, 1).reshape(-1, *caches[0].shape[1:]), target.dtypes[0])
    table = 2 * numpy.where(abs(problem.shown) > 999, -1, problem.shown)
    views = {"k_cache": pool[:-1], "v_cache": pool[1:], "page_table": integers(target, table)}
    found = attention_with_cache(**problem.arguments | views)
    numpy.testing.assert_array_equal(to_numpy64(found), right)
    for side in (0, 1):
        numpy.testing.assert_array_equal(to_numpy64(pool)[side::2], after[side])
    rows = pool.reshape(-1, *pool.shape[2:])
    shifted = {"v_cache": rows[4:-4].reshape(-1, *pool.shape[1:])}
    for wrong in (shifted, {"v_cache": pool[:-1]}):
        with pytest.raises(ValueError, match="k_cache is written, so it must share no memory"):
            attention_with_cache(**problem.arguments | views | wrong)
