"""The torch operators and what reaches them; autocast, checkpointing, dispatch modes."""

import contextlib
import dataclasses
import subprocess
import sys
import weakref

import pytest
from matrix import each
from passes import leaves, one_graph, results
from places import ROOT

import cupyflash
from cupyflash.ops.attention import dispatch
from cupyflash.testing import expected, make_alibi_slopes

RESULTS = ("out", "dq", "dk", "dv")


def operator_case(target, name):
    """(tensors, options and optional arrays) for both operators."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = {"seqlen_q": 20, "seqlen_k": 27, "heads_q": 4, "heads_kv": 2}

    def random(*shape):
        return torch.randn(shape, generator=generator).to(target.device)

    options, extras = {}, {}
    if name == "packed":
        inputs = target.varlen_inputs(target.dtypes[0], [9, 0, 11], [12, 3, 12])
        extras = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
        options = {"layout": "thd", "max_seqlens": [11, 12], "causal": "bottom-right"}
    elif name in ("contiguous", "transposed", "packed qkv"):
        storage = name.split()[0]
        inputs = target.inputs(target.dtypes[0], **lengths, layout="bhsd", storage=storage)
        options = {"layout": "bhsd", "causal": "top-left", "window": [5, -1], "softcap": 3.0}
    elif name == "packed queries":
        packed = target.varlen_inputs(target.dtypes[0], [9, 11])
        inputs = target.inputs(target.dtypes[0], batch=2, seqlen_q=12)
        inputs = dataclasses.replace(inputs, q=packed.q, dout=packed.dout)
        extras = {"cu_seqlens_q": packed.cu_seqlens_q}
        options = {"layout": "thd-bshd", "max_seqlens": [11, 12]}
    elif name == "head dims":
        inputs = target.inputs(target.dtypes[0], **lengths, head_dim=37, head_dim_v=19)
    else:
        inputs = target.inputs(target.dtypes[0], **lengths)
    if name == "bias and sinks":
        extras = {"bias": random(20, 27).requires_grad_(), "sinks": random(4).requires_grad_()}
    if name == "mask":
        extras = {"bias": random(2, 1, 20, 27) > 0}
        extras["alibi_slopes"] = make_alibi_slopes(4, "torch", device=target.device)
    if name == "dropout":
        options["dropout_p"] = 0.3
        extras["dropout_seed"] = torch.tensor([5], device=target.device)
    if name == "lengths":
        extras["seqused_k"] = torch.tensor([27, 3], dtype=torch.int32, device=target.device)
    return inputs, options, extras


def flat(options, extras):
    """The arguments behind the tensors, as the operators take them."""
    from cupyflash.ops.attention.options import Extras

    defaults = {"function": "attention", "causal": "", "scale": None, "window": None}
    defaults |= {"softcap": 0.0, "layout": "bshd", "max_seqlens": None, "dropout_p": 0.0}
    deterministic = "sinks" not in extras  # the gradient of a broadcast bias is not
    return (*Extras(**extras), *(defaults | options).values(), deterministic)


@each(library="torch")
@pytest.mark.parametrize(
    "name",
    ["contiguous", "transposed", "packed qkv", "packed", "bias and sinks", "mask", "dropout"]
    + ["lengths", "packed queries", "head dims"],
)
def test_opcheck(target, name):
    import torch

    from cupyflash.ops.attention import torch_ops  # noqa: F401, defines the operators

    inputs, options, extras = operator_case(target, name)
    arguments = flat(options, extras)
    forward, backward = torch.ops.cupyflash.attention, torch.ops.cupyflash.attention_backward
    torch.library.opcheck(forward.default, (*leaves(inputs), *arguments))
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = forward(*qkv, *arguments)
    bias_grad = name == "bias and sinks"
    dlse = torch.randn_like(lse) if name in ("lengths", "packed") else None
    arguments = (inputs.dout, *qkv, out, lse, *arguments, bias_grad, dlse)
    torch.library.opcheck(backward.default, arguments)


@each(library="torch")
@pytest.mark.parametrize("name", ["contiguous", "transposed", "packed qkv"])
@pytest.mark.parametrize("call", ["|bottom-right|bhsd|False|ieee", "||bhsd|True|ieee"])
def test_opcheck_of_plain_calls(target, name, call):
    import torch

    from cupyflash.ops.attention import torch_plain  # noqa: F401, defines the operators

    inputs, _, _ = operator_case(target, name)
    forward, backward = (
        torch.ops.cupyflash.attention_plain,
        torch.ops.cupyflash.attention_plain_backward,
    )
    options = f"attention{call}", 0.3, [6, -1]
    torch.library.opcheck(forward.default, (*leaves(inputs), *options))
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = forward(*qkv, *options)
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(backward.default, (inputs.dout, *qkv, out, lse, *options, dlse))


PLAIN = {"causal": True, "window": (5, 0), "scale": 0.3, "deterministic": True, "layout": "bhsd"}
OTHERS = {"softcap": 3.0, "sinks": 1, "bias": 1, "precision": "tf32", "dropout_p": 0.1}


@each(library="torch")
@pytest.mark.parametrize("option", [None, *PLAIN, *OTHERS])
def test_which_operators_a_call_takes(target, option):
    """Those of few arguments where they can say the call; results are those of an eager call."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    dtype = "float32" if option == "precision" else target.dtypes[0]
    if dtype not in target.dtypes:
        pytest.skip(f"{target} has no {dtype}")
    inputs = target.inputs(dtype, seqlen_q=12, heads_q=2)
    options = {} if option is None else {option: (PLAIN | OTHERS)[option]}
    options |= {"dropout_seed": 1} if option == "dropout_p" else {}
    if option == "sinks":
        options = {"sinks": torch.ones(2, device=target.device)}
    elif option == "bias":
        options = {"bias": torch.ones(12, 12, device=target.device, dtype=inputs.q.dtype)}
    seen = set()

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.add(str(function))
            return function(*arguments, **(options or {}))

    def results():
        qkv = leaves(inputs)
        out = cupyflash.attention(*qkv, **options)
        return [out, *torch.autograd.grad(out, qkv, inputs.dout)]

    expected = results()
    with Sees():
        found = results()
    assert all(map(torch.equal, found, expected))
    kind = "" if option in OTHERS and option != "precision" else "_plain"
    names = {f"cupyflash.attention{kind}.default", f"cupyflash.attention{kind}_backward.default"}
    assert {x for x in seen if x.startswith("cupyflash.")} == names


