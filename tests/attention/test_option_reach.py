"""Every field of `Options` and `Extras` reaches the reference, the torch operators and the kernels.

A field that is accepted and then ignored gives wrong results without a word. So `CHANGES` must have
each of them, and its change must change the result of the reference, and what backends launch.
"""

import ctypes
import functools
import inspect
import json
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
from places import run_script

import cupyflash
from cupyflash import environment, jit
from cupyflash.ops.attention import dispatch
from cupyflash.ops.attention.names import caller_name
from cupyflash.ops.attention.options import Extras, Options
from cupyflash.ops.attention.score_text import Text
from cupyflash.runtime.lookup import library_of

BATCH = 2
LENGTH = HEADS = 72  # equal, so that the arrays are right in both layouts
PLAIN = Options()
DROPPED = PLAIN._replace(dropout_p=0.5)
PACKED = PLAIN._replace(layout="thd", max_seqlens=(100, 100))
BACKENDS = {"sm90": "float16", "sm80": "float16", "fp16x3": "float32", "simt": "float16"}
# Of each field: the options of both calls, and the two values.
CHANGES = {
    "causal": (PLAIN, False, "bottom-right"),
    "scale": (PLAIN, None, 0.5),
    "window": (PLAIN, None, (7, 9)),
    "softcap": (PLAIN, 0.0, 0.5),
    "layout": (PLAIN, "bshd", "bhsd"),
    "max_seqlens": (PACKED, (100, 100), (150, 150)),
    "dropout_p": (DROPPED, 0.5, 0.25),
    "deterministic": (PACKED, False, True),  # blocks that take whole heads need no other order
    "precision": (PLAIN, "ieee", "tf32"),
    "text": (PLAIN, None, Text("score * (1 + query) - 0.1 * key", "key != query", ())),
    "cu_seqlens_q": (PACKED, [0, 72, 144], [0, 60, 144]),
    "cu_seqlens_k": (PACKED, [0, 72, 144], [0, 60, 144]),
    "alibi_slopes": (PLAIN, None, numpy.linspace(0.1, 0.9, HEADS, dtype="float32")),
    "bias": (PLAIN, None, numpy.tri(LENGTH, dtype="float32")),
    "sinks": (PLAIN, None, numpy.linspace(1, 3, HEADS, dtype="float32")),
    "dropout_seed": (DROPPED, [3], [4]),
    "seqused_q": (PLAIN, None, [40, 70]),
    "seqused_k": (PLAIN, None, [40, 70]),
    "key_mask": (PLAIN, None, numpy.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 3 > 0),
}
# The reference sums in a fixed order, in float32, and needs no longest sequence.
NOT_IN_REFERENCE = {"max_seqlens", "deterministic", "precision"}
# The other kernels have one kind of products for each dtype.
ONLY_FP16X3 = {"precision"}


@functools.cache
def normal(dtype):
    rng, size = numpy.random.default_rng(0), BATCH * LENGTH * HEADS * 64
    return [rng.standard_normal(size, "float32").astype(dtype) for _ in range(4)]


def options_of(field, value):
    base = CHANGES[field][0]
    return tuple(base._replace(**{field: value}) if field in Options._fields else base)


