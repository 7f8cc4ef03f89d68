"""Sampling, embedding and the KV cache, on every library."""

import numpy
import pytest
from arrays import integers, normal, stored
from matrix import each_library
from wrong_calls import INTEGER, NUMBER, array, check_refused

from cupyflash.ops.decode.cache_append import cache_append
from cupyflash.ops.decode.embedding import embedding
from cupyflash.ops.decode.reference import ONE, weights
from cupyflash.ops.decode.sampling import DecodeState, Sampling, choice_words, sample
from cupyflash.testing import assert_close_to_float64, to_numpy64

SAMPLINGS = [
    Sampling(),
    Sampling(1.0, seed=2**63 + 5),
    Sampling(0.7, top_k=5, seed=1),
    Sampling(1.3, top_p=0.6, seed=2),
    Sampling(2.0, top_k=40, top_p=0.9, seed=3),
    Sampling(1.0, top_k=1, seed=4),
    Sampling(1.0, top_p=1e-9, seed=5),
    Sampling(1e-30, seed=6),
    Sampling(1e30, top_k=10**6, seed=7),
]
each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)


def numbers(x):
    return to_numpy64(x).astype("int64")


def tokens_of(target, logits, sampling, positions=None):
    """Sampled tokens as a NumPy array; positions advance in place."""
    out = integers(target, numpy.full(logits.shape[0], -7))
    state = None
    if positions is not None:
        state = DecodeState(*(integers(target, x) for x in (positions, positions, positions)))
    sample(logits, sampling, out=out, state=state)
    return numbers(out)


def kept(logits, sampling):
    """Tokens that may be drawn and their probabilities, in float64, written down independently."""
    scores = (logits - logits.max()) / sampling.temperature
    p = numpy.exp(scores) / numpy.exp(scores).sum()
    allowed = numpy.ones_like(p, bool)
    if 0 < sampling.top_k < p.size:
        allowed &= logits >= numpy.sort(logits)[-sampling.top_k]
    p = numpy.where(allowed, p, 0) / p[allowed].sum()
    if sampling.top_p < 1:
        order = numpy.argsort(-logits, kind="stable")
        before = numpy.cumsum(p[order]) - p[order]
        fewest = order[before < sampling.top_p]
        allowed &= logits >= logits[fewest].min()
    p = numpy.where(allowed, p, 0)
    return p / p.sum()


@each_library()
@each_sampling
@pytest.mark.parametrize("vocabulary", [1, 31, 1000, 50257])
def test_equal_tokens_on_every_device(target, sampling, vocabulary):
    """Those of NumPy, for aligned and unaligned rows; twice the same."""
    if not target.gpu and vocabulary > 1000:
        pytest.skip("the CPU has one path for every length")
    for i, dtype in enumerate(target.dtypes):
        for storage in ("contiguous", "unaligned"):
            values = 3 * normal((5, vocabulary), i)
            logits = stored(target, values, dtype, storage)
            positions = numpy.random.default_rng(i).integers(0, 2**31 - 2, 5)
            found = tokens_of(target, logits, sampling, positions)
            plain = numpy.ascontiguousarray(to_numpy64(logits), "float32")
            expected = numpy.zeros(5, "int32")
            state = DecodeState(*(positions.astype("int32") for _ in range(3)))
            sample(plain, sampling, out=expected, state=state)
            assert (found == expected).all()
            assert (tokens_of(target, logits, sampling, positions) == found).all()


@each_library()
def test_each_row_in_its_own_way(target):
    """What each row has chosen alone, whatever is beside it; also greedily, and a row of NaN."""
    values = 3 * normal((len(SAMPLINGS) + 1, 1000), 1)
    values[-1, 5] = numpy.nan
    samplings, numbered = [*SAMPLINGS, Sampling(1.0)], [3, *range(len(SAMPLINGS) - 1), 2**32 - 1, 0]
    positions = numpy.arange(len(values)) * 7
    for dtype in target.dtypes:
        logits = stored(target, values, dtype)
        out, *state = (integers(target, positions) for _ in range(4))
        choices = integers(target, choice_words(samplings, numbered[: len(values)]))
        sample(logits, out=out, state=DecodeState(*state), choices=choices)
        assert numbers(state[1]).tolist() == (positions + 1).tolist()
        found = numbers(out)
        for row, (sampling, number) in enumerate(zip(samplings, numbered)):
            if number > 20:
                continue
            rows = number + 1  # the row of this number draws so without choices
            alone = stored(target, numpy.tile(values[row], (rows, 1)), dtype)
            counters = numpy.full(rows, positions[row])
            assert found[row] == tokens_of(target, alone, sampling, counters)[number]


