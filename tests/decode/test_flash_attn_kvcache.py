"""`flash_attn_with_kvcache` and what programs import beside it, against the definition."""

import dataclasses

import numpy
import pytest
from arrays import integers
from matrix import covering, each_case, each_library

import cupyflash
from cupyflash import flash_attn_varlen_func, flash_attn_with_kvcache
from cupyflash.testing import assert_close_to_float64, to_numpy64

BATCH, IN_CACHE, PAGES = 3, 5, 40


@dataclasses.dataclass(frozen=True)
class Case:
    """flash-attn's own cases: queries, new keys (0: none), pages (0: none), and options.

    Attributes:
        rotary: "", "halves" or "pairs".
        where: "batch" in order, or "idx", the sequences of a larger cache.
    """

    dtype: str
    queries: int = 1
    new: int = 1
    page: int = 0
    causal: bool = False
    window: tuple = (-1, -1)
    rotary: str = ""
    where: str = "batch"
    leftpad: bool = False
    slopes: bool = False
    softcap: float = 0.0
    splits: int = 0
    group: int = 1
    head_dim: int = 64


def cases(target):
    return covering(
        Case,
        {
            "dtype": list(target.dtypes),
            "queries": [1, 3, 17],
            "new": [0, 1, 3, 8],
            "page": [0, 1, 7, 16],
            "causal": [False, True],
            "window": [(-1, -1), (5, 0), (4, 3)],
            "rotary": ["", "halves", "pairs"],
            "where": ["batch", "idx"],
            "leftpad": [False, True],
            "slopes": [False, True],
            "softcap": [0.0, 3.0],
            "splits": [0, 1, 2],
            "group": [1, 3, 6],
            "head_dim": [59, 64, 128],
        },
    )


