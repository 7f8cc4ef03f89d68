"""Transformer blocks for one new token: the whole stack in one launch, on every library."""

import copy
import dataclasses
import gc
import math
import pickle
import weakref

import numpy
import pytest
from arrays import broadcast, integers, normal, stored
from block_stacks import CASE, Case, lengths_of, make, weights
from devices import memory
from matrix import covering, each_case, each_library, libraries
from targets import CPU_TARGETS
from wrong_calls import FLAG, INTEGER, NOT_IN_FLOAT32, NUMBER, array, check_refused

import cupyflash
from cupyflash import BlockStack, BlockWeights, transformer_block
from cupyflash.ops.block import checks
from cupyflash.ops.block import plan as stack_plan
from cupyflash.ops.block import stack as stacks
from cupyflash.runtime.overlap import Written
from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.testing import expected_stack, to_numpy64

ENDS = ("final_weight", "final_bias", "head_weight", "token_embedding", "position_embedding")


def cases(target):
    """On a GPU also sizes that take several segments, groups of rows and splits."""
    values = {
        "dtype": list(target.dtypes),
        "batch": list(range(1, 9)) if target.gpu else [1, 3, 8],
        "heads": [1, 3, 12, 15] if target.gpu else [1, 3],
        "head_dim": [64, 8, 40, 128],
        "hidden": [32, 776, 3072, 4600] if target.gpu else [32, 136],
        "layers": [1, 2, 3],
        "max_length": [1, 65, 513, 1100] if target.gpu else [1, 65],
        "lengths": ["zero", "last", "mixed"],
        "storage": ["contiguous", "padded", "transposed"],
    }
    return covering(Case, values)


@each_case(cases)
def test_stack(target, case):
    p = make(target, case)
    exact = expected_stack(p.blocks, p.x, p.k_cache, p.v_cache, p.lengths)
    out = p.stack()(p.x, p.k_cache, p.v_cache, p.lengths)
    exact.check(out=out, k_cache=p.k_cache, v_cache=p.v_cache)


@each_case(cases)
def test_logits(target, case):
    p = make(target, case, positions=case.max_length)
    arrays = (p.k_cache, p.v_cache, p.lengths)
    exact = expected_stack(p.blocks, None, *arrays, tokens=p.tokens, ends=p.ends)
    logits = p.stack(**p.ends).next_logits(p.tokens, p.k_cache, p.v_cache, p.lengths)
    exact.check(logits=logits, k_cache=p.k_cache, v_cache=p.v_cache)


@each_library()
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_block(target, dtype):
    """One block, with a row stride of x and a cache of one layer."""
    case = dataclasses.replace(CASE, dtype=dtype)
    p = make(target, case)
    x = stored(target, normal(p.x.shape, 7), dtype, "unaligned")
    for layer in range(2):  # two blocks of one signature
        caches = p.k_cache[layer], p.v_cache[layer]
        exact = expected_stack(
            p.blocks[layer : layer + 1], x, *(y[None] for y in caches), p.lengths
        )
        out = transformer_block(x, p.blocks[layer], *caches, p.lengths, heads=case.heads)
        exact.check(out=out, k_cache=caches[0][None], v_cache=caches[1][None])


@each_library()
def test_stack_is_its_blocks(target):
    """To the rounding of x between them."""
    case = dataclasses.replace(CASE, dtype="float32")
    p, q = make(target, case), make(target, case)
    out, x = p.stack()(p.x, p.k_cache, p.v_cache, p.lengths), q.x
    for block, keys, values in zip(q.blocks, q.k_cache, q.v_cache):
        x = transformer_block(x, block, keys, values, q.lengths, heads=case.heads)
    # Both are compared with float64 in other tests: here that the stack is these blocks.
    numpy.testing.assert_allclose(to_numpy64(out), to_numpy64(x), rtol=0, atol=2e-5)
    for mine, theirs in ((p.k_cache, q.k_cache), (p.v_cache, q.v_cache)):
        a, b = to_numpy64(mine), to_numpy64(theirs)
        numpy.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@each_library()