@each_library()
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_greedy_takes_the_first_largest(target, dtype):
    values = normal((4, 999), 0)
    values[1, [700, 45, 900]] = values.max() + 1
    values[2] = -5.0
    values[3, :] = -numpy.inf
    values[3, 17] = -3e4
    found = tokens_of(target, stored(target, values, dtype), Sampling())
    assert found.tolist() == [values[0].astype(dtype).argmax(), 45, 0, 17]


@each_library()
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
def test_no_distribution(target, sampling):
    values = normal((5, 100), 0)
    values[0, 99], values[2, 3], values[3] = numpy.nan, numpy.inf, -numpy.inf
    found = tokens_of(target, stored(target, values, "float32"), sampling)
    assert (found[[0, 2, 3]] == -1).all() and (found[[1, 4]] >= 0).all()


@each_library()
@pytest.mark.parametrize("sampling", SAMPLINGS[1:5], ids=str)
def test_distribution(target, sampling):
    """Only tokens that may be drawn, as often as their probability says (chi-squared)."""
    draws, vocabulary = 4000, 60
    values = 2 * normal(vocabulary, 3)
    logits = stored(target, numpy.tile(values, (draws, 1)), "float32")
    found = tokens_of(target, logits, sampling)
    p = kept(values.astype("float64"), sampling)
    counts = numpy.bincount(found, minlength=vocabulary)
    assert (counts[p == 0] == 0).all()
    often = p * draws >= 5
    statistic = ((counts - draws * p)[often] ** 2 / (draws * p)[often]).sum()
    freedom = often.sum()
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@each_library()
def test_ties_with_the_last_kept_stay(target):
    values = numpy.zeros((3000, 8), "float32")
    values[:, 5:] = -4.0
    logits = stored(target, values, "float32")
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.1)):
        assert set(tokens_of(target, logits, sampling)) == {0, 1, 2, 3, 4}


@each_library()
@pytest.mark.parametrize("zeros", [(-0.0, 0.0), (0.0, -0.0)], ids=str)
def test_zeros_of_both_signs_are_equal(target, zeros):
    """Where they are the largest logits, whichever comes first."""
    values = numpy.full((300, 8), -1.0, "float32")
    values[:, 3], values[:, 6] = zeros
    logits = stored(target, values, "float32")
    for sampling in (
        *(Sampling(1.0, top_k=k) for k in (1, 2)),
        *(Sampling(1.0, top_p=p) for p in (0.1, 0.4)),
    ):
        assert set(tokens_of(target, logits, sampling)) == {3, 6}
    assert set(tokens_of(target, logits, Sampling())) == {3}
    assert set(tokens_of(target, logits, Sampling(1.0))) == set(range(8))


@each_library()
def test_seeds_rows_and_positions_differ(target):
    logits = stored(target, numpy.zeros((64, 5000)), "float32")
    same = numpy.zeros(64, "int32")
    first = tokens_of(target, logits, Sampling(1.0, seed=1), same)
    assert len(set(first)) > 60  # 64 draws of 5000
    for other in (
        tokens_of(target, logits, Sampling(1.0, seed=2), same),
        tokens_of(target, logits, Sampling(1.0, seed=1), same + 1),
    ):
        assert (first == other).sum() < 4


@each_library()
def test_state_advances(target):
    values = normal((3, 50), 1)
    values[1] = numpy.nan
    before = ([9, 9, 9], [8, 8, 8], [4, 5, 6], [0, 0, 0])
    out, tokens, positions, ends = (integers(target, x) for x in before)
    logits = stored(target, values, "float32")
    sample(logits, out=out, state=DecodeState(tokens, positions, ends), limit=6)
    greedy = values.argmax(1)
    assert numbers(out).tolist() == [greedy[0], -1, greedy[2]]
    assert numbers(tokens).tolist() == [greedy[0], 0, greedy[2]]
    assert numbers(positions).tolist() == [5, 6, 6] and numbers(ends).tolist() == [6, 7, 7]


def test_weights_are_powers_of_two():
    distance = numpy.concatenate([numpy.linspace(0, 50, 20001), [1e-40, 3e38, numpy.inf]])
    distance = distance.astype("float32")
    found = weights(distance, numpy.float32(1.0)).astype("float64")
    exact = 2.0 ** (ONE - distance.astype("float64"))
    exact[distance >= ONE + 1] = 0
    assert (abs(found - exact) <= 1 + 2.0**-22 * exact).all()