class Problem:
    """The arguments of a call and float64 results by the definition."""

    def __init__(self, case, array):
        self.case = case
        rng = self.rng = numpy.random.default_rng(list(str(case).encode()))
        normal = lambda *shape: rng.standard_normal(shape, "float32")
        self.room = 48
        self.lengths = numpy.array([0, 20, 31]) if case.new else numpy.array([20, 1, 0])
        heads, kv = 2 * case.group, 2
        self.q = array(normal(BATCH, case.queries, heads, case.head_dim), case.dtype)
        self.k, self.v = (
            array(normal(BATCH, case.new, kv, case.head_dim), case.dtype) for _ in "kv"
        )
        dense = normal(2, BATCH, self.room, kv, case.head_dim)
        dense[:, numpy.arange(self.room) >= self.lengths[:, None]] = numpy.nan
        self._place(dense, array)
        self.pad = numpy.array([0, 7, 3]) if case.leftpad else numpy.zeros(BATCH, int)
        self.slopes = rng.uniform(0, 0.4, heads).astype("float32") * case.slopes
        angles = rng.uniform(0, 6, (self.room, 16)).astype("float32")
        self.cos, self.sin = (array(f(angles), case.dtype) for f in (numpy.cos, numpy.sin))
        self._name(lambda x: array(numpy.asarray(x, "int32")), array)

    def _place(self, dense, array):
        case, rng = self.case, self.rng
        shape = dense.shape[3:]
        if case.page:
            blocks = -(-self.room // case.page)
            count = BATCH * blocks + 2
            self.table = rng.permutation(count)[: BATCH * blocks].reshape(BATCH, blocks)
            memory = numpy.full((2, count, case.page, *shape), numpy.nan, "float32")
        else:
            count = IN_CACHE if case.where == "idx" else BATCH
            self.table = rng.permutation(count)[:BATCH, None] if count > BATCH else None
            memory = numpy.full((2, count, self.room, *shape), numpy.nan, "float32")
        for b in range(BATCH):
            for j in range(self.lengths[b]):
                memory[(slice(None), *self.at(b, j))] = dense[:, b, j]
        self.caches = [array(x.copy(), case.dtype) for x in memory]
        self.before = [to_numpy64(x).copy() for x in self.caches]

    def at(self, b, j):
        """Where a key lies in the cache."""
        if self.case.page:
            return self.table[b, j // self.case.page], j % self.case.page
        return (b if self.table is None else self.table[b, 0]), j

    def _name(self, integers, array):
        case = self.case
        self.arguments = {
            "q": self.q, "k_cache": self.caches[0], "v_cache": self.caches[1],
            "cache_seqlens": integers(self.lengths), "causal": case.causal,
            "window_size": case.window, "softcap": case.softcap, "num_splits": case.splits,
        }  # fmt: skip
        if case.new:
            self.arguments |= {"k": self.k, "v": self.v}
            if case.rotary:
                pairs = {"rotary_interleaved": case.rotary == "pairs"}
                self.arguments |= {"rotary_cos": self.cos, "rotary_sin": self.sin} | pairs
        if case.page:
            self.arguments["block_table"] = integers(self.table)
        elif self.table is not None:
            self.arguments["cache_batch_idx"] = integers(self.table[:, 0])
        if case.leftpad:
            self.arguments["cache_leftpad"] = integers(self.pad)
        if case.slopes:
            self.arguments["alibi_slopes"] = array(self.slopes)

    def rotated(self, x, places):
        """(rows, heads, head_dim) at their places, rounded to the dtype of the call."""
        if not (self.case.rotary and self.case.new):
            return x
        cos, sin = (to_numpy64(y)[places][:, None] for y in (self.cos, self.sin))
        first, second = slice(0, 16), slice(16, 32)
        if self.case.rotary == "pairs":
            first, second = slice(0, 32, 2), slice(1, 32, 2)
        result = x.copy()
        result[..., first] = x[..., first] * cos - x[..., second] * sin
        result[..., second] = x[..., first] * sin + x[..., second] * cos
        return result

    def expected(self, after, dtype, weights_dtype):
        """(out, lse) on the caches as they are after the call."""
        case = self.case
        left, right = (x if x >= 0 else 99999 for x in case.window)
        right = 0 if case.causal else right
        outs, lses = [], []
        for b in range(BATCH):
            past, total = self.lengths[b], self.lengths[b] + case.new
            row = numpy.arange(case.queries)
            moves = case.causal or case.window != (-1, -1)
            q = self.rotated(to_numpy64(self.q)[b], past + row * moves).astype(dtype)
            where = [self.at(b, j) for j in range(total)]
            k, v = (
                numpy.array([x[at] for at in where]).reshape(total, 2, case.head_dim) for x in after
            )
            k, v = (numpy.repeat(x, case.group, 1).astype(dtype) for x in (k, v))
            scores = numpy.einsum("ihd,jhd->hij", q, k) * numpy.dtype(dtype).type(
                case.head_dim**-0.5
            )
            if case.softcap:
                scores = case.softcap * numpy.tanh(scores / case.softcap)
            key, place = numpy.arange(total), row[:, None] + total - case.queries
            scores = scores - (self.slopes[:, None, None] * abs(place - key)).astype(dtype)
            seen = (key >= place - left) & (key <= place + right) & (key >= self.pad[b])
            scores = numpy.where(seen, scores, -numpy.inf)
            largest = scores.max(2, keepdims=True, initial=-numpy.inf)
            weights = numpy.exp(scores - numpy.where(numpy.isinf(largest), 0, largest))
            sums = weights.sum(2)
            with numpy.errstate(divide="ignore"):
                lses.append(numpy.where(sums > 0, largest[..., 0] + numpy.log(sums), -numpy.inf))
            out = numpy.einsum("hij,jhd->ihd", weights.astype(weights_dtype).astype(dtype), v)
            outs.append(out / numpy.where(sums > 0, sums, 1).T[..., None])
        return numpy.stack(outs), numpy.stack(lses)


@each_case(cases)
def test_kvcache(target, case):
    """Keys in the cache are those of k, rotated; all else there is untouched."""
    problem = Problem(case, target.array)
    out, lse = flash_attn_with_kvcache(**problem.arguments, return_softmax_lse=True)
    after = [to_numpy64(x) for x in problem.caches]
    for x, cache, before in zip((problem.k, problem.v), after, problem.before):
        right = before.copy()
        for b in range(BATCH):
            places = problem.lengths[b] + numpy.arange(case.new)
            rows = to_numpy64(x)[b]
            rows = problem.rotated(rows, places) if x is problem.k else rows
            for j, row in zip(places, rows):
                right[problem.at(b, j)] = row
        if x is problem.k and case.rotary and case.new:
            step = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-22}[case.dtype]
            numpy.testing.assert_allclose(cache, right, rtol=step, atol=step)
        else:
            numpy.testing.assert_array_equal(cache, right)
    half = "float16" if case.dtype == "float16" else "float32"
    right, right_lse = problem.expected(after, "float64", "float64")
    rounded, _ = problem.expected(after, "float32", half)
    terms = 8.0 if not case.rotary else 64.0  # of queries that are rounded once more
    assert_close_to_float64(to_numpy64(out), right, rounded, case.dtype, "out", terms=terms)
    numpy.testing.assert_array_equal(numpy.isneginf(to_numpy64(lse)), numpy.isneginf(right_lse))


def small(target, **changed):
    sizes = {"queries": 2, "new": 2, "page": 7} | changed
    return Problem(Case(target.dtypes[0], **sizes), target.array)


@each_library()
def test_words_of_newer_versions(target):
    """flash-attn 3's names, an integer length, packed queries, the whole cache."""
    problem = small(target)
    arguments = {name: x for name, x in problem.arguments.items() if name not in ("k", "v")}
    right = to_numpy64(flash_attn_with_kvcache(**arguments))
    table = arguments.pop("block_table")
    found = flash_attn_with_kvcache(**arguments, page_table=table, qv=None, attention_chunk=0)
    numpy.testing.assert_array_equal(to_numpy64(found), right)
    packed = arguments | {"q": problem.q.reshape(-1, *problem.q.shape[2:])}
    ends = integers(target, [0, 2, 4, 6])
    found = flash_attn_with_kvcache(**packed, page_table=table, cu_seqlens_q=ends, max_seqlen_q=2)
    numpy.testing.assert_array_equal(to_numpy64(found).reshape(right.shape), right)
    cache = target.array(numpy.nan_to_num(problem.before[0]).astype("float32"), target.dtypes[0])
    flat = {"q": problem.q, "k_cache": cache[:3], "v_cache": cache[3:6]}
    whole = to_numpy64(flash_attn_with_kvcache(**flat))
    numpy.testing.assert_array_equal(
        to_numpy64(flash_attn_with_kvcache(**flat, cache_seqlens=7)), whole
    )
    seven = integers(target, [7, 7, 7])
    numpy.testing.assert_array_equal(
        to_numpy64(flash_attn_with_kvcache(**flat, cache_seqlens=seven)), whole
    )


@each_library()
@pytest.mark.parametrize("window", ((None, -1), (-1, None), (None, None), None), ids=str)
def test_rotary_where_no_window_ends(target, window):
    """Every word for an unlimited side leaves all queries at one place."""
    cos, sin = (
        target.array(f(numpy.ones((48, 16))), target.dtypes[0]) for f in (numpy.cos, numpy.sin)
    )
    found = [
        flash_attn_with_kvcache(
            **small(target).arguments | {"rotary_cos": cos, "rotary_sin": sin, "window_size": x}
        )
        for x in ((-1, -1), window)
    ]
    numpy.testing.assert_array_equal(*map(to_numpy64, found))


@each_library()
def test_what_is_refused(target):
    good = small(target).arguments
    cos = target.array(numpy.ones((48, 16)), target.dtypes[0])
    angles = {"rotary_cos": cos, "rotary_sin": cos}
    none, table = {"k": None, "v": None}, good["block_table"]
    for error, match, changed in (
        (NotImplementedError, "qv must be None, .*MLA", {"qv": good["q"]}),
        (NotImplementedError, "q_descale must be None", {"q_descale": good["q"]}),
        (NotImplementedError, "attention_chunk must be None", {"attention_chunk": 4}),
        (NotImplementedError, "scheduler_metadata must be None", {"scheduler_metadata": cos}),
        (TypeError, "there is no keyword pack_gqa", {"pack_gqa": True}),
        (
            TypeError,
            "block_table and page_table are two names",
            {"page_table": table},
        ),
        (TypeError, "cache_seqlens must say where", {"cache_seqlens": None}),
        (TypeError, "rotary_cos and rotary_sin must both be given", angles | none),
        (TypeError, "rotary_cos and rotary_sin must both be given", {"rotary_cos": cos}),
        (ValueError, "rotary_cos and rotary_sin must be", angles | {"rotary_sin": cos[:2]}),
        (ValueError, "window_size must be", {"window_size": (-3, 0)}),
        (ValueError, "cache_batch_idx must be None beside a block_table", {"cache_batch_idx": cos}),
        (TypeError, "cache_seqlens must be int32", {"cache_seqlens": cos[0, :3]}),
        (TypeError, "block_table must be int32", {"block_table": cos[:3]}),
        (TypeError, "k and v must both be arrays", {"v": None}),
        (TypeError, "q must be a NumPy, CuPy or torch array", {"q": [1.0]}),
        (TypeError, "block_table must be a", {"block_table": [[1]], "cache_seqlens": 3}),
        (TypeError, "cu_seqlens_q must be a", {"cu_seqlens_q": [0, 2], "cache_seqlens": 3}),
        (ValueError, r"cache_seqlens must be from 0 to \d+, got -1", {"cache_seqlens": -1}),
        (ValueError, r"cache_seqlens must be from 0 to 47, got 48", {"cache_seqlens": 48}),
        (ValueError, r"cache_seqlens must be from 0 to \d+, got 2147", {"cache_seqlens": 2**31}),
    ):
        with pytest.raises(error, match=f"^flash_attn_with_kvcache: {match}"):
            flash_attn_with_kvcache(**good | changed)
    if not target.gpu:
        with pytest.raises(ValueError, match="rotary_cos must have the places of all tokens"):
            flash_attn_with_kvcache(**good | {"rotary_cos": cos[:9], "rotary_sin": cos[:9]})


@each_library()
def test_what_is_refused_changes_no_cache(target):
    """More new keys than queries, which enter the cache in a launch of their own."""
    problem = small(target, new=3)
    good, cos = problem.arguments, target.array(numpy.ones((48, 16)), target.dtypes[0])
    changes = [
        {"sinks": cos}, {"alibi_slopes": cos}, {"softcap": -1.0}, {"softmax_scale": numpy.nan},
        {"num_splits": 129}, {"cache_leftpad": cos}, {"window_size": (-3, 0)}, {"q": cos},
        {"v": good["v"][:, :2]}, {"k_descale": cos}, {"max_seqlen_q": 2},
    ]  # fmt: skip
    if not target.gpu:
        changes.append({"cache_leftpad": integers(target, [0, -1, 0])})
        changes.append({"cache_seqlens": integers(target, [0, 20, 47])})
    if target.library == "torch":
        changes.append({"q": good["q"].clone().requires_grad_()})
    for changed in changes:
        with pytest.raises((TypeError, ValueError, NotImplementedError), match="^flash_attn_with_"):
            flash_attn_with_kvcache(**good | changed)
        for cache, before in zip(problem.caches, problem.before):
            numpy.testing.assert_array_equal(to_numpy64(cache), before)


@each_library()
def test_pages_of_varlen(target):
    """block_table: k and v are pages, lengths those of cu_seqlens_k or seqused_k."""
    problem = Problem(Case(target.dtypes[0], queries=3, new=0, page=7, group=3), target.array)
    right, right_lse = flash_attn_with_kvcache(
        **problem.arguments | {"causal": True}, return_softmax_lse=True
    )
    q = problem.q.reshape(-1, *problem.q.shape[2:])
    ends_q = integers(target, [0, 3, 6, 9])
    ends_k = integers(target, [0, *numpy.cumsum(problem.lengths)])
    table, used = problem.arguments["block_table"], problem.arguments["cache_seqlens"]
    call = lambda *arrays, **options: flash_attn_varlen_func(
        q, *problem.caches, *arrays, 3, 20, causal=True, block_table=table, **options
    )
    for arrays, options in (((ends_q, ends_k), {}), ((ends_q, None), {"seqused_k": used})):
        out, lse, none = call(*arrays, return_attn_probs=True, **options)
        assert none is None and tuple(lse.shape) == (6, 9)
        numpy.testing.assert_array_equal(to_numpy64(out).reshape(3, 3, 6, 64), to_numpy64(right))
        lse = to_numpy64(lse).reshape(6, 3, 3).swapaxes(0, 1)
        numpy.testing.assert_array_equal(lse, to_numpy64(right_lse))
    for error, match, options in (
        (NotImplementedError, "dropout_p must be 0.0 beside a block_table", {"dropout_p": 0.1}),
        (NotImplementedError, "seqused_q must be None", {"seqused_q": used}),
    ):
        with pytest.raises(error, match=f"^flash_attn_varlen_func: {match}"):
            call(ends_q, ends_k, **options)
    with pytest.raises(TypeError, match="cu_seqlens_k or seqused_k must be int32"):
        call(ends_q, None)


@each_library()
def test_padding(target):
    """Tokens of padded sequences and back; masked tokens may have a place."""
    x = target.array(numpy.arange(24).reshape(3, 4, 2), "float32")
    mask = integers(target, [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    unused = integers(target, [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    for more, kept, ends in (
        (None, [0, 2, 8, 9, 10, 11], [0, 2, 2, 6]),
        (unused, [0, 1, 2, 7, 8, 9, 10, 11], [0, 3, 4, 8]),
    ):
        rows, indices, cu_seqlens, longest, used = cupyflash.unpad_input(x, mask, more)
        assert indices.tolist() == kept and cu_seqlens.tolist() == ends and longest == 4
        assert used.tolist() == [2, 0, 4] and "int32" in f"{cu_seqlens.dtype}{used.dtype}"
        numpy.testing.assert_array_equal(to_numpy64(rows), to_numpy64(x).reshape(12, 2)[kept])
        padded = to_numpy64(cupyflash.pad_input(rows, indices, 3, 4)).reshape(12, 2)
        numpy.testing.assert_array_equal(padded[kept], to_numpy64(rows))
        assert not numpy.delete(padded, kept, 0).any()
    flat = x.reshape(12, 2)
    numpy.testing.assert_array_equal(
        to_numpy64(cupyflash.index_first_axis(flat, indices)), to_numpy64(rows)
    )
    for wrong in (mask[:2], None):
        with pytest.raises(ValueError, match="^unpad_input: attention_mask must be"):
            cupyflash.unpad_input(x, wrong)
    with pytest.raises(ValueError, match=r"^pad_input: indices must be \(total,\) = \(1,\), got"):
        cupyflash.pad_input(rows[:1], indices, 3, 4)  # not to all of these places


@each_library(library="torch")
def test_padding_has_gradients(target):
    x = target.array(numpy.ones((2, 3, 2)), "float32").requires_grad_()
    mask = integers(target, [[1, 0, 1], [0, 1, 1]])
    rows, indices, *_ = cupyflash.unpad_input(x, mask)
    cupyflash.pad_input(rows * 3, indices, 2, 3).sum().backward()
    numpy.testing.assert_array_equal(to_numpy64(x.grad)[..., 0], 3 * to_numpy64(mask))