@pytest.mark.parametrize("advance", [False, True])
def test_steps_are_greedy(target, advance):
    """Tokens and lengths stay on the device from step to step."""
    case = dataclasses.replace(CASE, dtype="float32", max_length=12, lengths="mixed")
    p, q = make(target, case), make(target, case)
    p.lengths[:], q.lengths[:] = integers(target, [0, 3, 5]), integers(target, [0, 3, 5])
    stack, other = p.stack(**p.ends), q.stack(**q.ends)
    for _ in range(5):
        logits = other.next_logits(q.tokens, q.k_cache, q.v_cache, q.lengths)
        q.tokens[:] = integers(target, to_numpy64(logits).argmax(-1))
        found = stack.step(p.tokens, p.k_cache, p.v_cache, p.lengths, advance=advance)
        assert found is p.tokens
        assert (to_numpy64(p.tokens) == to_numpy64(q.tokens)).all()
        if advance:
            q.lengths[:] = q.lengths + 1
        assert (to_numpy64(p.lengths) == to_numpy64(q.lengths)).all()


@each_library()
def test_ties_go_to_the_first(target):
    """Of equal logits, also 0 and -0, the first."""
    p = make(target, dataclasses.replace(CASE, dtype="float32"))
    rows = to_numpy64(p.ends["head_weight"])
    rows[:], rows[50] = 0, -0.0
    ends = p.ends | {"head_weight": stored(target, rows, "float32")}
    out = integers(target, [9, 9, 9])
    arrays = (p.tokens, p.k_cache, p.v_cache, p.lengths)
    p.stack(**ends).step(*arrays, out=out, advance=False)
    assert to_numpy64(out).tolist() == [0, 0, 0]


@each_library()
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_token_where_logits_are_not_finite(target, value):
    p = make(target, dataclasses.replace(CASE, dtype="float32"))
    rows = to_numpy64(p.ends["head_weight"])
    rows[17] = value
    ends = p.ends | {"head_weight": stored(target, rows, "float32")}
    out = integers(target, [9, 9, 9])
    p.stack(**ends).step(p.tokens, p.k_cache, p.v_cache, p.lengths, out=out, advance=False)
    assert to_numpy64(out).tolist() == [-1, -1, -1]


@each_library()
@pytest.mark.parametrize("full", [-1, 200, 10**9])
def test_no_room(target, full):
    """The sequence is NaN and leaves the caches alone; the others do not notice."""
    p, q = make(target, CASE), make(target, CASE)
    expected = p.stack()(p.x, p.k_cache, p.v_cache, p.lengths)
    q.lengths[1] = full
    before = to_numpy64(q.k_cache)[:, 1].copy()
    out = to_numpy64(q.stack()(q.x, q.k_cache, q.v_cache, q.lengths))
    assert numpy.isnan(out[1]).all()
    assert (out[::2] == to_numpy64(expected)[::2]).all()
    numpy.testing.assert_array_equal(to_numpy64(q.k_cache)[:, 1], before)


@each_library()
def test_no_room_at_all(target):
    """No sequence can go on: NaN, and no block waits for ever."""
    p = make(target, CASE)
    p.lengths[:] = integers(target, [-1, 200, 10**9])
    before = to_numpy64(p.k_cache).copy()
    assert numpy.isnan(to_numpy64(p.stack()(p.x, p.k_cache, p.v_cache, p.lengths))).all()
    numpy.testing.assert_array_equal(to_numpy64(p.k_cache), before)


@each_library()
def test_no_such_token(target):
    p = make(target, CASE, positions=150)
    p.tokens[0] = 211
    p.lengths[:] = integers(target, [4, 150, 7])  # a position without embedding
    stack, arrays = p.stack(**p.ends), (p.k_cache, p.v_cache, p.lengths)
    isnan = numpy.isnan(to_numpy64(stack.next_logits(p.tokens, *arrays)))
    assert isnan[:2].all() and not isnan[2].any()
    stack.step(p.tokens, *arrays)
    assert to_numpy64(p.tokens)[:2].tolist() == [-1, -1] and to_numpy64(p.tokens)[2] >= 0
    assert to_numpy64(p.lengths).tolist() == [4, 150, 8]
    stack.step(p.tokens, *arrays)
    assert to_numpy64(p.lengths).tolist() == [4, 150, 9]


