"""Texts of scores and masks in the kernels: their results, emulated, and their registers."""

import dataclasses
import functools
from pathlib import Path

import pytest
from emulator import COMPILER
from places import run_script
from targets import compute_capability, few, has, parts_of_processes
from tiny_kernel import needs_nvrtc

from cupyflash import environment, jit
from cupyflash.jit import compiler
from cupyflash.ops.attention.backends import BACKENDS, choose
from cupyflash.ops.attention.fitting import FEW_STACK_BYTES, fitting_tile
from cupyflash.ops.attention.kind import KEY_MASKS, Access, Features, Kind
from cupyflash.ops.attention.masks import MaskOrderKernel, MaskTilesKernel
from cupyflash.ops.attention.score_text import Capture, Text
from cupyflash.ops.attention.score_text.pieces import of_pieces
from cupyflash.ops.attention.simt.kernels import captures_kernel
from cupyflash.ops.attention.sm80 import capture_gradients
from cupyflash.ops.attention.sm90.forward import forward_kernel, split_kernels, text_tiles

pytestmark = pytest.mark.no_backend  # each test says which it is about
needs_torch = pytest.mark.skipif(not has("torch"), reason="needs torch")
HERE = Path(__file__).parent
TEXTS = ("alibi", "softcap", "table", "documents", "gate", "causal")
ARCHITECTURES = {(7, 5): "sm80", (8, 0): "sm80", (9, 0): "sm90", (10, 0): "sm80", (12, 0): "sm80"}
# Without a GPU, and so usually with few cores: one of the widest texts, and a mask on Hopper.
SOME = {(8, 0): ("gate",), (9, 0): ("softcap", "documents"), (10, 0): ()}


needs_emulator = pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")


@needs_emulator
@pytest.mark.parametrize("backends", parts_of_processes(BACKENDS), ids="-".join)
def test_results(backends, emulated_kernels):
    """Against float64, in a process that takes itself for one with a Hopper GPU."""
    run_script(HERE / "emulated_scores.py", emulated_kernels, *backends, *few(), timeout=900)


@needs_emulator
def test_masks(emulated_kernels):
    """The tiles of masks on Hopper, against float64."""
    run_script(HERE / "emulated_masks.py", emulated_kernels, *few(), timeout=900)


def text_of(name):
    from score_texts import cases

    return cases(4, 64, 64)[name].text


def compiled():
    """(capability, text) of the kernels to compile, which is the long part."""
    for capability in ARCHITECTURES:
        for name in TEXTS if compute_capability()[0] else SOME.get(capability, ("table",)):
            yield pytest.param(capability, name, id=f"{jit.arch_of(capability)}-{name}")


def main_kernels(backend, kind):
    """The kernels of both passes that have the text."""
    if backend == "sm90":
        kernel_of = functools.partial(forward_kernel, kind)
        yield kernel_of(fitting_tile(text_tiles(kind), kernel_of, kind.capability))
        mains = BACKENDS[backend].backward_candidates(kind)
        yield mains[fitting_tile(mains, mains.__getitem__, kind.capability)]
        return
    for backward in (False, True):
        kernels = BACKENDS[backend].kernels(kind, backward=backward)
        yield from (x for x in kernels if getattr(x, "text", None))


@needs_nvrtc
@needs_torch
@pytest.mark.parametrize(("capability", "name"), compiled())
def test_registers(capability, name):
    """No text of the list has more than a few registers in local memory, in any pass."""
    if capability[0] * 10 + capability[1] not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.version()} does not know {jit.arch_of(capability)}")
    dtype = "float16" if capability == (7, 5) else "bfloat16"
    kind = Kind(dtype, 128, Features(text=text_of(name)), capability)
    found = [
        jit.build(x, jit.arch_of(capability)) for x in main_kernels(ARCHITECTURES[capability], kind)
    ]
    assert len(found) == 2
    assert [x for x in found if x.stack_bytes > FEW_STACK_BYTES or x.warnings] == []


@needs_nvrtc
@needs_torch
@pytest.mark.parametrize(
    "text",
    [
        # What scores need a second time waits in no register.
        "score - x(head) * abs(query - key) + 0.001 * key",
        "score * sigmoid(x(query)) + x(key)",
    ],
)
def test_first_tile_serves(text):
    """Nor is there a warning, for which a tile would not serve: the first call compiles one."""
    import torch

    from cupyflash import Score

    kind = Kind("bfloat16", 128, Features(text=Score(text, x=torch.ones(4)).alone), (9, 0))
    kernel, _ = split_kernels(forward_kernel(kind, next(iter(text_tiles(kind)))))
    built = jit.build(kernel, "sm_90a")
    assert (built.stack_bytes, built.warnings) == (0, ())


