"""The steps of calls with a cache that no single launch takes, their two kernels computed here."""

import functools
from types import SimpleNamespace

import numpy
import pytest
from fakes import fake_facts
from matrix import covering, each_case, libraries
from problems import HOPPER

from cupyflash import attention_with_cache, environment, flash_attn_with_kvcache
from cupyflash.ops.attention import planning
from cupyflash.ops.decode import dispatch, steps
from cupyflash.ops.decode.operations import plain
from cupyflash.runtime.lookup import library_of
from cupyflash.testing import assert_close_to_float64, to_numpy64
from cupyflash.testing.cached import LENGTHS, OPTIONS, CachedCase, CachedProblem

CPU = libraries(device="cpu")
FUNCTION = "attention_with_cache"


def cases(target):
    values = {
        "dtype": list(target.dtypes),
        "page": [1, 3, 16, 100, 0],
        "option": list(OPTIONS),
        "tokens": [1, 2, 9],
        "group": [1, 3],
        "length": list(LENGTHS),
        "head_dim": [20, 64],
        "packed": [False, True],
        "strided": [False, True],
    }
    return covering(CachedCase, values)


def place(b, j, cache, table, sequences):
    """(page, row) of a key, or None outside of the table."""
    if table is None:
        return (b if sequences is None else int(sequences[b])), j
    block = j // cache.shape[1]
    return (int(table[b, block]), j % cache.shape[1]) if 0 <= block < table.shape[1] else None


def append(function, library, arrays):
    """As `kv_cache.append`, row by row."""
    k, v, k_cache, v_cache, positions, table, sequences, slots, ends, k_scale, _ = arrays
    assert slots is None and k_scale is None and function == FUNCTION
    if ends is None:
        ends = numpy.arange(len(positions) + 1) * k.shape[1]
    rows = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    for x, cache in zip(rows, (k_cache, v_cache)):
        for b in range(len(positions)):
            for i in range(int(ends[b + 1]) - int(ends[b])):
                at = place(b, int(positions[b]) + i, cache, table, sequences)
                cache[at] = x[int(ends[b]) + i]


def gather(function, library, q, caches, scales, lengths, starts, table, sequences, max_length):
    """As `kv_cache.gather`, key by key; the other rows are NaN."""
    assert scales == (None, None)
    found = []
    for cache in caches:
        nan = numpy.full((len(lengths), max_length, *cache.shape[2:]), numpy.nan, "float32")
        rows = library.cast(library.from_numpy(nan), q)
        for b in range(len(lengths)):
            first = 0 if starts is None else int(starts[b])
            for j in range(first, int(lengths[b])):
                rows[b, j - first] = cache[place(b, j, cache, table, sequences)]
        found.append(rows)
    return tuple(found)


@pytest.fixture
def in_steps(monkeypatch):
    """Calls on the CPU take the plan of a GPU that has no kernel for them."""

    def call(library, arrays, shape, options):
        views = {n: library.view(x) for n, x in zip(dispatch.ARRAYS, arrays) if x is not None}
        given = [0 if x is None else library.pointer(x) for x in arrays]
        return dispatch.plan_of(FUNCTION, library, shape, options, views)(arrays, given)

    kernels = SimpleNamespace(append=append, gather=gather)
    monkeypatch.setattr(steps, "kv_cache", kernels)
    monkeypatch.setattr(dispatch, "reference", SimpleNamespace(attention_with_cache=call))


@each_case(cases, CPU)
def test_steps(target, case, in_steps):
    problem = CachedProblem(case, target.array)
    out, lse = attention_with_cache(**problem.arguments, return_lse=True)
    right, right_lse = problem.expected()
    rounded, _ = problem.expected("float32", "float16" if case.dtype == "float16" else None)
    assert_close_to_float64(to_numpy64(out), right, rounded, case.dtype, "out", terms=8.0)
    numpy.testing.assert_allclose(to_numpy64(lse), right_lse, rtol=1e-4, atol=1e-5)
    for name, after in zip(("k_cache", "v_cache"), problem.after):
        numpy.testing.assert_array_equal(to_numpy64(problem.arguments[name]), after)


@each_case(lambda target: [CachedCase(x, tokens=3) for x in target.dtypes], CPU)
@pytest.mark.parametrize("queries", [1, 2])
def test_more_new_keys_than_queries(target, case, queries, request):
    """The keys enter the cache before, and the queries are the last of them."""
    given = CachedProblem(case, target.array).arguments
    arguments = {name: given[name] for name in ("k", "v", "k_cache", "v_cache")}
    arguments["q"] = given["q"][:, 3 - queries :]
    for name, said in (("cache_seqlens", "positions"), ("block_table", "page_table")):
        arguments[name] = given[said]
    caches = arguments["k_cache"], arguments["v_cache"]
    before = [to_numpy64(x).copy() for x in caches]
    call = functools.partial(flash_attn_with_kvcache, causal=True, return_softmax_lse=True)
    right = [to_numpy64(x) for x in call(**arguments)]
    after = [to_numpy64(x).copy() for x in caches]
    request.getfixturevalue("in_steps")
    for cache, old in zip(caches, before):
        cache[...] = target.array(old.astype("float32"), case.dtype)
    for x, y in zip((*call(**arguments), *caches), (*right, *after)):
        numpy.testing.assert_array_equal(to_numpy64(x), y)


@each_case(lambda target: [CachedCase(x, page=0, tokens=3) for x in target.dtypes], CPU)
def test_contiguous_caches_are_read_where_they_lie(target, case, in_steps, monkeypatch):
    arguments = CachedProblem(case, target.array).arguments
    copies = {
        name: target.array(to_numpy64(arguments[name])[arguments["sequences"]].copy(), case.dtype)
        for name in ("k_cache", "v_cache")
    }
    right = attention_with_cache(**arguments)
    monkeypatch.setattr(steps.kv_cache, "gather", None)
    found = attention_with_cache(**arguments | copies | {"sequences": None})
    numpy.testing.assert_array_equal(to_numpy64(found), to_numpy64(right))


@each_case(lambda target: [CachedCase("float32", x) for x in (16, 0)], CPU[:1])
def test_a_backend_that_does_not_compute_it(target, case, monkeypatch):
    """The plan is refused, so that nothing enters the cache."""
    fake_facts(monkeypatch, planning, card_of=HOPPER)
    arguments = CachedProblem(case, target.array).arguments
    arrays = tuple(arguments.get(name) for name in dispatch.ARRAYS)
    library, options = library_of(arrays[0]), plain(
        FUNCTION, causal=True, scale=None, window=None, softcap=0.0, num_splits=0,
        return_lse=False, max_seqlen_q=None,
    )  # fmt: skip
    shape, options, views = dispatch.check(FUNCTION, library, arrays, *options)
    views = {name: view._replace(device=0) for name, view in views.items()}
    make = lambda: steps.StepsPlan(FUNCTION, library, shape, options, views)
    with environment.override(backend="simt"):
        make()
    with (
        environment.override(backend="sm80"),
        pytest.raises(NotImplementedError, match=f"^{FUNCTION}: the backend sm80"),
    ):
        make()
