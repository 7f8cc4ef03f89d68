"""Options of attention: whatever stands for a number is one before a plan is looked up."""

import decimal

import numpy
import pytest
from matrix import each

import cupyflash
from cupyflash.ops.attention import options as options_module
from cupyflash.ops.attention.options import Options, plain_options
from cupyflash.ops.decode.sampling import Sampling, sample
from cupyflash.testing import expected, to_float64


def scalars(target, value):
    """A number, as the caller may have it in the host's memory."""
    kinds = [numpy.float32(value), numpy.float64(value), numpy.array(value), decimal.Decimal(value)]
    if target.library == "torch":
        import torch

        kinds += [torch.tensor(value), torch.nn.Parameter(torch.tensor(value), requires_grad=False)]
    return kinds


def call(inputs, **options):
    return to_float64(cupyflash.attention(inputs.q, inputs.k, inputs.v, **options))


@each()
@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_numbers(target, name):
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    others = {"dropout_seed": 1} if name == "dropout_p" else {}
    wanted = call(inputs, **{name: 0.25}, **others)
    for value in scalars(target, 0.25):
        assert (call(inputs, **{name: value}, **others) == wanted).all()


@each()
def test_a_scale_that_changes_in_place(target):
    """A plan does not keep the object: the second call has the second scale."""
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    for scale in scalars(target, 0.1):
        if not hasattr(scale, "shape") or isinstance(scale, numpy.floating):
            continue  # it cannot change
        for value in (0.1, 0.8):
            scale[...] = value
            out = cupyflash.attention(inputs.q, inputs.k, inputs.v, scale=scale)
            expected(inputs, scale=value).check(out=out)


@each()
def test_windows(target):
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    wanted = call(inputs, window=(3, 0))
    windows = [[3, 0], (numpy.int64(3), numpy.int8(0)), numpy.array([3, 0]), (numpy.array(3), 0)]
    if target.library == "torch":
        import torch

        windows += [torch.tensor([3, 0]), tuple(torch.tensor([3, 0])), torch.Size((3, 0))]
    for window in windows:
        assert (call(inputs, window=window) == wanted).all(), window
        flash = cupyflash.flash_attn_func(inputs.q, inputs.k, inputs.v, window_size=window)
        assert (to_float64(flash) == wanted).all()
    for window in ((2**70, -1), (None, 2**40)):
        assert (call(inputs, window=window) == call(inputs)).all()
    with pytest.raises(TypeError, match=r"^flash_attn_func: window_size must be .*got 3$"):
        cupyflash.flash_attn_func(inputs.q, inputs.k, inputs.v, window_size=3)


@each()
def test_flags(target):
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    wanted = call(inputs, causal=True)
    for causal in (
        numpy.bool_(True),
        1,
        numpy.array(True),
        "bottom-right",
        numpy.str_("bottom-right"),
    ):
        assert (call(inputs, causal=causal) == wanted).all()
    q = inputs.q.swapaxes(1, 2)
    for causal in (numpy.bool_(True), 1):
        sdpa = cupyflash.scaled_dot_product_attention(q, q, q, is_causal=causal)
        same = cupyflash.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert (to_float64(sdpa) == to_float64(same)).all()


@each()
def test_lengths(target):
    inputs = target.varlen_inputs(target.dtypes[0], [9, 11])
    arrays = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    wanted = to_float64(cupyflash.flash_attn_varlen_func(*arrays, 11, 11))
    lengths = [numpy.int64(11), numpy.array(11)]
    if target.library == "torch":
        lengths.append(inputs.cu_seqlens_q.cpu().diff().max())
    for longest in lengths:
        found = to_float64(cupyflash.flash_attn_varlen_func(*arrays, longest, longest))
        assert (found == wanted).all()


@each(device="cuda")
def test_a_number_on_a_gpu(target):
    """To read it would wait for the GPU, and could not be part of a graph."""
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    number = target.array(numpy.array(3.0, "float32"))
    for name in ("scale", "softcap", "dropout_p", "causal"):
        with pytest.raises(TypeError, match=rf"^attention: {name} must be a number, .*x\.item\(\)"):
            call(inputs, **{name: number})
    with pytest.raises(TypeError, match="^attention: each side of window must be a number"):
        call(inputs, window=(number, 0))


