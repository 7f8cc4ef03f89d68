"""Head dims that the kernels do not take: no multiples of 8, and another one of v than of q."""

import dataclasses

import numpy
import pytest
from fakes import fake_facts, fresh_plans
from matrix import each
from passes import forward_backward, one_graph
from problems import HOPPER

import cupyflash
from cupyflash.ops.attention import cpu, dispatch
from cupyflash.ops.attention.options import Extras
from cupyflash.ops.attention.problem import kernel_head_dim
from cupyflash.testing import expected, make_alibi_slopes, poison_free_memory, to_float64

HEAD_DIMS = [  # of q and k, of v
    (1, 1),
    (7, 7),
    (37, 37),
    (100, 100),
    (250, 250),
    (24, 64),
    (192, 128),
    (3, 256),
    (255, 1),
]
OPTIONS = [
    {},
    {"causal": True, "window": (20, None), "softcap": 3.0},
    {"scale": 0.3, "alibi": True, "sinks": True},
    {"bias": True, "dropout_p": 0.2, "dropout_seed": 3},
]


def options_of(target, options, dtype, seqlens):
    options, rng = dict(options), numpy.random.default_rng(6)
    if options.pop("alibi", False):
        options["alibi_slopes"] = make_alibi_slopes(4, target.library, device=target.device)
    if options.pop("bias", False):
        values = rng.standard_normal((2, 4, *seqlens), dtype="float32")
        options["bias"] = target.array(values, dtype)
    if options.pop("sinks", False):
        options["sinks"] = target.array(rng.standard_normal(4, dtype="float32"))
    return options


@each()
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_and_backward(target, head_dims, options):
    """In every dtype and storage in turn; the scale is that of the true head_dim."""
    turn = HEAD_DIMS.index(head_dims) + OPTIONS.index(options)
    storages = ["contiguous", "transposed", "padded"]
    storages += [] if target.aligned_only else ["unaligned"]
    inputs = target.inputs(
        target.dtypes[turn % len(target.dtypes)],
        seqlen_q=50,
        seqlen_k=70,
        heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        layout=("bshd", "bhsd")[turn % 2],
        storage=storages[turn // 2 % len(storages)],
    )
    options = options_of(target, options, inputs.dtype, (50, 70))
    results = forward_backward(inputs, **options)
    assert results["out"].shape[-1] == head_dims[1] and results["dq"].shape == inputs.q.shape
    expected(inputs, **options).check(**results)


@each()
def test_unaligned_copies_are_aligned(target):
    """An odd head_dim needs a copy whatever the strides, so every backend takes any."""
    inputs = target.inputs("float16", seqlen_q=20, head_dim=33, storage="unaligned")
    expected(inputs).check(**forward_backward(inputs))


@each()
def test_long_sequences(target):
    lengths = (1000, 1300) if target.gpu else (100, 130)
    for head_dims in ((72, 72), (90, 90), (96, 128), (160, 130)):
        inputs = target.inputs(
            target.dtypes[0], seqlen_q=lengths[0], seqlen_k=lengths[1],
            head_dim=head_dims[0], head_dim_v=head_dims[1],
        )  # fmt: skip
        expected(inputs, causal=True).check(**forward_backward(inputs, causal=True))


NARROW_V = [  # sm90 takes v as it is, but for the last two
    ({}, {}),
    ({"batch": 1, "heads_q": 2, "seqlen_q": 64, "seqlen_k": 4100}, {}),  # blocks divide the keys
    ({"batch": 3, "heads_q": 30, "seqlen_q": 260}, {"causal": True}),  # several tiles for a block
    ({"heads_kv": 2, "storage": "padded"}, {"causal": True}),
    ({"batch": 1, "heads_kv": 1, "seqlen_k": 900}, {"causal": True, "deterministic": True}),
    ({"batch": 1, "heads_q": 1, "seqlen_q": 2100}, {}),  # blocks divide the rows of a head
    ({"seqlen_q": 65, "seqlen_k": 97}, {"deterministic": True, "sinks": True}),
    ({"seqlen_q": 700, "seqlen_k": 40, "layout": "bhsd"}, {"causal": True}),
    ({"seqlen_q": 300, "seqlen_k": 320}, {"window": (60, 20), "scale": 0.2}),
    ({"seqlen_k": 100}, {"causal": True, "softcap": 5.0}),
    ({"seqlen_k": 100}, {"bias": True}),
]


@each(device="cuda")
@pytest.mark.parametrize("head_dims", [(192, 128), (136, 128), (192, 120)], ids=str)
@pytest.mark.parametrize("turn", range(len(NARROW_V)))
def test_narrow_v(target, turn, head_dims):
    shape, options = NARROW_V[turn]
    shape, dtype = (
        {"seqlen_q": 200, "seqlen_k": 270} | shape,
        target.dtypes[turn % len(target.dtypes)],
    )
    inputs = target.inputs(dtype, head_dim=head_dims[0], head_dim_v=head_dims[1], **shape)
    poison_free_memory(target.library, target.device, [x.nbytes for x in (inputs.q, inputs.k)])
    options = options_of(target, options, dtype, (shape["seqlen_q"], shape["seqlen_k"]))
    results = forward_backward(inputs, **options)
    options.pop("deterministic", None)
    expected(inputs, **options).check(**results)


@each(device="cuda", library="torch")
def test_narrow_v_of_packed_sequences(target):
    import torch

    lengths = [300, 0, 17, 96]
    inputs = target.varlen_inputs(target.dtypes[0], lengths, head_dim=192, head_dim_v=128)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    ends = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, 300, 300)
    out = cupyflash.flash_attn_varlen_func(*leaves, *ends, causal=True)
    found = torch.autograd.grad(out, leaves, inputs.dout)
    expected(inputs, causal=True).check(out=out, **dict(zip(("dq", "dk", "dv"), found)))