def test_bad_sampling():
    """Numbers become plain ones where the object is made."""
    reals = (*NUMBER, None, -1)
    check_refused(
        Sampling,
        {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "seed": 1},
        {
            "temperature": (*reals, 1e-31),
            "top_k": (*INTEGER, None, -1, 2**31, 1.0),
            "top_p": (*reals, 0, -0.1, 1.1, 2),
            "seed": (*(x for x in INTEGER if x is not None), -1, 2**64, 1.0),
        },
        least=60,
    )
    numbers = Sampling(numpy.float32(0.5), numpy.int64(3), numpy.array(0.25), numpy.uint64(9))
    assert numbers == Sampling(0.5, 3, 0.25, 9) and hash(numbers) == hash(Sampling(0.5, 3, 0.25, 9))
    assert [type(x) for x in (*numbers.kind, numbers.seed)] == [float, int, float, int]


@each_library()
def test_wrong_calls_of_sample(target):
    logits, out = stored(target, normal((2, 6), 0), "float32"), integers(target, [0, 0])
    state = DecodeState(*(integers(target, [0, 0]) for _ in range(3)))
    number = array(out, dtypes=("int64", "float32"))
    choices = integers(target, choice_words([Sampling(1.0)] * 2, [0, 1]))
    words = array(choices, optional=True, dtypes=("int64", "float32"))
    rows = {"logits": logits, "out": out, "choices": choices}
    check_refused(sample, rows, {"choices": words, "sampling": (Sampling(1.0),)}, least=12)
    check_refused(
        sample,
        {"logits": logits, "sampling": Sampling(), "out": out, "state": state, "limit": 100},
        {
            "logits": array(logits),
            "sampling": (None, 1.0, {}, (0.5, 1, 1, 0), Sampling),
            "out": (*number, logits, state.positions, state.tokens),
            "state": (
                3, "text", tuple(state), [], DecodeState,
                *(state._replace(tokens=x) for x in number),
                *(state._replace(positions=x) for x in number),
                *(state._replace(ends=x) for x in (*number, state.positions)),
            ),
            "limit": (*INTEGER, None, -1, 2**31 - 1),
        },
        least=80,
    )  # fmt: skip


@each_library()
def test_no_seed_draws_another_one_each_time(target):
    logits = stored(target, numpy.zeros((64, 5000)), "float32")
    runs = [tokens_of(target, logits, Sampling(1.0, seed=None)) for _ in range(2)]
    assert (runs[0] == runs[1]).sum() < 4
    seeded = Sampling(1.0, seed=None).with_seed()
    assert seeded.seed is not None and seeded.with_seed() is seeded


@each_library()
def test_wrong_calls_of_cache_append(target):
    """Also a cache that is both, or lies over what is appended."""
    k, v = (stored(target, normal((2, 2, 8), i), "float32") for i in (0, 1))
    caches = stored(target, numpy.zeros((2, 3, 9, 2, 8)), "float32")
    positions, sequences = integers(target, [0, 1]), integers(target, [2, 0])
    rows = caches[0].reshape(-1, 2, 8)
    check_refused(
        cache_append,
        {
            "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1],
            "positions": positions, "sequences": sequences,
        },
        {
            "k": (*array(k), rows[3:5]),
            "v": (*array(v), rows[:2]),
            "k_cache": (*array(caches[0]), caches[1]),
            "v_cache": (*array(caches[1]), caches[0]),
            "positions": array(positions, dtypes=("int64", "float32")),
            "sequences": array(sequences, optional=True, dtypes=("int64", "float32")),
        },
        least=60,
    )  # fmt: skip


@each_library(library="torch")
def test_autograd_hears_of_writes(target):
    """What was saved for a backward and written since is an error there; gradients are refused."""
    import torch

    k, cache, other = (stored(target, normal((2, n, 2, 8), n), "float32") for n in (1, 9, 9))
    positions, factor = integers(target, [0, 1]), torch.ones_like(cache).requires_grad_()
    for write in (
        lambda: cache_append(k[:, 0], k[:, 0], cache, other, positions),
        lambda: sample(k[:, 0, 0], out=positions),
    ):
        saved = (factor * cache).sum() + (factor[:, 0, 0, 0] * positions).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
    with torch.inference_mode():  # whose tensors have no version
        inference = torch.zeros_like(cache)
        cache_append(k[:, 0], k[:, 0], inference, other, positions.clamp(0, 8))
    assert (inference != 0).sum() == 32
    needing = k[:, 0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="^cache_append: has no backward"):
        cache_append(needing, k[:, 0], cache, other, positions)
    with torch.no_grad():
        cache_append(needing, k[:, 0], cache, other, positions.clamp(0, 8))
    table = normal((5, 8), 0)
    table = target.array(table, "float32").requires_grad_()
    with pytest.raises(NotImplementedError, match="^embedding: has no backward"):
        embedding(positions, table)