@each_library()
def test_lengths_change_from_call_to_call(target):
    """Shares of the keys come and go, and an odd number of layers leaves other tags each time."""
    case = dataclasses.replace(CASE, batch=1, heads=2, hidden=64, max_length=600)
    p, q = make(target, case), make(target, case)
    stack = p.stack()
    for length in (3, 599, 150, 0, 400):
        lengths = integers(target, [length])
        exact = expected_stack(p.blocks, p.x, q.k_cache, q.v_cache, lengths)
        p.k_cache[:], p.v_cache[:] = q.k_cache, q.v_cache
        out = stack(p.x, p.k_cache, p.v_cache, lengths)
        exact.check(out=out, k_cache=p.k_cache, v_cache=p.v_cache)


@each_library()
def test_nan_in_the_cache_beyond_the_length(target):
    p = make(target, CASE)
    expected = to_numpy64(p.stack()(p.x, p.k_cache, p.v_cache, p.lengths))
    for b, length in enumerate(lengths_of(CASE)):
        p.k_cache[:, b, length:], p.v_cache[:, b, length:] = numpy.nan, numpy.nan
    again = to_numpy64(p.stack()(p.x, p.k_cache, p.v_cache, p.lengths))
    numpy.testing.assert_array_equal(again, expected)


@each_library()
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_stack(target, way):
    """After a call, which has made plans; a copy has weights of its own, shared as they were."""
    p = make(target, CASE)
    stack = p.stack(**p.ends | {"head_weight": p.ends["token_embedding"]})
    call = lambda stack: stack.next_logits(p.tokens, p.k_cache, p.v_cache, p.lengths)
    expected = to_numpy64(call(stack))
    again = copy.deepcopy(stack) if way == "deepcopy" else pickle.loads(pickle.dumps(stack))
    ends = again._stack.ends
    assert ends["head_weight"] is ends["token_embedding"] is not p.ends["token_embedding"]
    p.blocks[0].up_weight[...] = p.ends["token_embedding"][...] = 0
    assert (to_numpy64(call(again)) == expected).all()


@each_library()
def test_empty(target):
    p = make(target, CASE)
    none = (p.k_cache[:, :0], p.v_cache[:, :0], p.lengths[:0])
    stack = p.stack(**p.ends)
    assert tuple(stack(p.x[:0], *none).shape) == (0, 256)
    assert tuple(stack.next_logits(p.tokens[:0], *none).shape) == (0, 211)
    assert tuple(stack.step(p.tokens[:0], *none).shape) == (0,)


# Bad input -----------------------------------------------------------------------------------


@each_library()
def test_bad_input(target):
    p = make(target, CASE)
    block, keys, values = p.blocks[0], p.k_cache[0], p.v_cache[0]
    good = {"x": p.x, "weights": block, "k_cache": keys, "v_cache": values}
    good |= {"lengths": p.lengths, "heads": 4}
    array = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)

    def bad(error, match, **changes):
        with pytest.raises(error, match=f"^transformer_block: .*{match}"):
            transformer_block(**(good | changes))

    bad(ValueError, r"qkv_weight.*\(768, 256\).*\(256, 768\)",
        weights=block._replace(qkv_weight=array((256, 768))))  # fmt: skip
    bad(TypeError, "up_weight.*float16.*float32",
        weights=block._replace(up_weight=array((1024, 256), "float32")))  # fmt: skip
    bad(ValueError, "down_weight.*contiguous",
        weights=block._replace(down_weight=array((256, 2048))[:, ::2]))  # fmt: skip
    bad(TypeError, "proj_bias.*list", weights=block._replace(proj_bias=[0.0] * 256))
    bad(TypeError, "BlockWeights.*tuple", weights=tuple(block))
    bad(ValueError, "heads.*divides.*256.*7", heads=7)
    bad(TypeError, "heads", heads=True)
    bad(ValueError, "head_dim.*multiple of 8 up to 128.*256", heads=1)
    bad(ValueError, r"x must have shape.*\(3, 255\)", x=array((3, 255)))
    bad(TypeError, "x must be float16 like the weights, got float32", x=array((3, 256), "float32"))
    bad(ValueError, "x.*contiguous", x=array((3, 512))[:, ::2])
    bad(ValueError, "batch.*at most 8, got 9", x=array((9, 256)))
    bad(ValueError, r"k_cache.*\(3, max_length, 4, 64\).*\(2, 200, 4, 64\)", k_cache=keys[:2])
    bad(ValueError, r"v_cache must have shape \(3, 200, 4, 64\)", v_cache=array((3, 100, 4, 64)))
    bad(ValueError, "max_length.* 1 to", k_cache=keys[:, :0], v_cache=values[:, :0])
    many = [broadcast(x[:, :1], (3, 2**31, 4, 64)) for x in (keys, values)]
    bad(ValueError, "max_length.* to 2147483647, got", k_cache=many[0], v_cache=many[1])
    bad(ValueError, "last dimension of k_cache", k_cache=array((3, 200, 4, 128))[..., ::2])
    bad(ValueError, "strides of v_cache", v_cache=array((3, 200, 4, 65))[..., :64])
    bad(TypeError, "lengths must be int32, got int64", lengths=target.array(numpy.arange(3)))
    bad(ValueError, r"lengths.*\(3,\).*\(4,\)", lengths=integers(target, [1, 2, 3, 4]))
    bad(ValueError, "lengths.*contiguous", lengths=integers(target, range(6))[::2])
    for eps in (-1.0, float("nan")):
        bad(ValueError, "eps", eps=eps)
    bad(TypeError, "eps", eps=None)