@each()
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(target, lengths):
    inputs = target.inputs(
        "float16", seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=5, head_dim_v=9
    )
    results = forward_backward(inputs)
    for name, like in (("out", inputs.dout), ("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        assert results[name].shape == like.shape and (to_float64(results[name]) == 0).all()


@each()
def test_lengths(target):
    inputs = target.inputs("float16", batch=2, seqlen_q=30, head_dim=20, head_dim_v=12)
    used = target.array(numpy.array([30, 11], "int32"))
    results = forward_backward(inputs, seqused_q=used, seqused_k=used)
    short = target.inputs("float16", batch=2, seqlen_q=30, head_dim=20, head_dim_v=12)
    parts = {name: getattr(short, name)[1:, :11] for name in ("q", "k", "v", "dout")}
    short = dataclasses.replace(short, **parts)
    expected(short).check(
        **{name: x[1:, :, :11] if name == "lse" else x[1:, :11] for name, x in results.items()}
    )
    assert (to_float64(results["out"])[1, 11:] == 0).all()


@each()
def test_packed_sequences_and_packed_forms(target):
    inputs = target.varlen_inputs("float16", [5, 0, 31], heads_kv=2, head_dim=21, head_dim_v=36)
    ends = inputs.cu_seqlens_q
    out, lse, _ = cupyflash.flash_attn_varlen_func(
        inputs.q, inputs.k, inputs.v, ends, ends, 31, 31, causal=True, return_attn_probs=True
    )
    expected(inputs, causal=True).check(out=out, lse=lse)
    values = numpy.random.default_rng(1).standard_normal((2, 9, 3, 4, 13))
    qkv = target.array(values, "float16")
    packed = cupyflash.flash_attn_qkvpacked_func(qkv)
    separate = cupyflash.attention(*(qkv[:, :, i] for i in range(3)))
    assert packed.shape == (2, 9, 4, 13) and (packed == separate).all()
    packed = cupyflash.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:])
    assert (packed == separate).all()


@each(library="torch")
def test_sdpa(target):
    import torch

    inputs = target.inputs(
        "float32" if "float32" in target.dtypes else "float16", seqlen_q=12, seqlen_k=20,
        head_dim=11, head_dim_v=30, layout="bhsd",
    )  # fmt: skip
    mask = torch.rand(2, 1, 12, 20, device=target.device) > 0.3
    mask[..., 0] = True
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = cupyflash.scaled_dot_product_attention(*leaves, attn_mask=mask)
    found = torch.autograd.grad(out, leaves, inputs.dout)
    expected(inputs, bias=mask).check(out=out, **dict(zip(("dq", "dk", "dv"), found)))