def python(code):
    pytest.importorskip("torch")
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def test_eager_calls_go_around_the_operators():
    """Also with gradients and of parameters: the operators cost 20 µs a call."""
    code = (
        "import sys, torch, cupyflash\n"
        "q = torch.nn.Parameter(torch.ones(1, 2, 1, 8))\n"
        "cupyflash.attention(q, q, q).sum().backward()\n"
        "with torch.no_grad(): cupyflash.attention(q, q, q)\n"
        "print('cupyflash.ops.attention.torch_ops' in sys.modules)"
    )
    assert python(code) == "False\n"


@each(library="torch")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_autocast(target, mode):
    """float32 tensors are computed in the dtype of autocast; their gradients are float32."""
    import torch

    dtype = "float16" if target.gpu else "bfloat16"
    inputs = target.inputs(dtype, seqlen_q=20, heads_q=4, heads_kv=2)
    bias = torch.randn(20, 20, device=target.device).to(torch.float64)

    def function(q, k, v):
        with torch.autocast(target.device, getattr(torch, dtype)):
            return cupyflash.attention(q, k, v, causal=True)

    if mode == "compiled":
        function = one_graph(function)
    qkv = [x.detach().float().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    found = results(function, inputs, *qkv)
    assert [found[name].dtype for name in RESULTS[1:]] == [torch.float32] * 3
    half = getattr(torch, dtype)
    expected(inputs, causal=True).check(**{name: x.to(half) for name, x in found.items()})
    with (
        torch.autocast(target.device, half),
        pytest.raises(TypeError, match="bias must be bool, .* like q or float32, got float64"),
    ):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, bias=bias)


@each(library="torch")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_autocast_takes_sinks_of_the_dtype_that_q_had(target, mode):
    """As it does a bias; float32 sinks stay."""
    import torch

    given, half = (torch.bfloat16, torch.float16) if target.gpu else (torch.float16, torch.bfloat16)
    q = torch.randn(1, 5, 2, 64, device=target.device).to(half)
    sinks = torch.tensor([0.5, -1.0], device=target.device, dtype=given, requires_grad=True)

    def function(q, sinks):
        with torch.autocast(target.device, half):
            return cupyflash.attention(q, q, q, sinks=sinks)

    if mode == "compiled":
        function = one_graph(function)
    out = function(q.to(given).float(), sinks)
    out.float().sum().backward()
    assert out.dtype == half and sinks.grad.dtype == given
    q_ = q.to(given).float().to(half)
    expected_out = cupyflash.attention(q_, q_, q_, sinks=sinks.detach().to(half))
    torch.testing.assert_close(out, expected_out, rtol=0, atol=0)