@each_library()
def test_bad_stack(target):
    p = make(target, CASE)
    with pytest.raises(ValueError, match="^BlockStack: .*at least one block"):
        BlockStack([], heads=4)
    with pytest.raises(ValueError, match="^BlockStack: .*1 to 64 blocks, got 65"):
        BlockStack(p.blocks[:1] * 65, heads=4)
    with pytest.raises(ValueError, match="^BlockStack: .*got no final_bias"):
        p.stack(**p.ends | {"final_bias": None})
    with pytest.raises(ValueError, match=r"^BlockStack: blocks\[1\].up_bias.*\(1024,\)"):
        short = p.blocks[1]._replace(up_bias=p.blocks[1].up_bias[:-8])
        BlockStack([p.blocks[0], short], heads=4)
    with pytest.raises(ValueError, match="^next_logits: needs a stack with final_weight"):
        p.stack().next_logits(p.tokens, p.k_cache, p.v_cache, p.lengths)
    wide = dataclasses.replace(CASE, heads=31, hidden=8, layers=1, max_length=1)
    with pytest.raises(NotImplementedError, match="^BlockStack: width.*1920, got 1984"):
        make(target, wide).stack()


def test_rows_of_the_tables(monkeypatch):
    """The kernel counts them in 32 bits; a bound of a thousand, as such tables take 32 GiB."""
    monkeypatch.setattr(checks, "MAX_ROWS", 1000)
    problem = make(CPU_TARGETS[0], CASE)
    problem.stack(**problem.ends)
    # Both tables of tokens have as many rows.
    for names in (("head_weight", "token_embedding"), ("position_embedding",)):
        long = numpy.resize(problem.ends[names[0]], (1001, CASE.heads * CASE.head_dim))
        match = f"^BlockStack: rows of {names[0]} must be from 0 to 1000, got 1001"
        with pytest.raises(ValueError, match=match):
            problem.stack(**problem.ends | dict.fromkeys(names, long))


@each_library(library="torch")
def test_no_backward(target):
    p = make(target, CASE)
    p.blocks[2].up_weight.requires_grad_()
    import torch

    arrays = (p.x, p.k_cache, p.v_cache, p.lengths)
    with pytest.raises(NotImplementedError, match="^BlockStack: has no backward"):
        p.stack()(*arrays)
    with torch.no_grad():
        p.stack()(*arrays)


# Wrong calls, of ``CASE``: a few dozen values of each argument.
PLACES = ("int64", "float32")


def call_of(p, layer=None):
    """The arrays of a right call."""
    caches = [x if layer is None else x[layer] for x in (p.k_cache, p.v_cache)]
    return {"x": p.x, "k_cache": caches[0], "v_cache": caches[1], "lengths": p.lengths}