@needs_nvrtc
@needs_torch
@pytest.mark.parametrize(
    "capability", [(7, 5), (8, 0), (9, 0)][-1 if few() else 0 :], ids=jit.arch_of
)
def test_registers_of_other_kernels(capability):
    """Those of the gradients of captures, and those that find the tiles of a mask."""
    if capability[0] * 10 + capability[1] not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.version()} does not know {jit.arch_of(capability)}")
    dtype = "float16" if capability == (7, 5) else "bfloat16"
    configs = [MaskTilesKernel(128, 128, True, True, 128, text=text_of("documents"))]
    configs.append(MaskOrderKernel(True))
    for name, head_dim, exact in (("alibi", 192, False), ("table", 128, True), ("gate", 64, False)):
        text = text_of(name)
        learning = tuple(x._replace(learns=True) for x in text.captures)
        features = Features(text=text._replace(captures=learning))
        kind = Kind(dtype, head_dim, features, capability)
        beside = features._replace(bias=KEY_MASKS[1], dropout=True)
        slow = captures_kernel(kind._replace(dtype="float32", features=beside))
        configs.append(dataclasses.replace(capture_gradients.kernel(kind), exact=exact))
        configs.append(dataclasses.replace(slow, exact=not exact))
    found = [jit.build(x, jit.arch_of(capability)) for x in configs]
    assert [x for x in found if x.stack_bytes > FEW_STACK_BYTES or x.warnings] == []


@needs_nvrtc
def test_registers_of_pieces():
    """A text that counts from elsewhere, and dropout that does, take no more than others.

    Without a GPU the kernels of both, not those of dropout alone.
    """
    capability = (9, 0)
    if 90 not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.version()} does not know sm_90")
    slopes, documents = Capture("slopes", "float32", 1, True), Capture("documents", "int32", 2)
    score = "score - slopes(head) * abs(query - key)"
    mask = "documents(batch, query) == documents(batch, key)"
    names = frozenset(("batch", "head", "query", "key"))
    text = of_pieces(Text(score, mask, (slopes, documents), True), names)
    kind = Kind("bfloat16", 128, Features(dropout=True, text=text), capability)
    configs = [
        MaskTilesKernel(128, 128, True, True, 128, text=text),
        capture_gradients.kernel(kind),
        *main_kernels("sm90", kind),
    ]
    if not few():
        alone = Features(dropout=True, text=of_pieces(Text("", "", (), True), names))
        configs += main_kernels("sm90", kind._replace(features=alone))
        plain = kind._replace(features=Features(dropout=True))
        mains = [
            forward_kernel(plain),
            next(iter(BACKENDS["sm90"].backward_candidates(plain).values())),
        ]
        tiles = [[(x.block_m, x.block_n) for x in some] for some in (configs[-2:], mains)]
        assert tiles[0] == tiles[1]  # dropout alone has those of dropout
    found = [jit.build(x, "sm_90a") for x in configs]
    assert [x for x in found if x.stack_bytes > FEW_STACK_BYTES or x.warnings] == []


@needs_nvrtc
@needs_torch
def test_errors_point_into_the_text():
    text = text_of("alibi")._replace(score="score - slope(head)")
    config = next(main_kernels("simt", Kind("float32", 64, Features(text=text), (8, 0))))
    with pytest.raises(jit.CompileError) as error:
        compiler.compile_kernel(config, "sm_80")
    assert 'text(1): error: identifier "slope" is undefined' in error.value.log


@needs_torch
def test_text_is_in_the_key():
    """Kernels of two texts differ in the cache, those of two captures of one text do not."""
    first, second = (
        next(main_kernels("simt", Kind("float32", 64, Features(text=text_of(x)), (8, 0))))
        for x in ("alibi", "table")
    )
    plain = next(BACKENDS["simt"].kernels(Kind("float32", 64, Features(), (8, 0)), backward=False))
    assert first.expression == second.expression
    stubs = {compiler.stub(x) for x in (first, second, plain)}
    assert len(stubs) == 3 and "user_score" not in compiler.stub(plain)
    assert first.argument_size == plain.argument_size + 64


@needs_torch
@pytest.mark.parametrize("option", ["softcap", "alibi"])
def test_options_that_a_score_replaces(option):
    """A mask goes with both."""
    of_mask = Features(text=text_of("causal"), **{option: True})
    kind = Kind("float16", 64, of_mask, (8, 0))
    with environment.override(backend=None):
        assert choose("attention", kind, Access.TENSOR_MAP, backward=False) == "sm80"
    kind = kind._replace(features=of_mask._replace(text=text_of("table")))
    with pytest.raises(NotImplementedError, match=f"write them into it, got {option}"):
        choose("attention", kind, Access.TENSOR_MAP, backward=False)