@each(library="torch")
@pytest.mark.parametrize("head_dims", [(37, 37), (16, 40), (136, 128)], ids=str)
def test_compiled_and_mapped(target, head_dims):
    """What torch.compile expects of the strides is what the operators give."""
    import torch

    for layout in ("bshd", "bhsd"):
        inputs = target.inputs(
            "float16", batch=3, seqlen_q=20, layout=layout, storage="transposed",
            head_dim=head_dims[0], head_dim_v=head_dims[1],
        )  # fmt: skip

        def function(q, k, v, layout=layout):
            return cupyflash.attention(q * 1, k, v, causal=True, layout=layout)

        graph = one_graph(function)
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = graph(*leaves)
        found = torch.autograd.grad(out, leaves, inputs.dout)
        expected(inputs, causal=True).check(out=out, **dict(zip(("dq", "dk", "dv"), found)))
        with torch.no_grad():
            eager = function(inputs.q, inputs.k, inputs.v)
            one = torch.func.vmap(lambda *x: function(*(t[None] for t in x))[0])
            mapped = one(inputs.q, inputs.k, inputs.v)
        assert torch.equal(eager, out) and eager.stride() == out.stride()
        assert torch.equal(mapped, eager)


def test_copies_of_a_gpu(monkeypatch):
    """The dispatch of a GPU, with plans that compute on the CPU: what they get, what it makes."""
    torch = pytest.importorskip("torch")
    from cupyflash.ops.attention import torch_ops
    from cupyflash.ops.attention.planning import result_strides

    library, arrays, widths = torch_ops.LIBRARY, {}, []
    pointer, read = library.pointer, library.read

    def remember(x):
        arrays[pointer(x)] = x
        return pointer(x)

    def remember_all(given):
        signatures, pointers = read(given)
        arrays.update(zip(pointers, given, strict=True))
        return signatures, pointers

    class Forward:
        def __init__(self, function, problem, library, view, options):
            widths.append(problem.shape.head_dim)
            assert not problem.needs_padding and view.shape[-1] == widths[-1]
            self.options = options

        def __call__(self, q, pointers, need_lse):
            _, k, v, *extras = map(arrays.get, pointers)
            return cpu.forward(library, q, k, v, self.options, Extras(*extras))

    class Backward(Forward):
        def __init__(self, function, problem, library, views, options, deterministic, bias_grad):
            assert len({view.shape[-1] for view in views.values()}) == 1
            super().__init__(function, problem, library, views["q"], options)

        def __call__(self, q, k, v, pointers):
            *tensors, dlse = map(arrays.get, pointers)
            return cpu.backward(library, *tensors, self.options, Extras(), False, dlse)

    monkeypatch.setattr(library, "pointer", remember, raising=False)
    monkeypatch.setattr(library, "read", remember_all, raising=False)
    monkeypatch.setattr(dispatch, "forward_plan", Forward)
    monkeypatch.setattr(dispatch, "backward_plan", Backward)
    fresh_plans(monkeypatch, dispatch)

    def results(q, k, v, dout, dlse):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = cupyflash.attention(*leaves, causal=True, return_lse=True)
        return out.detach(), lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))

    for head_dim, head_dim_v in [*HEAD_DIMS, (64, 64)]:
        q, k = torch.randn(2, 4, 9, head_dim).transpose(1, 2), torch.randn(2, 13, 2, head_dim)
        v, dout = torch.randn(2, 13, 2, head_dim_v), torch.randn(2, 9, 4, head_dim_v)
        dlse = torch.randn(2, 4, 9)
        exact = results(q, k, v, dout, dlse)
        with monkeypatch.context() as gpu:
            gpu.setattr(library, "on_cpu", lambda x: False, raising=False)
            fake_facts(gpu, dispatch, card_of=HOPPER)
            found = results(q, k, v, dout, dlse)
        width = kernel_head_dim(head_dim, head_dim_v)
        assert set(widths) == {width}
        widths.clear()
        for a, b in zip(found, exact):
            # Both are the reference in float32, here on padded arrays: zeros change no sum.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for result, like in ((found[0], q), (found[2], q), (found[3], k), (found[4], v)):
            strides = result_strides(library, width, library.view(like))
            assert result.stride() == strides


