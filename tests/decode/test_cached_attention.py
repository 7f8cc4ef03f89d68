"""New tokens into a cache, and their attention to it: one launch, or two."""

import numpy
import pytest
from arrays import integers, normal, stored
from devices import memory
from matrix import each, each_library
from wrong_calls import NOT_IN_FLOAT32, NUMBER, array, check_refused

from cupyflash import attention_with_cache, environment
from cupyflash.ops.decode import dispatch, plans
from cupyflash.testing import assert_close_to_float64, to_numpy64

# (new tokens, heads of keys, queries of each, head_dim, length of the cache)
SHAPES = [
    (1, 3, 1, 64, 200),
    (1, 12, 1, 64, 1030),
    (1, 2, 8, 128, 333),
    (3, 2, 4, 128, 90),
    (8, 1, 3, 40, 65),
    (2, 1, 12, 192, 50),
    (1, 1, 5, 256, 600),
    (1, 2, 1, 96, 17),
    (9, 2, 2, 64, 40),
    (1, 1, 4, 128, 5000),
    (3, 1, 5, 64, 17000),
    (1, 1, 1, 200, 9000),
]


def problem(target, dtype, shape, batch=4, heads_first=False, storage="contiguous"):
    """Arrays, positions, and float64 results: out and both caches. What lies ahead is NaN."""
    tokens, heads, group, head_dim, length = shape
    rng = numpy.random.default_rng(shape)
    positions = [0, length - tokens, *rng.integers(0, length - tokens + 1, batch - 2)]
    make = lambda seed, *sizes: stored(target, normal(sizes, (seed, *shape)), dtype, storage)
    q = make(0, batch, tokens, heads * group, head_dim)
    new = make(1, batch, tokens, 3 * heads, head_dim)
    k, v = new[:, :, heads : 2 * heads], new[:, :, 2 * heads :]
    caches = []
    for seed in (2, 3):
        values = normal((batch, length, heads, head_dim), (seed, *shape))
        for b, position in enumerate(positions):
            values[b, position:] = numpy.nan
        axes = "transposed" if heads_first else "contiguous"
        cache = stored(target, values.swapaxes(0, 2) if heads_first else values, dtype, axes)
        caches.append(cache.swapaxes(0, 2) if heads_first else cache)
    after = [to_numpy64(x).copy() for x in caches]
    for b, position in enumerate(positions):
        for cache, x in zip(after, (k, v)):
            cache[b, position : position + tokens] = to_numpy64(x[b])
    return (q, k, v, *caches, integers(target, positions)), positions, after