@each(library="torch")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_the_dropout(target, use_reentrant):
    import torch
    from torch.utils.checkpoint import checkpoint

    inputs = target.inputs("float16", seqlen_q=40)

    def function(q, k, v):
        return cupyflash.attention(q, k, v, causal=True, dropout_p=0.4)

    torch.manual_seed(3)
    plain = results(function, inputs)
    torch.manual_seed(3)
    qkv = leaves(inputs)
    out = checkpoint(function, *qkv, use_reentrant=use_reentrant)
    out.backward(inputs.dout)
    for name, x in zip(RESULTS, (out, *(x.grad for x in qkv)), strict=True):
        # The same operator with the same seed: another mask differs by far more.
        torch.testing.assert_close(x, plain[name], msg=name)


@each(library="torch")
@pytest.mark.parametrize("score", [None, cupyflash.Score("score + 1.0f")], ids=["plain", "score"])
def test_checkpoint_keeps_no_bias(target, score):
    """Nor the other optional tensors; they are computed again."""
    import torch
    from torch.utils.checkpoint import checkpoint

    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    kept = []

    def function(q, k, v):
        bias = q.float().mean((2, 3))[:, None, :, None] + k.float().mean((2, 3))[:, None, None]
        kept.append(weakref.ref(bias))
        return cupyflash.attention(q, k, v, bias=bias, score=score)

    qkv = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = checkpoint(function, *qkv, use_reentrant=False)
    assert kept[0]() is None
    again = torch.autograd.grad(out, qkv, inputs.dout)
    right = torch.autograd.grad(function(*qkv), qkv, inputs.dout)
    assert len(kept) == 3
    for x, y in zip(again, right):  # another bias differs by far more
        torch.testing.assert_close(x, y)


@each(library="torch")
def test_selective_checkpoint_knows_the_operator(target, monkeypatch):
    """Its output may be kept: then the backward computes it no second time."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    inputs = target.inputs("float16", seqlen_q=20)
    # An error inside of the checkpoint, which skips the test, would leave torch's mode on.
    cupyflash.attention(inputs.q, inputs.k, inputs.v)
    calls, compute = [], dispatch.forward

    def counted(*arguments, **options):
        calls.append(arguments[0])
        return compute(*arguments, **options)

    def policy(context, operator, *arguments, **options):
        keep = str(operator).startswith("cupyflash.attention")  # which of them, the options decide
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def function(*qkv):
        return checkpoint(
            lambda q, k, v: cupyflash.attention(q * 1, k, v),
            *qkv,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    monkeypatch.setattr(dispatch, "forward", counted)
    expected(inputs).check(**results(function, inputs))
    assert calls == ["attention"]


@each(library="torch")
@pytest.mark.parametrize("operator", [False, True], ids=["eager", "operator"])
def test_no_second_derivative(target, operator):
    """An error, not gradients that look like constants."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    inputs = target.inputs("float16", seqlen_q=20)
    q, k, v = leaves(inputs)
    with FlopCounterMode(display=False) if operator else contextlib.nullcontext():
        out = cupyflash.attention(q, k, v)
    (dq,) = torch.autograd.grad(out, q, inputs.dout, create_graph=True)
    expected(inputs).check(dq=dq)
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        (dq.sum() + q.sum()).backward()


@each(library="torch")
def test_shapes_without_data(target):
    """Fake and meta tensors: shapes and strides of the results, nothing computed."""
    from torch._subclasses import FakeTensorMode

    inputs = target.inputs("float16", seqlen_q=20, layout="bhsd", storage="transposed")
    qkv = inputs.q, inputs.k, inputs.v
    out = cupyflash.attention(*qkv, layout="bhsd")
    meta = cupyflash.attention(*(x.to("meta") for x in qkv), layout="bhsd")
    with FakeTensorMode() as mode:
        fake = cupyflash.attention(*map(mode.from_tensor, qkv), layout="bhsd")
    for x in (meta, fake):
        assert (x.shape, x.dtype) == (out.shape, out.dtype)
    assert fake.stride() == out.stride()