def call_kinds(good):
    """Values that they cannot have; also each cache for the other, and x within a cache."""
    kinds = {name: array(good[name]) for name in ("x", "k_cache", "v_cache")}
    kinds["lengths"] = array(good["lengths"], dtypes=PLACES)
    kinds["k_cache"] += (good["v_cache"],)
    kinds["v_cache"] += (good["k_cache"],)
    kinds["x"] += (good["k_cache"].reshape(-1, good["x"].shape[1])[5:8],)
    return kinds


@each_library()
def test_wrong_calls_of_a_block(target):
    p = make(target, dataclasses.replace(CASE, storage="contiguous"))
    good = {**call_of(p, 0), "weights": p.blocks[0], "heads": 4, "eps": 1e-5}
    block = p.blocks[0]
    weights = [None, 3, "text", tuple(block), [block], BlockWeights, block._asdict()]
    for name in ("ln1_weight", "qkv_weight", "down_bias"):
        weights += [block._replace(**{name: x}) for x in array(getattr(block, name))]
    kinds = call_kinds(good) | {"weights": tuple(weights)}
    kinds |= {"heads": (*INTEGER, None, 0, -1, 3, 1, 4.0), "eps": (*NUMBER, None, -1.0)}
    check_refused(transformer_block, good, kinds, least=130)


@each_library()
def test_wrong_stacks(target):
    p = make(target, dataclasses.replace(CASE, layers=2))
    first, second = p.blocks
    blocks = [None, 3, "text", [], (), [None], [first, None], [first, tuple(second)], [first] * 65]
    for name in ("ln1_weight", "up_bias"):
        blocks += [[first, second._replace(**{name: x})] for x in array(getattr(second, name))]
    kinds = {name: array(x) for name, x in p.ends.items()}  # with None, one of five is missing
    kinds |= {"blocks": tuple(blocks), "heads": (*INTEGER, None, 0, -1, 3, 1)}
    kinds["eps"] = (*NUMBER, *NOT_IN_FLOAT32, None, -1.0)
    check_refused(BlockStack, {"blocks": p.blocks, "heads": 4, "eps": 1e-5, **p.ends}, kinds, 110)


def under_name(function, name):
    """A bound method as a function of the name in its errors."""

    def call(**arguments):
        return function(**arguments)

    call.__name__ = name
    return call


@each_library()
def test_wrong_calls_of_a_stack(target):
    p = make(target, dataclasses.replace(CASE, storage="contiguous"))
    stack, good = p.stack(**p.ends), call_of(p)
    kinds = call_kinds(good)
    check_refused(under_name(stack, "BlockStack"), good, kinds, least=55)
    good, kinds = {"tokens": p.tokens, **good}, {**kinds, "tokens": array(p.tokens, dtypes=PLACES)}
    del good["x"], kinds["x"]
    check_refused(under_name(stack.next_logits, "next_logits"), good, kinds, least=50)
    out, wrong = integers(target, [0, 0, 0]), array(p.tokens, optional=True, dtypes=PLACES)
    kinds |= {"out": (*wrong, p.lengths), "advance": (*FLAG, None)}
    kinds["tokens"] += (p.lengths,)
    good |= {"out": out, "advance": True}
    check_refused(under_name(stack.step, "step"), good, kinds, least=70)
    overlapping = integers(target, range(4))
    with pytest.raises(ValueError, match="^step: out is written.*memory with tokens"):
        stack.step(**good | {"tokens": overlapping[:3], "out": overlapping[1:]})


@each_library()
def test_unaligned_memory_is_refused_everywhere(target):
    """The CPU takes no more than the kernel does."""
    p = make(target, dataclasses.replace(CASE, storage="contiguous"))
    good = call_of(p, 0)
    for name in ("k_cache", "v_cache"):
        size = math.prod(good[name].shape)
        shifted = stored(target, numpy.zeros(size + 9), CASE.dtype)
        shifted = shifted[1 : 1 + size].reshape(good[name].shape)
        with pytest.raises(ValueError, match=f"{name} must begin at a multiple of 16 bytes"):
            transformer_block(**good | {name: shifted}, weights=p.blocks[0], heads=4)
    bias = stored(target, numpy.zeros(257), CASE.dtype)[1:]
    with pytest.raises(ValueError, match="^BlockStack: proj_bias must begin at a multiple"):
        BlockStack([p.blocks[0]._replace(proj_bias=bias)], heads=4)


