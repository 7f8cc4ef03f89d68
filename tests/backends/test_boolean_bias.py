"""Which Boolean biases are texts on Hopper, and what their kernels are. Needs no GPU."""

import dataclasses

import pytest
from problems import HOPPER, problem_of, view
from targets import few, is_hopper
from tiny_kernel import needs_nvrtc

from cupyflash import jit
from cupyflash.jit import compiler
from cupyflash.ops.attention.fitting import FEW_STACK_BYTES
from cupyflash.ops.attention.kind import Features, Kind
from cupyflash.ops.attention.masks import WORD_TILES, MaskTilesLaunch, finder_of
from cupyflash.ops.attention.score_text import Capture, Text
from cupyflash.ops.attention.sm90 import backend, boolean_bias
from cupyflash.runtime import launch
from cupyflash.runtime.array import View

pytestmark = pytest.mark.no_backend


def masked(*shape, batch=1, heads=16, queries=4096, keys=4096, head_dim=128, dtype="bool", **more):
    """A problem with a bias of this shape, or with this view of one."""
    bias = shape[0] if isinstance(shape[0], View) else view(*shape, dtype=dtype)
    return problem_of(batch, (heads, heads), queries, keys, head_dim, bias=bias, **more)


def expanded(*shape, strides):
    return View(shape, strides, "bool", 0)


WHOLE = (4096, 4096)
ROW = 4096


@pytest.mark.parametrize(
    "problem, expected",
    [
        (masked(*WHOLE), True),
        (masked(*WHOLE, causal=True, head_dim=64), True),
        (masked(2, 1, *WHOLE, batch=2), True),
        (masked(expanded(1, 16, *WHOLE, strides=(0, 0, ROW, 1))), True),
        (masked(expanded(1, 1, *WHOLE, strides=(0, 0, 1, ROW))), True),
        (masked(4096, 1), True),
        (masked(*WHOLE, head_dim=136), False),
        # Heads with masks of their own, keys that all queries see, a bias that is added.
        (masked(16, *WHOLE), False),
        (masked(1, 4096), False),
        (masked(*WHOLE, dtype="float16"), False),
        (masked(*WHOLE, dtype="float32"), False),
        # Few heads, few scores.
        (masked(*WHOLE, heads=4), False),
        (masked(*WHOLE, heads=8), True),
        (masked(1024, 1024, queries=1024, keys=1024), False),
        (masked(1024, 1024, queries=1024, keys=1024, batch=8), True),
        (masked(8, 1, 1024, 1024, queries=1024, keys=1024, batch=8), True),
        (masked(*WHOLE, alibi_slopes=view(16, dtype="float32")), False),
        # More bits than places, unless the sequences share them.
        (masked(64, 1, *WHOLE, batch=64), False),
        (masked(*WHOLE, batch=64), True),
        (masked(*WHOLE, batch=64, seqused_k=view(64, dtype="int32")), False),
        (masked(expanded(*WHOLE, strides=(1, 2**31))), False),
    ],
)  # fmt: skip
def test_rule(problem, expected):
    assert boolean_bias.is_text(problem) == expected


def test_every_kernel_is_listed():
    """What calls launch is what `configurations` has for the tests of registers."""
    listed = set(backend.configurations((9, 0)))
    for head_dim in (32, 64, 72, 128):
        problem = masked(*WHOLE, head_dim=head_dim)
        kind = boolean_bias.as_text(problem).kind((9, 0))
        mains = [backend.forward_kernels(kind)[0], backend.backward_kernels(kind)[1]]
        assert all(main.tiles and main.text is boolean_bias.TEXT for main in mains)
        assert {*mains, *map(finder_of, mains)} <= listed


@needs_nvrtc
@pytest.mark.parametrize("head_dim", (32, 64, 96, 128) if is_hopper() else (64, 128)[bool(few()) :])
def test_registers(head_dim):
    """A built-in tile is taken without a look at what the compiler makes of it: a few registers on
    the stack cost less than the next smaller one.
    """
    if 90 not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.version()} does not know sm_90")
    kind = Kind("bfloat16", head_dim, Features(text=boolean_bias.TEXT), (9, 0))
    mains = [*backend.forward_kernels(kind)[:2], backend.backward_kernels(kind)[1]]
    assert [x.split for x in mains[:2]] == [False, True]
    found = [jit.build(x, "sm_90a") for x in (*mains, finder_of(mains[0]), finder_of(mains[2]))]
    assert [x for x in found if x.stack_bytes > FEW_STACK_BYTES or x.warnings] == []


SHARED = {
    "rows": (Text("", "x(query) < key", (Capture("x", "int32", 1),)), (4096,), (1,)),
    "stride 0": (Text("", "x(batch, query) < key", (Capture("x", "int32", 2),)), (3, 4096), (0, 1)),
    "part of an index of stride 0": (
        Text("", "last = 2 - batch; x(last, query) < key", (Capture("x", "int32", 2),)),
        (3, 4096),
        (0, 1),
    ),
}
OWN = {
    "batch": (Text("", "batch < key", ()), None, None),
    "rows of each": (*SHARED["stride 0"][:2], (4096, 1)),
    "another index": (
        Text("", "x(batch, query) < key + batch", (Capture("x", "int32", 2),)),
        *SHARED["stride 0"][1:],
    ),
    "name that ends alike": (
        Text("", "x(0, 0) < xx(batch, key)", (Capture("x", "int32", 2), Capture("xx", "int32", 2))),
        (3, 4096),
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_sequences_share_tiles(name, monkeypatch):
    """The memory of one where all have the same mask, places for all tiles where there is room."""
    monkeypatch.setattr(launch.jit, "load", lambda config, device: None)
    text, shape, strides = (SHARED | OWN)[name]
    captures = [] if shape is None else [View(shape, strides, "int32", 0)]
    if len(text.captures) == 2:
        captures.append(View(shape, (4096, 1), "int32", 0))
    problem = problem_of(3, (2, 2), 4096, 4096, 128)
    problem = dataclasses.replace(problem, text=text, captures=tuple(captures))
    main = backend.forward_kernels(problem.kind(HOPPER.capability))[0]
    finder = MaskTilesLaunch(problem, main)
    of_sequence = 32 * (2 + WORD_TILES * 128 * 128 // 32)  # 32 rows of a word of tiles
    order = 2 * 32  # of these rows, and their work
    assert finder.size == (of_sequence + order) * (1 if name in SHARED else 3)
    assert (finder.rest[0] == 0) == (name in SHARED)
    lengths = dataclasses.replace(problem.extras, lengths=True)
    apart = MaskTilesLaunch(dataclasses.replace(problem, extras=lengths), main)
    assert apart.size == 3 * of_sequence