def extras_of(make, field, value):
    """The fields of `Extras`, empty if there is none of them."""
    base = CHANGES[field][0]
    found = {"dropout_seed": [3]} if base is DROPPED else {}
    if base is PACKED:
        found |= {name: CHANGES[name][1] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if field in Extras._fields and value is not None:
        found[field] = value
    for name, x in found.items():
        if isinstance(x, list):
            x = numpy.array(x, "int64" if name == "dropout_seed" else "int32")
        found[name] = make(x)
    return Extras(**found) if found else ()


def passes(make, field, value, dtype="float32", side=dispatch):
    """(out, lse, the gradients) of a call in which the field has the value; q, k, v do not change.

    Args:
        make: returns an array of NumPy in the library of the call.
        side: `dispatch`, or what has the torch operators of both passes.
    """
    packed = CHANGES[field][0] is PACKED
    shape = ((BATCH * LENGTH,) if packed else (BATCH, LENGTH)) + (HEADS, 64)
    q, k, v, dout = (make(x.reshape(shape)) for x in normal(dtype))
    options, extras = options_of(field, value), extras_of(make, field, value)
    start = ("attention", library_of(q)) if side is dispatch else ("attention",)
    out, lse = side.forward(*start, (q, k, v, *extras), (options, True))
    arrays = (dout, q, k, v, out, lse, None, *extras)
    return out, lse, *side.backward(*start, arrays, (options, False))


def torch_operators():
    """Both passes by the operators, which torch.compile and dispatch modes see."""
    from cupyflash.ops.attention import torch_side

    traced = (x.traced for x in (torch_side.Forward, torch_side.Backward))
    return SimpleNamespace(**dict(zip(("forward", "backward"), traced)))


def test_no_field_is_missing():
    assert CHANGES.keys() == {*Options._fields, *Extras._fields}


def test_every_field_is_an_argument():
    """Of `attention`, or of the function that has it in its place."""
    varlen = inspect.signature(cupyflash.flash_attn_varlen_func).parameters
    named = {*inspect.signature(cupyflash.attention).parameters, *varlen}
    named |= {"max_seqlens"} if {"max_seqlen_q", "max_seqlen_k"} <= named else set()
    named |= {"text"} if {"score", "mask"} <= named else set()
    triangle = inspect.signature(cupyflash.triangle_attention).parameters
    named |= {"key_mask"} if caller_name("triangle_attention", "key_mask") in triangle else set()
    assert CHANGES.keys() <= named


@pytest.mark.parametrize("field", CHANGES)
def test_reference(field):
    """Both passes change, but for what the reference has no use for."""
    before, after = (passes(numpy.asarray, field, x) for x in CHANGES[field][1:])
    same = [numpy.array_equal(x, y) for x, y in zip(before, after) if y is not None]
    out, _, *gradients = same  # dropout does not change the LSE
    assert all(same) if field in NOT_IN_REFERENCE else not any((out, *gradients))


@pytest.mark.parametrize("field", CHANGES)
def test_torch_operators(field):
    torch = pytest.importorskip("torch")
    value = CHANGES[field][2]
    wanted = passes(numpy.asarray, field, value)
    found = passes(torch.tensor, field, value, side=torch_operators())
    for x, y in zip(wanted, found):
        assert (x is None) == (y is None) and (x is None or numpy.array_equal(x, y.numpy()))


def main():
    """Prints, in JSON, whether forward and backward launch something else with the option, and
    whether the operators launch the same: of each backend and field.
    """
    import torch

    from bench.lib.dry_run import hopper

    launched, option = [], []

    def load(config, device):
        def launch(grid, threads, argument, *_):
            argument = config.params.from_buffer_copy(argument)
            launched.append((repr(config), grid, list(leaves(argument, option))))

        return launch

    def launches(field, value, dtype, side):
        option[:], kept = [], []

        def make(x):
            kept.append(torch.tensor(x))  # as an address could be used again
            if numpy.array_equal(x, CHANGES[field][2]):
                option.append(kept[-1].data_ptr())
            return kept[-1]

        launched.clear()
        passes(make, field, value, dtype, side)
        split = [of.startswith("Flash") and "Bwd" in of for of, *_ in launched].index(True)
        return launched[:split], launched[split:]

    found = {}
    # No tile is compiled to find one that fits.
    spills_nothing = SimpleNamespace(stack_bytes=0, spill_bytes=0, warnings=())
    with hopper(load=load), mock.patch.object(jit, "build", lambda *_: spills_nothing):
        for backend, dtype in BACKENDS.items():
            for field, (_, *values) in CHANGES.items():
                if field in ONLY_FP16X3 and backend != "fp16x3":
                    continue
                with environment.override(backend=backend):
                    before, after = (launches(field, x, dtype, dispatch) for x in values)
                    traced = launches(field, values[1], dtype, torch_operators())
                changed = [x != y for x, y in zip(before, after)]
                found[f"{backend} {field}"] = [*changed, traced == after]
    print(json.dumps(found))


def leaves(struct, option):
    """The values of all fields; of an address, whether it is one, and that of the option."""
    for name, kind in struct._fields_:
        value = getattr(struct, name)
        if isinstance(value, ctypes.Structure):
            yield from leaves(value, option)
        elif kind in (ctypes.c_void_p, ctypes.c_uint64):
            yield "the option" if value in option else bool(value)
        else:
            yield bytes(value) if isinstance(value, ctypes.Array) else value


@pytest.fixture(scope="module")
def of_kernels():
    for name in ("cupy", "torch"):
        pytest.importorskip(name)
    return json.loads(run_script(__file__))


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels(of_kernels, backend, field):
    """Configurations, grids or arguments change, in a dry run of both passes."""
    if field in ONLY_FP16X3 and backend != "fp16x3":
        pytest.skip(f"{backend} has one kind of products")
    forward = field != "deterministic"  # which always sums in a fixed order
    assert of_kernels[f"{backend} {field}"] == [forward, True, True]


if __name__ == "__main__":
    main()
