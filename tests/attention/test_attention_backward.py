"""The backward pass on every target: through autograd for torch, attention_backward otherwise."""

import pytest
from attention_cases import cases
from matrix import each, each_case
from passes import explicit_gradients, forward_backward
from targets import TARGETS

import cupyflash
from cupyflash.testing import expected, poison_free_memory, to_float64


def gradients(inputs, library, **options):
    """(dq, dk, dv) as a user of the library gets them."""
    options["layout"] = inputs.layout
    if library == "torch":
        import torch

        qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        return torch.autograd.grad(cupyflash.attention(*qkv, **options), qkv, inputs.dout)
    return explicit_gradients(inputs, **options)


def poison(target, inputs):
    """Leave NaN where the gradients and the float32 accumulators are likely to be allocated."""
    sizes = [x.nbytes for x in (inputs.q, inputs.k, inputs.v)]
    poison_free_memory(target.library, target.device, [*sizes, 2 * sizes[0]])


@each_case(cases, TARGETS)
def test_backward(target, case):
    inputs, options = case.problem(target)
    poison(target, inputs)
    results = forward_backward(inputs, **options)
    names = results.keys() - {"out", "lse"}
    expected(inputs, **options).check(**{name: results[name] for name in sorted(names)})


@each()
def test_gradients_of_rows_without_a_key_are_zero(target):
    inputs = target.inputs("float16", seqlen_q=150, seqlen_k=20)
    poison(target, inputs)
    dq, dk, dv = gradients(inputs, target.library, causal=True)
    assert (to_float64(dq)[:, :130] == 0).all()
    expected(inputs, causal=True).check(dq=dq, dk=dk, dv=dv)


@each()
def test_gradients_of_keys_without_a_query_are_zero(target):
    inputs = target.inputs("float16", seqlen_q=20, seqlen_k=150)
    poison(target, inputs)
    dq, dk, dv = gradients(inputs, target.library, causal="top-left")
    assert (to_float64(dk)[:, 20:] == 0).all() and (to_float64(dv)[:, 20:] == 0).all()
    expected(inputs, causal="top-left").check(dq=dq, dk=dk, dv=dv)


@each()
@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 0, "seqlen_q": 3},
        {"seqlen_q": 0, "seqlen_k": 3},
        {"seqlen_q": 3, "seqlen_k": 0},
        {"seqlen_q": 3, "heads_q": 0, "heads_kv": 0},
    ],
    ids=str,
)
def test_empty(target, shape):
    inputs = target.inputs("float16", **shape)
    poison(target, inputs)
    for x, gradient in zip((inputs.q, inputs.k, inputs.v), gradients(inputs, target.library)):
        assert gradient.shape == x.shape and (to_float64(gradient) == 0).all()


@each()
def test_attention_backward_without_autograd(target):
    """The explicit function takes the tensors of every library."""
    inputs = target.inputs("float16", seqlen_q=70, heads_q=4, heads_kv=2, layout="bhsd")
    dq, dk, dv = explicit_gradients(inputs, layout="bhsd", causal=True)
    expected(inputs, causal=True).check(dq=dq, dk=dk, dv=dv)


@each(device="cuda")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 30)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_is_bitwise_repeatable(target, head_dim, options):
    inputs = target.inputs(
        target.dtypes[0], batch=3, seqlen_q=1500, heads_q=8, heads_kv=2, head_dim=head_dim
    )
    first = explicit_gradients(inputs, deterministic=True, **options)
    for _ in range(3):
        again = explicit_gradients(inputs, deterministic=True, **options)
        for name, a, b in zip(("dq", "dk", "dv"), first, again):
            assert (a == b).all(), f"{name} differs between two runs"
    expected(inputs, **options).check(**dict(zip(("dq", "dk", "dv"), first)))


@each(library="torch")
def test_flash_attn_func_has_gradients(target):
    import torch

    inputs = target.inputs("float16", seqlen_q=65, heads_q=4, heads_kv=2)
    qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = cupyflash.flash_attn_func(*qkv, causal=True, window_size=(20, 0), deterministic=True)
    dq, dk, dv = torch.autograd.grad(out, qkv, inputs.dout)
    expected(inputs, causal=True, window=(20, 0)).check(dq=dq, dk=dk, dv=dv)


@each(library="torch")
def test_packed_forms_have_packed_gradients(target):
    import torch

    inputs = target.inputs("float16", seqlen_q=65)
    exact = expected(inputs, causal=True)
    qkv = torch.stack([inputs.q, inputs.k, inputs.v], 2).requires_grad_()
    out = cupyflash.flash_attn_qkvpacked_func(qkv, causal=True)
    (dqkv,) = torch.autograd.grad(out, [qkv], inputs.dout)
    exact.check(**dict(zip(("dq", "dk", "dv"), dqkv.unbind(2))))
    q, kv = inputs.q.detach().requires_grad_(), qkv[:, :, 1:].detach().requires_grad_()
    out = cupyflash.flash_attn_kvpacked_func(q, kv, causal=True)
    dq, dkv = torch.autograd.grad(out, [q, kv], inputs.dout)
    exact.check(dq=dq, **dict(zip(("dk", "dv"), dkv.unbind(2))))


@each(library="torch")
def test_gradient_of_some_inputs_only(target):
    """Frozen K: its gradient is None, the others are as ever; dout may be an expanded scalar."""
    inputs = target.inputs("float16", seqlen_q=65)
    q, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.v))
    cupyflash.attention(q, inputs.k, v).sum().backward()
    ones = type(inputs)(inputs.q, inputs.k, inputs.v, inputs.dout * 0 + 1, inputs.dtype)
    assert inputs.k.grad is None
    expected(ones).check(dq=q.grad, dv=v.grad)
