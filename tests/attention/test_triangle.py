"""triangle_attention and key masks: against float64, and the signature of cuequivariance_torch."""

import dataclasses

import numpy
import pytest
from matrix import each, each_library
from passes import forward_backward
from problems import HOPPER, problem_of, view
from wrong_calls import check_refused

import cupyflash
from cupyflash.ops.attention.operations import BACKWARD, FORWARD
from cupyflash.ops.attention.options import Extras, Options
from cupyflash.ops.attention.passes import Wanted
from cupyflash.ops.attention.sm80 import dbias
from cupyflash.runtime.array import array_namespace
from cupyflash.testing import expected, to_numpy64

DEFAULTS = {"causal": False, "scale": None, "window": None, "softcap": 0.0}
ROWS, HEADS, QUERIES, KEYS = 3, 2, 70, 90


def make_mask(target, batch, keys, pattern="holes"):
    """Masks with holes, of the last keys, of the first keys; one sequence has no key at all."""
    mask = numpy.random.default_rng(3).random((batch, keys)) < 0.7
    if pattern != "holes":
        ends = numpy.arange(1, batch + 1)[:, None] * keys // (batch + 1)
        mask = (numpy.arange(keys) < ends) == (pattern == "right")
    mask[-1] = False
    return target.array(mask)


def normal(target, shape, dtype, seed):
    values = numpy.random.default_rng(seed).standard_normal(shape, dtype="float32")
    return target.array(values, dtype)


def passes(inputs, *, bias_grad=False, **options):
    """All results of attention with a key mask, which `cupyflash.attention` has no name for."""
    extras = Extras(**{name: options.pop(name, None) for name in Extras._fields})
    options = tuple(Options(**DEFAULTS | options | {"layout": inputs.layout}))
    tensors = (inputs.q, inputs.k, inputs.v)
    out, lse = FORWARD("f", (*tensors, *extras), (options, True))
    tensors = (inputs.dout, *tensors, out, lse, None)
    found = BACKWARD("f", (*tensors, *extras), (options, bias_grad))
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    results = {name: x for name, x in zip(names, found) if x is not None}
    return {"out": out, "lse": lse} | results


def problem(target, dtype=None, **shape):
    sizes = {"batch": ROWS, "heads_q": HEADS, "seqlen_q": QUERIES, "seqlen_k": KEYS}
    return target.inputs(dtype or target.dtypes[0], **sizes | {"heads_kv": HEADS} | shape)


@each()
@pytest.mark.parametrize("pattern", ["holes", "left", "right"])
@pytest.mark.parametrize("bias", ["", "q", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 3.0},
        {"window": (20, 3), "dropout_p": 0.2, "dropout_seed": 5},
    ],
    ids=str,
)
def test_with_bias_and_other_options(target, pattern, bias, options):
    inputs = problem(target, head_dim=64)
    arrays = {"key_mask": make_mask(target, ROWS, KEYS, pattern)}
    if bias:
        dtype = target.dtypes[0] if bias == "q" else bias
        arrays["bias"] = normal(target, (1, HEADS, QUERIES, KEYS), dtype, 5)
    results = passes(inputs, bias_grad=bool(bias), **arrays, **options)
    expected(inputs, **arrays, **options).check(**results)


@each(device="cuda")
@pytest.mark.parametrize("head_dim", [32, 64, 192, 256])
@pytest.mark.parametrize("pattern", ["holes", "left", "right"])
def test_with_a_bias_in_boxes(target, pattern, head_dim):
    """Several tiles of keys, with rows of the bias that TMA can load: sm_90 masks pairs of it."""
    inputs = problem(target, head_dim=head_dim, seqlen_q=200, seqlen_k=328)
    factors = numpy.ones((328, 1, 1), dtype="float32")
    factors[[5, 140]] = 20  # the maximum moves (test_moving_maximum.py)
    inputs = dataclasses.replace(inputs, k=inputs.k * target.array(factors, inputs.dtype))
    arrays = {
        "key_mask": make_mask(target, ROWS, 328, pattern),
        "bias": normal(target, (1, HEADS, 200, 328), target.dtypes[0], 5),
    }
    for options in ({}, {"softcap": 3.0}, {"causal": True, "dropout_p": 0.2, "dropout_seed": 5}):
        results = passes(inputs, **arrays, **options)
        expected(inputs, **arrays, **options).check(**results)