@each_library(library="torch")
def test_autograd_hears_of_writes(target):
    """What was saved for a backward and written since is an error there."""
    import torch

    p = make(target, CASE)
    stack = p.stack(**p.ends)
    caches = p.k_cache, p.v_cache
    factor = torch.ones_like(p.k_cache).requires_grad_()
    for write in (
        lambda: stack(p.x, *caches, p.lengths),
        lambda: stack.next_logits(p.tokens, *caches, p.lengths),
        lambda: transformer_block(
            p.x, p.blocks[0], *(x[0] for x in caches), p.lengths, heads=CASE.heads
        ),
    ):
        for cache in caches:
            saved = (factor * cache).sum()
            write()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.backward()
    before = p.tokens._version, p.lengths._version, p.k_cache._version
    stack.step(p.tokens, *caches, p.lengths)
    after = p.tokens._version, p.lengths._version, p.k_cache._version
    assert all(x < y for x, y in zip(before, after))
    for needing in ("x", "k_cache"):
        good = call_of(p)
        with pytest.raises(NotImplementedError, match="^BlockStack: has no backward"):
            stack(**good | {needing: good[needing].clone().requires_grad_()})


@each_library(library="torch")
def test_under_torch_compile(target):
    import torch

    p = make(target, CASE)
    good, stack = call_of(p, 0), p.stack()
    expected = transformer_block(**good, weights=p.blocks[0], heads=CASE.heads)
    whole = stack(**call_of(p))

    @torch.compile(backend="eager")
    def compiled(arrays, weights):
        return transformer_block(**arrays, weights=weights, heads=4) + 0

    exact = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(compiled(good, p.blocks[0]), expected, **exact)
    compiled_stack = torch.compile(lambda x: stack(**x), backend="eager")
    torch.testing.assert_close(compiled_stack(call_of(p)), whole, **exact)


@each_library()
def test_dropped_blocks_are_dropped(target):
    """Nothing keeps the weights, nor memory that belongs to them."""
    case = dataclasses.replace(CASE, layers=1)
    p = make(target, case)
    good = call_of(p, 0)
    held = lambda: memory(target)

    def run(seed):
        block = weights(target, case, seed)
        transformer_block(**good, weights=block, heads=case.heads)
        stack = BlockStack([block], heads=case.heads)
        stack(**call_of(p))
        return weakref.ref(block.qkv_weight)

    run(0)
    before, kept = held(), len(stacks._stacks)
    dropped = [run(seed) for seed in range(1, 101 if target.gpu else 11)]  # NumPy is slow
    gc.collect()
    assert not any(x() is not None for x in dropped)
    assert len(stacks._stacks) <= kept and held() <= before


def test_weights_are_held_weakly_wherever_kernels_run(monkeypatch):
    """The way of a GPU, with a plan that launches nothing; also views are one entry."""
    torch = pytest.importorskip("torch")
    from cupyflash.runtime.torch_library import TorchLibrary

    (target,) = libraries("torch", "cpu")
    case = dataclasses.replace(CASE, layers=1)
    p, plans = make(target, case), []

    class NoPlan:
        def __init__(self, function, library, shape, views, written):
            plans.append(self)
            self.written = Written(function, views, written)

        def __call__(self, like, pointers):
            assert len(pointers) == 14 and pointers[0] == p.x.data_ptr()

    monkeypatch.setattr(TorchLibrary, "on_cpu", lambda self, x: False)
    monkeypatch.setattr(stacks, "require_gpu", lambda function, shape: None)
    monkeypatch.setattr(stacks, "pointer_table", lambda *_: torch.zeros(1))
    monkeypatch.setattr(stacks, "StackPlan", NoPlan)
    monkeypatch.setattr(stacks, "_stacks", {})
    good, versions = call_of(p, 0), p.k_cache._version
    for grad in (False, True):
        block = weights(target, case, 5)
        if grad:
            block = BlockWeights(*map(torch.nn.Parameter, block))
        with torch.no_grad():
            for given in (block, BlockWeights(*(x[:] for x in block)), block):
                transformer_block(**good, weights=given, heads=case.heads)
        assert len(stacks._stacks) == 1 and len(plans) == 1 + grad
        if grad:
            with pytest.raises(NotImplementedError, match="^transformer_block: has no backward"):
                transformer_block(**good, weights=block, heads=case.heads)
        kept = weakref.ref(next(iter(stacks._stacks.values())))
        del block, given
        assert not stacks._stacks and kept() is None
    assert p.k_cache._version == versions + 6


