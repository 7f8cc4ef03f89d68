"""`scaled_dot_product_attention` against torch's function of that name."""

import itertools

import numpy
import pytest
from matrix import each
from passes import one_graph

import cupyflash
from cupyflash.testing import assert_close_to_float64, expected

RESULTS = ("out", "dq", "dk", "dv", "dbias")
SHAPE = {"batch": 2, "seqlen_q": 20, "seqlen_k": 27, "layout": "bhsd"}
FULL = (2, 4, 20, 27)
# Every way to broadcast to (batch, heads_q, seqlen_q, seqlen_k), and fewer axes.
MASKS = [
    tuple(1 if one else size for one, size in zip(ones, FULL))
    for ones in itertools.product([False, True], repeat=4)
]
MASKS += [FULL[1:], FULL[2:], FULL[3:], ()]


def make_mask(target, shape, dtype):
    """Random, and in each row of scores the first key is seen."""
    import torch

    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(shape, generator=generator)
    if dtype == "bool":
        mask = (mask > 0) | (torch.arange(mask.shape[-1]) == 0 if shape else True)
    return mask.to(target.device, getattr(torch, dtype))


def gradients(function, tensors, dout, **options):
    """out and the gradient of every floating tensor; the fourth is the mask."""
    import torch

    tensors = [
        x.detach().requires_grad_(x.is_floating_point()) if x is not None else None for x in tensors
    ]
    out = function(*tensors, **options)
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, dout)]