@each()
@pytest.mark.parametrize("storage", ["expanded", "transposed", "every other"])
def test_strides_of_a_mask(target, storage):
    inputs = problem(target, head_dim=32, heads_kv=1)
    mask = make_mask(target, ROWS, 2 * KEYS)
    if storage == "expanded":
        mask, shape = mask[:1, :KEYS], (ROWS, KEYS)
        is_torch = target.library == "torch"
        mask = mask.expand(shape) if is_torch else array_namespace(mask).broadcast_to(mask, shape)
    elif storage == "transposed":
        mask = make_mask(target, KEYS, ROWS).swapaxes(0, 1)
    else:
        mask = mask[:, ::2]
    bias = normal(target, (1, HEADS, QUERIES, KEYS), "float32", 5)
    results = passes(inputs, bias=bias, key_mask=mask, bias_grad=True)
    expected(inputs, bias=bias, key_mask=mask).check(**results)


@each()
@pytest.mark.parametrize("keys", [1, 31, 128, 300])
def test_a_bool_bias_of_keys_is_a_key_mask(target, keys):
    """(batch, 1, 1, keys), as masks of padding are; in the backward as well."""
    inputs = problem(target, head_dim=64, seqlen_k=keys)
    for pattern in ("holes", "left", "right"):
        bias = make_mask(target, ROWS, keys, pattern)[:, None, None]
        results = forward_backward(inputs, bias=bias)
        expected(inputs, bias=bias).check(**results)


def pair(target, batch, dtype, bias_dtype=None, head_dim=32):
    """The arguments of a call by name."""
    shape = (batch, ROWS, HEADS)
    sizes = {"q": QUERIES, "k": KEYS, "v": KEYS}
    arrays = {
        name: normal(target, (*shape, size, head_dim), dtype, seed)
        for seed, (name, size) in enumerate(sizes.items())
    }
    bias = normal(target, (batch, 1, HEADS, QUERIES, KEYS), bias_dtype or dtype, 9)
    mask = make_mask(target, batch * ROWS, KEYS).reshape(batch, ROWS, 1, 1, KEYS)
    return arrays | {"bias": bias, "mask": mask}