# Bad input -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize(
    "shapes, fact",
    [
        (((2, 5, 4, 0), (2, 5, 4, 0), (2, 5, 4, 8)), "head_dim.* of [qv] must be from 1 to 256"),
        (
            ((2, 5, 4, 257), (2, 5, 4, 257), (2, 5, 4, 8)),
            "head_dim.* of [qv] must be from 1 to 256",
        ),
        (((2, 5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 264)), "head_dim.* of [qv] must be from 1 to 256"),
        (((2, 5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 0)), "head_dim.* of [qv] must be from 1 to 256"),
        (
            ((2, 5, 4, 37), (2, 5, 4, 36), (2, 5, 4, 37)),
            r"k must have shape \(2, seqlen_k, heads_kv, 37\) .*got \(2, 5, 4, 36\) beside q",
        ),
        (
            ((2, 5, 4, 37), (2, 5, 4, 37), (2, 6, 4, 37)),
            r"v must have shape \(2, 5, 4, head_dim_v\) .*got \(2, 6, 4, 37\) beside q .* k \(2, 5",
        ),
        (((2, 5, 4, 37), (3, 5, 4, 37), (3, 5, 4, 37)), r"k must have shape \(2, .*got \(3, 5"),
        (((2, 5, 4, 37), (2, 5, 3, 37), (2, 5, 3, 37)), "the heads of q must be a multiple"),
    ],
    ids=str,
)
def test_wrong_shapes(target, shapes, fact):
    """The message has the shape that is wrong."""
    tensors = [target.array(numpy.ones(shape), "float16") for shape in shapes]
    with pytest.raises(ValueError, match=f"^attention: {fact}") as error:
        cupyflash.attention(*tensors)
    if "heads" not in fact:
        assert any(str(shape) in str(error.value) for shape in shapes)


@each()
def test_wrong_gradients(target):
    inputs = target.inputs("float16", seqlen_q=5, head_dim=12, head_dim_v=20)
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    fact = r"^attention_backward: dout must have shape \(2, 5, 4, 20\) for .*, head_dim_v\)"
    with pytest.raises(ValueError, match=fact):
        cupyflash.attention_backward(inputs.q, inputs.q, inputs.k, inputs.v, out, lse)


@each()
def test_caches_of_two_head_dims_are_refused(target):
    """`attention_with_cache` has one head_dim."""
    for head_dim, head_dim_v in ((40, 24), (24, 40)):
        inputs = target.inputs(
            "float16", batch=1, seqlen_q=2, seqlen_k=9, head_dim=head_dim, head_dim_v=head_dim_v
        )
        new = target.inputs("float16", batch=1, seqlen_q=2, head_dim=head_dim)
        positions = target.array(numpy.zeros(1, "int32"))
        with pytest.raises(ValueError, match=r"^attention_with_cache: .*got"):
            cupyflash.attention_with_cache(new.q, new.k, new.v, inputs.k, inputs.v, positions)


def test_out_of_a_wider_array_can_be_changed_in_place(monkeypatch):
    """As on a GPU, where out is columns of a wider array: torch lets nobody change such views."""
    torch = pytest.importorskip("torch")

    def padded(*arguments):
        out, lse = forward(*arguments)
        return torch.nn.functional.pad(out, (0, 3))[..., : out.shape[-1]], lse

    forward = dispatch.forward
    monkeypatch.setattr(dispatch, "forward", padded)
    q = torch.randn(2, 3, 2, 5, requires_grad=True)
    unchanged = cupyflash.attention(q, q, q)
    out = cupyflash.attention(q, q, q)
    out += 1
    torch.testing.assert_close(out, unchanged + 1, rtol=0, atol=0)