def check(inputs, mask=None, is_causal=False, **options):
    """Out and gradients, that of the mask too, against torch's function in float64."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors, options["is_causal"] = (inputs.q, inputs.k, inputs.v, mask), is_causal
    found = gradients(cupyflash.scaled_dot_product_attention, tensors, inputs.dout, **options)
    theirs = torch.nn.functional.scaled_dot_product_attention
    exact = [x if x is None or x.dtype == torch.bool else x.double() for x in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        exact = gradients(theirs, exact, inputs.dout.double(), **options)
    bias = mask if mask is None or mask.ndim >= 2 else mask.reshape(1, -1)
    if len(found) == 5:
        found[4], exact[4] = (x.reshape(bias.shape) for x in (found[4], exact[4]))
    rule = expected(
        inputs, bias=bias, causal="top-left" if is_causal else False, scale=options.get("scale")
    )
    for name, right in zip(RESULTS, exact):
        rule.results[name] = rule.results[name]._replace(exact=right)
    rule.check(**dict(zip(RESULTS, found)))


@each(library="torch")
@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(target, shape, dtype):
    inputs = target.inputs(target.dtypes[-1], **SHAPE)
    check(inputs, make_mask(target, shape, dtype))


@each(library="torch")
def test_mask_of_the_dtype_of_the_query(target):
    inputs = target.inputs("float16", **SHAPE)
    check(inputs, make_mask(target, (4, 20, 27), "float16"))


@each(library="torch")
@pytest.mark.parametrize("lengths", [(20, 20), (20, 33), (33, 20), (1, 20)], ids=str)
def test_causal_starts_at_the_top_left(target, lengths):
    inputs = target.inputs("float16", seqlen_q=lengths[0], seqlen_k=lengths[1], layout="bhsd")
    check(inputs, is_causal=True)


@each(library="torch")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("lengths", [(20, 20), (20, 33)], ids=str)
@pytest.mark.parametrize("corner", ["upper_left", "lower_right"])
def test_causal_bias(target, corner, lengths, compiled):
    """A tensor of torch whose memory holds no numbers."""
    from torch.nn.attention import bias as biases

    mask = getattr(biases, f"causal_{corner}")(*lengths)
    inputs = target.inputs("float16", seqlen_q=lengths[0], seqlen_k=lengths[1], layout="bhsd")
    function = cupyflash.scaled_dot_product_attention
    function = one_graph(function) if compiled else function
    found = gradients(function, (inputs.q, inputs.k, inputs.v), inputs.dout, attn_mask=mask)
    causal = "top-left" if corner == "upper_left" else "bottom-right"
    expected(inputs, causal=causal).check(**dict(zip(RESULTS, found)))
    qkv = inputs.q, inputs.k, inputs.v
    with pytest.raises(ValueError, match=r"must be of the seqlen_q and seqlen_k .*got \(20, 7\)"):
        cupyflash.scaled_dot_product_attention(*qkv, biases.causal_upper_left(20, 7))
    with pytest.raises(TypeError, match="bias must be .* in a CausalBias"):
        cupyflash.attention(*qkv, bias=mask, layout="bhsd")


@each(library="torch")
def test_grouped_queries_and_scale(target):
    inputs = target.inputs("float16", **SHAPE, heads_q=6, heads_kv=2)
    check(inputs, make_mask(target, (6, 20, 27), "bool"), enable_gqa=True, scale=0.3)


@each(library="torch")
@pytest.mark.parametrize("storage", ["transposed", "packed", "padded"])
def test_strides(target, storage):
    import torch

    inputs = target.inputs("float16", **SHAPE, storage=storage)
    check(inputs, make_mask(target, FULL, "bool").transpose(2, 3).contiguous().transpose(2, 3))
    q, k, v = (
        x.transpose(2, 3).contiguous().transpose(2, 3) for x in (inputs.q, inputs.k, inputs.v)
    )
    columns = cupyflash.scaled_dot_product_attention(q, k, v)
    rows = cupyflash.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v)
    assert torch.equal(columns, rows)


@each(library="torch")
@pytest.mark.parametrize(
    ("axes", "mask"),
    [((), ()), ((), (20, 27)), ((4,), (4, 20, 27)), ((4,), (1, 27)), ((3, 2, 4), (20, 27))]
    + [((3, 2, 4), mask) for mask in [(3, 1, 4, 20, 27), (2, 1, 20, 1), (1, 1, 4, 1, 27)]]
    + [((2, 3, 1, 2), (3, 1, 2, 20, 1)), ((0, 2, 4), (20, 27))],
    ids=str,
)
def test_any_number_of_axes(target, axes, mask):
    inputs = target.inputs("float16", **SHAPE, heads_q=4)
    count = int(numpy.prod(axes))
    q, k, v = (
        x.reshape(8, *x.shape[2:]).repeat(3, 1, 1)[:count].reshape(*axes, *x.shape[2:])
        for x in (inputs.q, inputs.k, inputs.v)
    )
    mask = make_mask(target, mask, "bool")
    out = cupyflash.scaled_dot_product_attention(q, k, v, mask)
    assert out.shape == q.shape
    whole = mask.expand(*axes, 20, 27).reshape(1, count, 20, 27)
    flat = (x.reshape(1, count, *x.shape[-2:]) for x in (q, k, v))
    same = cupyflash.scaled_dot_product_attention(*flat, whole)
    assert (same.reshape(q.shape) == out).all()


@each(library="torch")
def test_a_row_without_a_key_gives_zero(target):
    inputs = target.inputs("float16", **SHAPE)
    mask = make_mask(target, FULL, "bool")
    mask[:, :, 3] = False
    out, dq, dk, dv = gradients(
        cupyflash.scaled_dot_product_attention,
        (inputs.q, inputs.k, inputs.v, mask),
        inputs.dout,
    )
    assert (out[:, :, 3] == 0).all() and (dq[:, :, 3] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


@each(library="torch")
def test_dropout_follows_the_generator(target):
    import torch

    inputs = target.inputs("float16", **SHAPE)

    def dropped(seed):
        torch.manual_seed(seed)
        return cupyflash.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, None, 0.5)

    assert torch.equal(dropped(1), dropped(1)) and not torch.equal(dropped(1), dropped(2))


@each()
def test_arrays_of_every_library(target):
    inputs = target.inputs("float16", **SHAPE)
    out = cupyflash.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
    same = cupyflash.attention(inputs.q, inputs.k, inputs.v, causal="top-left", layout="bhsd")
    assert type(out) is type(inputs.q) and (out == same).all()


@each()
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"is_causal": True}, ValueError, "attn_mask must be None with is_causal=True, got both"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be .*, got 1.0"),
        ({"scale": 0.0}, ValueError, "scale must be positive"),
    ],
    ids=str,
)
def test_bad_options(target, options, error, message):
    inputs = target.inputs("float16", **SHAPE)
    mask = inputs.q[0, 0, :, :27] if "is_causal" in options else None
    with pytest.raises(error, match=f"scaled_dot_product_attention: {message}"):
        cupyflash.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, mask, **options)


@each()
def test_bad_arrays(target):
    inputs = target.inputs("float16", **SHAPE, heads_q=4, heads_kv=2)
    q, k, v = inputs.q, inputs.k, inputs.v
    function = cupyflash.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"same number of heads without enable_gqa, got \[4, 2, 2"):
        function(q, k, v)
    with pytest.raises(ValueError, match=r"must have the same axes .* got \[\(4, 20"):
        function(q[0], k, v)
    for mask in (q[..., :26], q[..., :27][None], q[0, :3, :, :27]):
        with pytest.raises(
            ValueError, match="scaled_dot_product_attention: .* must .*broadcast to"
        ):
            function(q, k, v, mask, enable_gqa=True)
    with pytest.raises(
        TypeError, match="attn_mask must be bool, float16 like query or float32, got int"
    ):
        function(
            q,
            k,
            v,
            (q[..., :27] > 0).astype("int32") if hasattr(q, "astype") else (q > 0)[..., :27].int(),
            enable_gqa=True,
        )


@each(library="torch")
def test_signature_is_that_of_torch(target):
    """Names, order and keyword-only arguments: both take and refuse the same calls."""
    import torch

    inputs = (
        target.inputs("float32", **SHAPE) if not target.gpu else target.inputs("float16", **SHAPE)
    )
    named = {"query": inputs.q, "key": inputs.k, "value": inputs.v}
    for function in (
        cupyflash.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
    ):
        function(**named, attn_mask=None, dropout_p=0.0, is_causal=True, scale=1.0, enable_gqa=True)
        function(*named.values(), None, 0.0, False)
        with pytest.raises(TypeError):
            function(*named.values(), None, 0.0, False, 1.0)


@pytest.mark.parametrize("axes", [(2, 3, 4), (4,), ()], ids=str)
def test_values_of_another_head_dim_with_any_axes(axes):
    torch = pytest.importorskip("torch")

    q, k, v = (torch.randn(*axes, *size) for size in ((5, 8), (6, 8), (6, 16)))
    out = cupyflash.scaled_dot_product_attention(q, k, v)
    theirs = torch.nn.functional.scaled_dot_product_attention
    exact, terms = theirs(q.double(), k.double(), v.double()), float(theirs(q, k, v.abs()).max())
    assert_close_to_float64(out, exact, theirs(q, k, v), "float32", "out", terms=terms)


@pytest.mark.parametrize("axes", [(3, 2, 4), (1, 6, 4), (6, 1, 4)], ids=str)
@pytest.mark.parametrize("wrong", ["key", "value"])
def test_axes_that_only_have_the_same_product_are_refused(axes, wrong):
    torch = pytest.importorskip("torch")

    arrays = {name: torch.randn(2, 3, 4, 5, 8) for name in ("query", "key", "value")}
    arrays[wrong] = torch.randn(*axes, 5, 8)
    with pytest.raises(ValueError, match="the same sizes of those before heads, got"):
        cupyflash.scaled_dot_product_attention(**arrays)