@each()
@pytest.mark.parametrize("bias_dtype", [None, "float32"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_triangle_attention(target, batch, masked, bias_dtype):
    """Each of the B problems is attention with a bias and a key mask."""
    dtype = target.dtypes[0]
    arrays = pair(target, batch, dtype, bias_dtype)
    if not masked:
        del arrays["mask"]
    out, lse, maximum = cupyflash.triangle_attention(**arrays, scale=0.3, return_aux=True)
    assert out.shape == arrays["q"].shape
    assert lse.shape == (*out.shape[:-1], 1)
    assert maximum is None
    inputs = problem(target, head_dim=32, layout="bhsd")
    for b in range(batch):
        q, k, v = (arrays[name][b] for name in "qkv")
        one = dataclasses.replace(inputs, q=q, k=k, v=v)
        options = {"bias": arrays["bias"][b], "scale": 0.3}
        if masked:
            options["key_mask"] = arrays["mask"][b, :, 0, 0]
        expected(one, **options).check(out=out[b], lse=lse[b, ..., 0])
    without = {name: x[0] for name, x in arrays.items()}
    one = cupyflash.triangle_attention(**without, scale=0.3)
    assert bool((one == out[0]).all())


@each(device="cuda")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize(
    "batch, queries, keys, causal",
    [(3, 200, 320, False), (40, 70, 96, False), (9, 1, 130, False), (5, 300, 260, True)],
)
def test_gradient_of_a_shared_bias(target, batch, queries, keys, causal, head_dim, masked):
    """Few and many shares; rows of the bias that TMA can load and others. Twice, bit by bit."""
    inputs = problem(target, head_dim=head_dim, batch=batch, seqlen_q=queries, seqlen_k=keys)
    for dtype, heads in ((inputs.dtype, HEADS), ("float32", 1)):
        options = {"bias": normal(target, (1, heads, queries, keys), dtype, 5), "causal": causal}
        if masked:
            options["key_mask"] = make_mask(target, batch, keys)
        first, second = (passes(inputs, bias_grad=True, **options) for _ in range(2))
        expected(inputs, **options).check(**first)
        if target.backend not in ("simt", "fp16x3"):
            assert bool((first["dbias"] == second["dbias"]).all())


@each(device="cuda")
def test_a_fixed_order_of_every_gradient(target):
    """deterministic extends to the gradient of a shared bias, but not to simt's."""
    inputs = problem(target, head_dim=32, batch=40, seqlen_q=256, seqlen_k=300)
    options = {"bias": normal(target, (1, HEADS, 256, 300), "float32", 5), "deterministic": True}
    if target.backend in ("simt", "fp16x3"):
        with pytest.raises(NotImplementedError, match="deterministic (sum only|does not extend)"):
            passes(inputs, bias_grad=True, **options)
        return
    first, second = (passes(inputs, bias_grad=True, **options) for _ in range(2))
    assert all(bool((first[name] == second[name]).all()) for name in first)


@each_library("torch")
def test_gradients(target):
    """Through autograd, for one and several problems; and one graph of torch.compile."""
    import torch

    for batch in (1, 2):
        arrays = pair(target, batch, target.dtypes[0])
        leaves = {n: x.requires_grad_() for n, x in arrays.items() if n != "mask"}
        out = cupyflash.triangle_attention(**arrays)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, list(leaves.values()), dout)
        inputs = problem(target, head_dim=32, layout="bhsd")
        for b in range(batch):
            q, k, v = (arrays[name][b].detach() for name in "qkv")
            one = dataclasses.replace(inputs, q=q, k=k, v=v, dout=dout[b])
            options = {"bias": arrays["bias"][b].detach(), "key_mask": arrays["mask"][b, :, 0, 0]}
            names = ("dq", "dk", "dv", "dbias")
            expected(one, **options).check(**{n: x[b] for n, x in zip(names, found)})
        compiled = torch.compile(cupyflash.triangle_attention, fullgraph=True, backend="aot_eager")
        again = compiled(**arrays)
        assert torch.equal(again, out)
        for x, y in zip(torch.autograd.grad(again, list(leaves.values()), dout), found):
            assert x.shape == y.shape


@each_library()
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_a_mask_of_integers(target, dtype):
    arrays = pair(target, 1, target.dtypes[0])
    out = cupyflash.triangle_attention(**arrays)
    arrays["mask"] = target.array(to_numpy64(arrays["mask"]).astype(dtype))
    assert bool((cupyflash.triangle_attention(**arrays) == out).all())


@each_library()
def test_a_mask_of_floats_is_refused(target):
    """That which is added to scores is 0 where a key is seen, and is not what a 1 and 0 says."""
    arrays = pair(target, 1, target.dtypes[0])
    seen = to_numpy64(arrays["mask"])
    said = r"^triangle_attention: mask must be bool .* mask != 0 .* mask == 0 .*, got (b?float\d+)$"
    for dtype in target.dtypes:
        for values in (seen, numpy.where(seen, 0.0, -1e4)):
            mask = target.array(values.astype("float32"), dtype)
            with pytest.raises(TypeError, match=said):
                cupyflash.triangle_attention(**arrays | {"mask": mask})


@each_library()
def test_wrong_calls(target):
    arrays = pair(target, 2, target.dtypes[0])
    q, bias, mask = arrays["q"], arrays["bias"], arrays["mask"]
    wrong = {
        "q": [None, 3, q[0], q[:1], q[..., 0, :], q[:, :2]],
        "bias": [None, bias[0], bias[:1], bias[..., :1], bias != 0, bias[:, :, :1]],
        "mask": [1, mask[0], mask[:1], mask[..., :1], mask[:, :1]],
        "scale": [0, -1.0, "big", numpy.inf],
        "return_aux": [2, "yes"],
    }
    check_refused(cupyflash.triangle_attention, arrays, wrong, least=20)


@pytest.mark.parametrize(
    "tiles, most, shares",
    [(144, 96, 5), (1024, 4, 1), (128, 32, 2), (48, 96, 5), (4, 16, 16), (300, 50, 3), (140, 0, 1)],
)
def test_shares_of_tiles(tiles, most, shares):
    """Of 264 places; 144 tiles alone, those of AlphaFold 3, would leave half of them empty."""
    assert dbias.shares_of_tiles(tiles, 264, most) == shares


def test_a_bias_that_nothing_shares_is_left_to_the_main_kernel():
    """Each element has one term, and the kernel for shared biases takes longer."""
    shape = 2, 4, 64, 64
    alone, shared = (
        problem_of(2, (4, 4), 64, 64, 32, bias=view(*sizes)) for sizes in (shape, (1, *shape[1:]))
    )
    wanted = Wanted({}, bias=alone.bias_strides)
    assert dbias.plan(alone, alone.kind((9, 0)), HOPPER, wanted) is None
    assert dbias.plan(shared, shared.kind((9, 0)), HOPPER, wanted) is not None