@each_library()
def test_a_block_is_kept_for_views_of_its_weights(target):
    """On a GPU: new objects of the same memory are one entry, until that memory is gone."""
    if not target.gpu:
        pytest.skip("the CPU keeps nothing")
    p = make(target, CASE)
    block, good = weights(target, CASE, 77), call_of(p, 0)
    kept = len(stacks._stacks)
    for _ in range(3):
        views = BlockWeights(*(x[:] for x in block))
        transformer_block(**good, weights=views, heads=CASE.heads)
        del views
        assert len(stacks._stacks) == kept + 1
    del block
    gc.collect()
    assert len(stacks._stacks) == kept


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("columns", [8, 3072, 4096, 4320, 5120, 6400, 10007 * 8])
def test_segments(columns, item):
    number, segment = stack_plan.segments_of(columns, item)
    assert segment % 8 == 0 and segment * item <= 8064
    assert (number - 1) * segment < columns <= number * segment


def test_splits():
    """More of them where few heads would leave blocks idle."""
    assert stack_plan.num_splits(1, 12, 132) > 4
    assert stack_plan.num_splits(2, 12, 132) == 4
    assert stack_plan.num_splits(8, 12, 132) == 1


# On a GPU ------------------------------------------------------------------------------------


@each_library(device="cuda")
def test_runs_are_equal(target):
    """Whatever order the blocks arrive in: also a race would show."""
    case = dataclasses.replace(CASE, heads=12, hidden=3072, layers=12, max_length=600)
    p = make(target, case)
    stack, arrays = p.stack(**p.ends), (p.k_cache, p.v_cache, p.lengths)
    first = to_numpy64(stack.next_logits(p.tokens, *arrays))
    for _ in range(200):
        again = stack.next_logits(p.tokens, *arrays)
    numpy.testing.assert_array_equal(to_numpy64(again), first)


@each_library(library="torch", device="cuda")
def test_graph_and_streams(target):
    """A captured step, replayed beside launches on another stream, gives what plain steps give."""
    import torch

    case = dataclasses.replace(CASE, heads=12, hidden=3072, layers=6, lengths="zero")
    p, q, other = (make(target, case) for _ in range(3))
    stack, plain = p.stack(**p.ends), q.stack(**q.ends)
    warm = (p.k_cache.clone(), p.v_cache.clone(), p.lengths.clone())
    stack.step(p.tokens.clone(), *warm)
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collected(), torch.cuda.graph(graph):
        stack.step(p.tokens, p.k_cache, p.v_cache, p.lengths)
    torch.cuda.synchronize()
    side, beside = torch.cuda.Stream(), []
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(side):
            found = stack(other.x, other.k_cache, other.v_cache, other.lengths)
            beside.append(found)
    torch.cuda.synchronize()
    for _ in range(20):
        plain.step(q.tokens, q.k_cache, q.v_cache, q.lengths)
    assert (p.tokens == q.tokens).all() and (p.lengths == 20).all()
    assert (p.k_cache == q.k_cache).all()
    assert all((x == beside[0]).all() for x in beside)


@each_library(device="cuda")
def test_host_time_is_one_look_up(target, monkeypatch):
    """A second call of the same signature checks nothing again."""
    p = make(target, CASE)
    stack, arrays = p.stack(), (p.x, p.k_cache, p.v_cache, p.lengths)
    first = stack(*arrays)
    monkeypatch.setattr(stacks, "StackPlan", None)
    assert (stack(*arrays) == first).all()
    assert cupyflash.BlockStack is BlockStack