def expected(q, after, positions, scale, dtype="float64", weights_dtype=None):
    """Computed in a dtype, weights rounded to another."""
    out, group = numpy.zeros(q.shape), q.shape[2] // after[0].shape[2]
    q, *after = (x.astype(dtype) for x in (q, *after))
    for b, i, h in numpy.ndindex(q.shape[:3]):
        k, v = (x[b, : positions[b] + i + 1, h // group] for x in after)
        scores = q.dtype.type(scale) * (k @ q[b, i, h])
        weights = numpy.exp(scores - scores.max())
        rounded = weights.astype(weights_dtype or dtype).astype(dtype)
        out[b, i, h] = rounded @ v / weights.sum()
    return out


def check(arrays, positions, after, dtype, scale=None):
    q = to_numpy64(arrays[0])
    out = attention_with_cache(*arrays, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    right = expected(q, after, positions, scale)
    half = "float16" if dtype == "float16" else None
    rounded = expected(q, after, positions, scale, "float32", half)
    assert_close_to_float64(to_numpy64(out), right, rounded, dtype, "out", terms=8.0)
    for cache, new in zip(arrays[3:5], after):
        numpy.testing.assert_array_equal(to_numpy64(cache), new)


@each()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_with_cache(target, shape):
    """What lies behind a sequence is not read; nothing else in the cache changes."""
    if not target.gpu and shape[-1] > 4096:
        pytest.skip("the CPU has one path for every length")
    for dtype in target.dtypes:
        check(*problem(target, dtype, shape), dtype)


@each(device="cuda")
def test_heads_first_and_scale(target):
    if target.backend in ("simt", "fp16x3"):
        pytest.skip("a cache that is not contiguous takes one launch")
    dtype = target.dtypes[0]
    check(*problem(target, dtype, SHAPES[3], heads_first=True), dtype, scale=0.3)


@each_library()
def test_unaligned(target):
    dtype = target.dtypes[0]
    check(*problem(target, dtype, SHAPES[0], storage="unaligned"), dtype)


@each_library(device="cuda")
@pytest.mark.parametrize("batch", [3, 40, 200])
def test_many_sequences(target, batch):
    """Shares from a part of a sequence to several of them."""
    for length in (20, 130, 700):
        check(*problem(target, "float16", (1, 2, 1, 64, length), batch), "float16")


@each_library(device="cuda")
def test_is_one_launch(target, monkeypatch):
    """What the tests above compare is the kernel for few tokens, and only where it can be."""
    taken = []
    plan = plans.DecodePlan

    class Counted(plan):
        def __init__(self, *arguments):
            taken.append(True)
            super().__init__(*arguments)

    monkeypatch.setattr(plans, "DecodePlan", Counted)
    for backend, shape, count in (
        (None, SHAPES[2], 1),
        ("simt", SHAPES[2], 0),
        (None, SHAPES[8], 1),
        (None, (40, 2, 2, 64, 60), 0),
    ):
        taken.clear()
        dispatch._plans.clear()
        with environment.override(backend=backend):
            attention_with_cache(*problem(target, "float16", shape)[0])
        assert len(taken) == count
    dispatch._plans.clear()


@each_library(device="cuda")
def test_outside_of_the_cache(target):
    """Nothing is written there."""
    (q, k, v, *caches, _), _, _ = problem(target, "float16", (2, 1, 1, 64, 9), batch=3)
    before = [to_numpy64(x).copy() for x in caches]
    attention_with_cache(q, k, v, *caches, integers(target, [-1, 8, 2**31 - 1]))
    for cache, old, new in zip(caches, before, (k, v)):
        old[0, 0], old[1, 8] = to_numpy64(new)[0, 1], to_numpy64(new)[1, 0]
        numpy.testing.assert_array_equal(to_numpy64(cache), old)


@each_library(device="cuda")
def test_shapes_keep_no_memory(target):
    """Prompts of a hundred lengths leave what one of them leaves."""
    dispatch._plans.clear()
    (q, k, v, *rest), _, _ = problem(target, "float32", (110, 2, 2, 64, 200))
    run = lambda n: attention_with_cache(q[:, :n], k[:, :n], v[:, :n], *rest)
    rest[-1][:] = 0
    run(110)
    before = memory(target)
    for length in range(9, 110):
        run(length)
    assert memory(target) <= before and len(dispatch._plans) > 100


@each_library()
def test_empty(target):
    (q, k, v, *caches, positions), _, _ = problem(target, "float32", SHAPES[0])
    none = attention_with_cache(q[:0], k[:0], v[:0], *(x[:0] for x in caches), positions[:0])
    assert tuple(none.shape) == (0, *q.shape[1:])


def named(target, dtype="float32", shape=SHAPES[0]):
    """The arguments of a right call."""
    arrays, _, _ = problem(target, dtype, shape)
    return dict(zip(("q", "k", "v", "k_cache", "v_cache", "positions"), arrays))


@each_library()
def test_bad_input(target):
    good = named(target)
    q, k, v, v_cache, positions = (good[x] for x in ("q", "k", "v", "v_cache", "positions"))
    for error, match, changed in (
        (TypeError, "q must be a NumPy, CuPy or torch array", {"q": [1]}),
        (ValueError, r"q must have shape \(batch, seqlen, heads_q, head_dim\)", {"q": q[0]}),
        (ValueError, "the heads of q must be a multiple", {"q": q[:, :, :2]}),
        (
            ValueError,
            r"k_cache must have shape \(4, max_length, 1, 64\)",
            {"k": k[:, :, :1], "v": v[:, :, :1]},
        ),
        (ValueError, r"v must have shape \(4, 1, 3, 64\)", {"v": v[:, :, :1]}),
        (ValueError, r"v_cache must have shape \(4, 200, 3, 64\)", {"v_cache": v_cache[:, :5]}),
        (TypeError, "positions must be int32", {"positions": q}),
        (ValueError, r"positions must have shape \(4,\)", {"positions": positions[:1]}),
        (ValueError, "scale must be", {"scale": float("nan")}),
        (TypeError, "k and v must both be arrays, or both None, got None as k", {"k": None}),
    ):
        with pytest.raises(error, match=f"^attention_with_cache: {match}"):
            attention_with_cache(**(good | changed))


@each_library()
def test_wrong_calls(target):
    for dtype in ("float32", "float16"):
        good = named(target, dtype)
        kinds = {name: array(x) for name, x in good.items()}
        kinds["positions"] = array(good["positions"], dtypes=("int64", "float32"))
        kinds["scale"] = (*NUMBER, *NOT_IN_FLOAT32, 0, -1.0)
        check_refused(attention_with_cache, {**good, "scale": 0.5}, kinds, least=90)


@each_library()
def test_places_that_do_not_exist(target):
    """On the CPU, where they are known: under the name of the function that was called."""
    if target.gpu:
        pytest.skip("values that lie on a GPU are not read")
    for tokens, places in ((1, [0, 1, 2, 200]), (3, [0, 1, 2, 198]), (2, [0, -1, 0, 0])):
        good = named(target, shape=(tokens, 3, 1, 64, 200))
        before = to_numpy64(good["k_cache"]).copy()
        with pytest.raises(ValueError, match="^attention_with_cache: positions must be from 0 to"):
            attention_with_cache(**good | {"positions": integers(target, places)})
        numpy.testing.assert_array_equal(to_numpy64(good["k_cache"]), before)


@each_library()
def test_shared_memory(target):
    """Refused where elements are shared; caches may lie between each other."""
    for dtype in ("float32", "float16"):
        good = named(target, dtype)
        cache, q = good["k_cache"], good["q"]
        new = cache[:, 7:8]
        for changed in (
            {"v_cache": cache},
            {"k": new},
            {"v": new},
            {"q": new},
            {"k": good["v_cache"][:, :1]},
        ):
            with pytest.raises(ValueError, match="^attention_with_cache: ._cache is written, so"):
                attention_with_cache(**good | changed)
        whole = stored(target, numpy.zeros((4, 2, 200, 3, 64)), dtype)
        flat = whole.reshape(-1)
        shifted = flat[64 : 64 + flat.shape[0] // 2].reshape(cache.shape)
        overlapping = {"k_cache": flat[: flat.shape[0] // 2].reshape(cache.shape)}
        with pytest.raises(ValueError, match="k_cache is written.*memory with v_cache"):
            attention_with_cache(**good | overlapping | {"v_cache": shifted})
        packed = stored(target, numpy.zeros((4, 200, 6, 64)), dtype)
        between = {"k_cache": packed[:, :, :3], "v_cache": packed[:, :, 3:]}
        attention_with_cache(**good | between)
        qkv = stored(target, normal((4, 1, 9, 64), 1), dtype)  # what is only read may overlap
        attention_with_cache(**good | {"q": q[:, :, :3], "k": qkv[:, :, :3], "v": qkv[:, :, 2:5]})


@each_library(library="torch")
def test_a_cache_that_is_its_own_copy(target):
    good = named(target)
    expanded = good["k_cache"][:1].expand(4, -1, -1, -1)
    with pytest.raises(ValueError, match="no two of its elements may share memory"):
        attention_with_cache(**good | {"k_cache": expanded})


@each_library(library="torch")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_torch_hears_of_it(target, dtype):
    """Gradients, transforms and tangents are refused, and autograd knows that caches changed."""
    import torch
    from torch.autograd import forward_ad

    good = named(target, dtype)
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        needing = {name: good[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match="^attention_with_cache: has no backward"):
            attention_with_cache(**good | needing)
        with torch.no_grad():
            out = attention_with_cache(**good | needing)
        assert not out.requires_grad and out.grad_fn is None
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            dual = forward_ad.make_dual(good[name], torch.ones_like(good[name]))
            attention_with_cache(**good | {name: dual})
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.vmap(lambda q: attention_with_cache(**good | {"q": q}))(good["q"][None])
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^attention_with_cache: scale has no gradient"):
        attention_with_cache(**good, scale=scale)
    for name in ("k_cache", "v_cache"):
        factor = torch.ones_like(good[name]).requires_grad_()
        saved = (factor * good[name]).sum()
        attention_with_cache(**good)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
    with torch.inference_mode():
        attention_with_cache(**{name: x.clone() for name, x in good.items()})


@each_library(library="torch")
def test_scale_is_read_at_each_call(target):
    """A tensor of one number that changes is no key of a plan."""
    import torch

    good, scale = named(target), torch.tensor(0.5)
    first = attention_with_cache(**good, scale=scale)
    scale.fill_(0.1)
    second = attention_with_cache(**good, scale=scale)
    assert torch.equal(second, attention_with_cache(**good, scale=float(scale)))
    assert not torch.equal(first, second)


@each_library(library="torch")
def test_under_torch_compile(target):
    import torch

    good = named(target)
    expected = attention_with_cache(**good)

    @torch.compile(backend="eager")
    def compiled(**arrays):
        return attention_with_cache(**arrays) + 0

    assert torch.equal(compiled(**good), expected)


@each_library(library="torch")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_autocast_changes_nothing(target, dtype):
    """The cache has a dtype, so q, k and v have that: there is nothing to cast to."""
    torch = pytest.importorskip("torch")
    results = []
    for enabled in (False, True):
        arrays, _, _ = problem(target, dtype, (2, 1, 2, 64, 50))
        with torch.autocast(target.device, torch.bfloat16, enabled=enabled):
            results.append((attention_with_cache(*arrays), *arrays[3:5]))
    for plain, cast in zip(*results):
        assert cast.dtype == plain.dtype and torch.equal(cast.nan_to_num(), plain.nan_to_num())
