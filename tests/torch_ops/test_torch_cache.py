"""The operator of attention with a cache: full graphs, fakes, and what it changes."""

import numpy
import pytest
from matrix import each_library

from cupyflash import attention_with_cache, cache_append, flash_attn_with_kvcache
from cupyflash.testing.cached import CachedCase, CachedProblem

torch = pytest.importorskip("torch")

CASES = (
    {"tokens": 1, "page": 0},
    {"tokens": 3, "option": "sliding", "group": 3},
    {"tokens": 4, "packed": True, "option": "sinks", "strided": True},
    {"tokens": 2, "option": "in the cache", "head_dim": 72},
)


def arguments_of(target, case):
    return CachedProblem(CachedCase(target.dtypes[0], **case), target.array).arguments


@each_library(library="torch")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_full_graph(target, case, backend):
    """Results, caches and ``out`` are those of the call itself; sizes may be symbols."""

    def step(q, arguments, out, lse):
        found = attention_with_cache(q * 1, **arguments, out=out, return_lse=lse)
        return found if lse else (found + 0,)

    torch._dynamo.reset()  # each case would be one more version of the function
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for with_out, lse in ((False, False), (True, True)):
        results = []
        for function in (step, compiled):
            arguments = arguments_of(target, case)
            q = arguments.pop("q")
            out = torch.full_like(q, torch.nan) if with_out else None
            found = function(q, arguments, out, lse)
            found = (*found, arguments["k_cache"], arguments["v_cache"])
            results.append(found if out is None else (*found, out))
        for right, x in zip(*results, strict=True):
            assert torch.equal(x.nan_to_num(3.0), right.nan_to_num(3.0))


@each_library(library="torch")
def test_flash_attn_in_a_full_graph(target):
    arguments = arguments_of(target, {"tokens": 2, "page": 8})
    names = {"page_table": "block_table", "positions": "cache_seqlens"}
    arguments = {names.get(name, name): x for name, x in arguments.items()}
    copies = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    right = flash_attn_with_kvcache(**arguments, causal=True)
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**arguments | copies, causal=True), right)
    assert torch.equal(copies["k_cache"].nan_to_num(), arguments["k_cache"].nan_to_num())


@each_library(library="torch")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fakes(target, case):
    """They have the shapes, strides and dtypes of the results."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = arguments_of(target, case)
    right = attention_with_cache(**arguments, return_lse=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in arguments.items()
        }
        found = attention_with_cache(**fakes, return_lse=True)
    for fake, x in zip(found, right):
        assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, x.stride(), x.dtype)


@each_library(library="torch")
def test_gradients_are_refused_in_graphs(target):
    arguments = arguments_of(target, CASES[0])
    arguments["q"] = arguments["q"].requires_grad_()
    compiled = torch.compile(attention_with_cache, backend="eager")
    with pytest.raises(NotImplementedError, match="^attention_with_cache: has no backward"):
        compiled(**arguments)
    with torch.no_grad():
        compiled(**arguments)


@each_library(library="torch")
def test_a_dispatch_mode_sees_the_call(target):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            seen.append(str(function))
            return function(*arguments, **(keywords or {}))

    seen = []
    right = attention_with_cache(**arguments_of(target, CASES[1]))
    arguments = arguments_of(target, CASES[1])
    with Listening():
        found = attention_with_cache(**arguments)
    assert torch.equal(found, right)
    assert seen[0] == "cupyflash.attention_with_cache.default"


def rows_of(target):
    """Rows, caches of 8 bits whose scales they get, and slots, one of which is none."""
    values = {name: numpy.full((3, 2, 16), i + 1.5) for i, name in enumerate("kv")}
    arguments = {name: target.array(x, "float32") for name, x in values.items()}
    caches = {name: torch.zeros(5, 4, 2, 16, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    scales = {name: torch.zeros(5, 4, 2) for name in ("k_scale", "v_scale")}
    places = {"positions": None, "slots": torch.tensor([7, -1, 18])}
    moved = {name: x.to(target.device) for name, x in (caches | scales).items()}
    return arguments | moved | places | {"slots": places["slots"].to(target.device)}


@each_library(library="torch")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_append_in_a_full_graph(target, backend):
    """Rows, scales and what is read of them afterwards."""

    def step(arguments):
        cache_append(**{**arguments, "k": arguments["k"] * 2})
        return arguments["k_cache"].float() * arguments["k_scale"][..., None]

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    expected, found = rows_of(target), rows_of(target)
    assert torch.equal(compiled(found), step(expected))
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        assert torch.equal(found[name], expected[name]) and found[name].count_nonzero() > 0
    needing = rows_of(target)
    needing["k"] = needing["k"].requires_grad_()
    with pytest.raises(NotImplementedError, match="^cache_append: has no backward"):
        torch.compile(cache_append, backend="eager")(**needing)