@each(library="torch")
def test_an_option_that_wants_a_gradient(target):
    import torch

    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    scale = torch.nn.Parameter(torch.tensor(0.3))
    qkv = inputs.q, inputs.k, inputs.v
    for name, function in (
        ("scale", cupyflash.attention),
        ("scale", cupyflash.scaled_dot_product_attention),
        ("softmax_scale", cupyflash.flash_attn_func),
    ):
        with pytest.raises(NotImplementedError, match=f"^{function.__name__}: {name} has no grad"):
            function(*qkv, **{name: scale})
    with torch.no_grad():
        assert (call(inputs, scale=scale) == call(inputs, scale=scale.item())).all()
    slopes = torch.full((inputs.q.shape[2],), 0.5, device=target.device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^attention: alibi_slopes have no gradient"):
        call(inputs, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="scale has no gradient"):
        torch.func.grad(lambda s: cupyflash.attention(*qkv, scale=s).float().sum())(
            torch.tensor(0.3)
        )
    for transform in (torch.func.vmap, lambda f: lambda s: torch.func.jvp(f, (s[0],), (s[0],))):
        with pytest.raises(NotImplementedError, match="scale has no gradient"):
            transform(lambda s: cupyflash.attention(*qkv, scale=s))(torch.ones(2))


RIGHT = {
    "causal": True, "scale": 0.5, "window": (3, 0), "softcap": 1.0, "layout": "bshd",
    "max_seqlens": None, "dropout_p": 0.0, "deterministic": False, "precision": "ieee",
}  # fmt: skip


def test_equal_options_are_one_key():
    """1 and True are equal, too: none is left that is not of its type."""
    right = tuple(RIGHT.values())
    assert plain_options("f", **RIGHT) == Options(**RIGHT)[:-1] == right
    others = {"causal": numpy.bool_(True), "scale": numpy.float64(0.5), "softcap": 1}
    others |= {"window": [3, numpy.int64(0)], "dropout_p": 0, "deterministic": 0}
    others |= {"precision": numpy.str_("ieee")}
    found = plain_options("f", **{**RIGHT, **others})
    assert found == right and list(map(type, found)) == list(map(type, right))
    assert list(map(type, found[2])) == [int, int]
    assert plain_options("f", **{**RIGHT, "dropout_p": 0}) == right


@pytest.mark.parametrize("causal", [False, True, "top-left", "bottom-right"])
def test_usual_options_are_taken_as_they_are(causal, monkeypatch):
    """The hot path reads each option once, and converts none."""
    monkeypatch.setattr(options_module, "RULES", None)
    usual = {**RIGHT, "causal": causal, "window": (-1, 0), "scale": None}
    assert plain_options("attention", **usual) == tuple(usual.values())


def test_the_default_of_each_option_is_plain():
    assert (*plain_options("f"), None) == Options()  # and no text


class OfAnotherLibrary:
    """A number on a GPU, in an array of a library that is not known."""

    shape = ()

    def __dlpack_device__(self):
        return 2, 0  # kDLCUDA

    def __dlpack__(self, **options):
        raise AssertionError("was read")

    __index__ = __float__ = __int__ = __bool__ = __dlpack__


def test_no_number_is_read_from_a_gpu():
    """Whatever library has it there: that would wait for all work on the GPU."""
    x, weight = numpy.ones((2, 8), "float32"), numpy.ones(8, "float32")
    logits, out = numpy.ones((2, 8), "float32"), numpy.ones(2, "int32")
    sampler, number = cupyflash.DiffusionSampler.ddim([0.1, 0.2]), OfAnotherLibrary()
    for call in (
        lambda: cupyflash.layer_norm(x, weight, eps=number),
        lambda: cupyflash.group_norm(x, 2, eps=number),
        lambda: cupyflash.linear(x, x, norm=cupyflash.Norm(weight, eps=number)),
        lambda: cupyflash.qkv_projection(x, x, heads_q=number),
        lambda: Sampling(temperature=number),
        lambda: sample(logits, out=out, limit=number),
        lambda: cupyflash.attention(*[x.reshape(1, 2, 1, 8)] * 3, scale=number),
        lambda: sampler.step(x, x, number),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert "was read" not in str(error.value)
