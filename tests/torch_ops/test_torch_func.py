"""Transforms of torch.func: vmap, and gradients of each sample."""

import contextlib
import dataclasses

import pytest
from matrix import each, each_library

import cupyflash
from cupyflash.testing import expected, make_alibi_slopes


@each(library="torch")
@pytest.mark.parametrize("extra", [None, "bias", "mapped bias", "alibi_slopes", "seqused_k"])
def test_vmap(target, extra):
    """Over q and v, along different axes, with one k for all."""
    import torch

    device = target.device
    inputs = target.inputs("float16", batch=6, seqlen_q=20, seqlen_k=27, heads_q=4, heads_kv=2)
    q, k, v = (x.unflatten(0, (3, 2)) for x in (inputs.q, inputs.k, inputs.v))
    k, extras, mapped = k[0], {}, None
    if extra == "bias":
        extras["bias"] = torch.randn(2, 1, 20, 27, device=device)
    elif extra == "mapped bias":
        mapped = torch.randn(3, 4, 20, 27, device=device)
    elif extra == "alibi_slopes":
        extras[extra] = make_alibi_slopes(4, "torch", batch=2, device=device)
    elif extra == "seqused_k":
        extras[extra] = torch.tensor([3, 27], dtype=torch.int32, device=device)

    def function(q, k, v, bias):
        options = extras if bias is None else {**extras, "bias": bias}
        return cupyflash.attention(q, k, v, causal=True, return_lse=True, **options)

    dims = (0, None, 1, None if mapped is None else 0)
    found = torch.func.vmap(function, dims, (1, 0))(q, k, v.movedim(0, 1), mapped)
    loop = [function(q[i], k, v[i], None if mapped is None else mapped[i]) for i in range(3)]
    out, lse = (torch.stack(x) for x in zip(*loop))
    assert torch.equal(found[0].movedim(1, 0), out) and torch.equal(found[1], lse)


@each(library="torch")
def test_vmap_of_what_is_not_built(target):
    import torch

    inputs = target.inputs("float16", seqlen_q=20)
    q = inputs.q
    sinks = torch.zeros(2, 4, device=target.device)
    lengths = torch.tensor([0, 20], dtype=torch.int32, device=target.device)
    cases = {
        "over sinks": lambda q, sinks: cupyflash.attention(q, q, q, sinks=sinks),
        "with dropout": lambda q, _: cupyflash.attention(q, q, q, dropout_p=0.5, dropout_seed=1),
        "of packed sequences": lambda q, _: cupyflash.flash_attn_varlen_func(
            q[0], q[0], q[0], lengths, lengths, 20, 20
        ),
        "of packed  sequences": lambda q, _: cupyflash.flash_attn_varlen_func(
            q, q[0], q[0], None, lengths, 20, 20
        ),
    }
    for what, function in cases.items():
        match = f"torch.func.vmap {what} is not built".replace("  ", " ")
        with pytest.raises(NotImplementedError, match=match):
            torch.func.vmap(function)(q[:, None], sinks)


@each_library(library="torch")
@pytest.mark.parametrize("seen", [False, True], ids=["plain", "dispatch mode"])
@pytest.mark.parametrize("name", ["attention", "score", "layer_norm", "group_norm", "mlp"])
def test_several_gradients_at_once_are_refused(target, name, seen):
    """Those of is_grads_batched=True have no memory that a kernel could read."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    if name == "mlp" and seen:
        pytest.skip("its operator has a gradient of torch's operations")
    x = torch.randn(2, 8, 4, 8, device=target.device, requires_grad=True)
    weight = torch.randn(8, 8, device=target.device)
    function = {
        "attention": lambda: cupyflash.attention(x, x, x),
        "score": lambda: cupyflash.attention(x, x, x, score=lambda s, b, h, q, k: s - q),
        "layer_norm": lambda: cupyflash.layer_norm(x, weight[0]),
        "group_norm": lambda: cupyflash.group_norm(x, 2),
        "mlp": lambda: cupyflash.mlp(x, weight, weight, gate_weight=weight, activation="silu"),
    }[name]
    with FlopCounterMode(display=False) if seen else contextlib.nullcontext():
        out = function()
    several = torch.randn(3, *out.shape, device=target.device)
    gradients = lambda: torch.autograd.grad(out, x, several, is_grads_batched=True)
    if name == "mlp" and not target.gpu:  # operations of torch, which take them
        assert gradients()[0].shape == several.shape
        return
    with pytest.raises(NotImplementedError, match="several gradients at once .* are not built"):
        gradients()


@each(library="torch")
def test_gradients_of_each_sample(target):
    """torch.func.grad in torch.func.vmap; k and v are the same for all samples."""
    import torch

    inputs = target.inputs("float16", batch=3, seqlen_q=20)
    k, v = inputs.k[0], inputs.v[0]
    repeated = dataclasses.replace(inputs, k=k.repeat(3, 1, 1, 1), v=v.repeat(3, 1, 1, 1))

    def loss(q, k, v, dout):
        out = cupyflash.attention(q[None], k[None], v[None], causal=True)
        return (out[0].double() * dout.double()).sum()

    gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), (0, None, None, 0))
    dq, dk, dv = gradients(inputs.q, k, v, inputs.dout)
    expected(repeated, causal=True).check(dq=dq, dk=dk, dv=dv)