@each_library()
def test_bad_arrays(target):
    logits, out = stored(target, normal((2, 6), 0), "float32"), integers(target, [0, 0])
    for error, match, call in (
        (
            ValueError,
            r"logits must have shape \(rows, vocabulary\)",
            lambda: sample(logits[0], out=out),
        ),
        (ValueError, "the last dimension", lambda: sample(logits[:, ::2], out=out)),
        (ValueError, r"out must have shape \(2,\)", lambda: sample(logits, out=out[:1])),
        (TypeError, "out must be int32", lambda: sample(logits, out=logits)),
        (TypeError, "out must be a", lambda: sample(logits, out=[0, 0])),
        (TypeError, "logits must be float16", lambda: sample(out, out=out)),
    ):
        with pytest.raises(error, match=f"^sample: {match}"):
            call()


@each_library()
@pytest.mark.parametrize("columns", [1, 7, 64, 768])
def test_embedding(target, columns):
    rng = numpy.random.default_rng(columns)
    for i, dtype in enumerate(target.dtypes):
        table, places = (stored(target, normal((n, columns), (i, n)), dtype) for n in (50, 20))
        tokens, positions = rng.integers(0, 50, (3, 11)), rng.integers(0, 20, (3, 11))
        indices = [integers(target, x) for x in (tokens, positions)]
        out = embedding(indices[0], table, indices[1], places)
        assert tuple(out.shape) == (3, 11, columns) and out.dtype == table.dtype
        exact = to_numpy64(table)[tokens] + to_numpy64(places)[positions]
        assert_close_to_float64(to_numpy64(out), exact, exact, dtype, "out", terms=8.0)
        gathered = embedding(indices[0], table)
        assert (to_numpy64(gathered) == to_numpy64(table)[tokens]).all()
        assert embedding(indices[0][:0], table).shape[0] == 0


@each_library()
def test_embedding_of_what_does_not_exist(target):
    table = stored(target, normal((5, 24), 0), "float32")
    for tokens, positions in (([0, 5], [0, 0]), ([0, -1], [1, 1]), ([0, 1], [0, 5])):
        indices = [integers(target, x) for x in (tokens, positions)]
        if target.gpu:
            out = to_numpy64(embedding(indices[0], table, indices[1], table))
            assert numpy.isfinite(out[0]).all() and numpy.isnan(out[1]).all()
        else:
            with pytest.raises(ValueError, match="^embedding: .* must be from 0 to 4, got"):
                embedding(indices[0], table, indices[1], table)
    with pytest.raises(ValueError, match="takes positions with position_weight"):
        embedding(integers(target, [0]), table, integers(target, [0]))
    with pytest.raises(TypeError, match="tokens must be int32"):
        embedding(table, table)


@each_library()
@pytest.mark.parametrize("shape", [(1, 8), (3, 5), (12, 64)], ids=str)
def test_cache_append(target, shape):
    """Slices of a wider tensor; nothing else changes; row i is sequence i without ``sequences``."""
    for i, dtype in enumerate(target.dtypes):
        k, v = (stored(target, normal((4, *shape), (i, j)), dtype) for j in range(2))
        wide = stored(target, normal((4, 3, *shape), (i, 2)), dtype)
        for keys, values, sequences in ((k, v, None), (wide[:, 1], wide[:, 2], [2, 0, 2, 1])):
            caches = [stored(target, normal((4, 9, *shape), (i, j)), dtype) for j in (3, 4)]
            expected = [to_numpy64(x).copy() for x in caches]
            positions = [3, 8, 0, 3]
            for cache, new in zip(expected, (keys, values)):
                cache[sequences or range(4), positions] = to_numpy64(new)
            where = None if sequences is None else integers(target, sequences)
            cache_append(keys, values, *caches, integers(target, positions), where)
            for cache, right in zip(caches, expected):
                assert (to_numpy64(cache) == right).all()


@each_library()
def test_cache_append_outside(target):
    k = stored(target, normal((2, 2, 8), 0), "float32")
    for positions, sequences in (([0, 9], [0, 1]), ([-1, 0], [0, 1]), ([0, 0], [0, 3])):
        cache, other = (stored(target, numpy.zeros((3, 9, 2, 8)), "float32") for _ in "kv")
        places = [integers(target, x) for x in (positions, sequences)]
        if target.gpu:
            cache_append(k, k, cache, other, *places)
            assert (to_numpy64(cache) != 0).sum() == (to_numpy64(other) != 0).sum() == 16
        else:
            with pytest.raises(ValueError, match="must be from 0 to"):
                cache_append(k, k, cache, other, *places)
    with pytest.raises(ValueError, match="k_cache"):
        cache_append(k, k, k, k, integers(target, [0, 1]))
    with pytest.raises(ValueError, match="the last dimension of k must be contiguous"):
        wide = stored(target, normal((2, 2, 16), 0), "float32")[..., ::2]
        cache, other = (stored(target, numpy.zeros((3, 9, 2, 8)), "float32") for _ in "kv")
        cache_append(wide, wide, cache, other, integers(target, [0, 1]))
