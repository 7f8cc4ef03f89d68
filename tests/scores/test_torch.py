"""Scores and masks in torch.compile, torch.func and under dispatch modes: the results of eager."""

import warnings

import pytest

torch = pytest.importorskip("torch")

flex = pytest.importorskip("torch.nn.attention.flex_attention")

from passes import one_graph  # noqa: E402

import cupyflash  # noqa: E402

HEADS, LENGTH = 4, 12


def problem(cap=3.0):
    """(q, k, v, table, temperature), the score and the mask of what they are."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, LENGTH, HEADS, 16, requires_grad=True) for _ in range(3)]
    table = torch.randn(HEADS, 2 * LENGTH, requires_grad=True)
    temperature = torch.tensor(0.7, requires_grad=True)

    def score(s, b, h, q, k):
        return torch.tanh(s * temperature) * cap + table[h, k - q + LENGTH] * (b + 1)

    return (*leaves, table, temperature), score, lambda b, h, q, k: (k <= q) | (b == 1)


def results(function, leaves):
    out, lse = function(*leaves[:3])
    return out, lse, *torch.autograd.grad((out, lse), leaves, (out.detach() + 1, lse.detach()))


@pytest.mark.parametrize("parts", ["score", "mask", "score mask"])
def test_compiled(parts):
    """One graph, the same bits, also of the gradients of what the score reads."""
    leaves, score, mask = problem()
    made = {"score": cupyflash.Score(score), "mask": cupyflash.Mask(mask)}
    made = {name: x for name, x in made.items() if name in parts}
    leaves = leaves if "score" in made else leaves[:3]

    def function(q, k, v):
        return cupyflash.attention(q * 1, k, v, return_lse=True, **made)

    for x, y in zip(results(function, leaves), results(one_graph(function), leaves)):
        assert torch.equal(x, y)
    with torch.no_grad():
        assert torch.equal(one_graph(function)(*leaves[:3])[0], function(*leaves[:3])[0])


def test_compiled_flex_attention():
    leaves, score, mask = problem()
    made = cupyflash.Score(score), cupyflash.Mask(mask)
    heads_first = [x.detach().transpose(1, 2) for x in leaves[:3]]
    function = lambda q, k, v: cupyflash.flex_attention(q, k, v, *made)
    assert torch.equal(one_graph(function)(*heads_first), function(*heads_first))


def test_functions_are_traced_outside_of_a_graph():
    leaves, score, _ = problem()
    graph = one_graph(lambda q: cupyflash.attention(q, q, q, score=score))
    with pytest.raises(Exception, match="torch.compile allowed is a cupyflash.Score|Observed exc"):
        graph(leaves[0])


def test_a_block_mask_breaks_a_graph():
    """Where a graph may break, Dynamo leaves alone how a BlockMask's function is traced."""
    blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, "cpu")
    leaves, *_ = problem()
    step = lambda q, k, v: cupyflash.attention(q * 1, k, v, mask=blocks) + 1
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(step, backend="aot_eager")(*leaves[:3])
    assert torch.equal(found, step(*leaves[:3]))


def test_the_operators_pass_the_checks_of_torch():
    """Schema, fake tensors and autograd registration, of both."""
    from cupyflash.ops.attention import torch_text
    from cupyflash.ops.attention.options import NUM_EXTRAS, encode, plain_options
    from cupyflash.ops.attention.score_text.arguments import learning as learn
    from cupyflash.ops.attention.score_text.encode import decode_text, encode_text

    leaves, score, mask = problem()
    score, mask = cupyflash.Score(score), cupyflash.Mask(mask)
    plain = ([None] * NUM_EXTRAS, "attention", *encode(plain_options("attention")))
    text = f"{score.encoded}\n{mask.encoded}"
    tensors = [x for x in (*score.values, *mask.values) if isinstance(x, torch.Tensor)]
    numbers = [float(x) for x in (*score.values, *mask.values) if not isinstance(x, torch.Tensor)]
    arguments = (*plain[0], *plain[1:], text, tensors, numbers)
    torch.library.opcheck(torch_text._forward_op, (*leaves[:3], *arguments))
    qkv = [x.detach() for x in leaves[:3]]
    out, lse = torch_text._forward_op(*qkv, *arguments)
    decoded = decode_text(text)
    learning = encode_text(learn(decoded, [x.name == "table" for x in decoded.captures]))
    backward = (out, *qkv, out, lse, *plain[0], *plain[1:], learning, tensors, numbers)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch_text._backward_op, (*backward, False, lse), test_utils=checks)


def test_vmap():
    """The batch of the function is that within one entry."""
    leaves, score, mask = problem()
    made = {"score": cupyflash.Score(score), "mask": cupyflash.Mask(mask)}
    several = torch.randn(3, 2, LENGTH, HEADS, 16)

    def loss(q, k):
        out, lse = cupyflash.attention(q, k, q, return_lse=True, **made)
        return out.square().sum() + lse.sum(), out

    k = leaves[1].detach()
    with torch.no_grad():
        found = torch.func.vmap(loss, (0, None))(several, k)[1]
        assert torch.equal(found, torch.stack([loss(x, k)[1] for x in several]))
        with pytest.raises(NotImplementedError, match="vmap over what a score reads is not built"):
            torch.func.vmap(
                lambda x: cupyflash.attention(k, k, k, score=lambda s, b, h, q, k: s * x[h])
            )(torch.ones(3, HEADS))
        gradients = torch.func.vmap(torch.func.grad(lambda x: loss(x, k)[0]))(several)
    for x, gradient in zip(several, gradients):
        x = x.clone().requires_grad_()
        torch.testing.assert_close(gradient, torch.autograd.grad(loss(x, k)[0], x)[0])


def test_second_derivatives_are_refused():
    leaves, score, _ = problem()
    out = cupyflash.attention(*leaves[:3], score=score)
    (gradient,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        gradient.sum().backward()


def test_dispatch_modes_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    leaves, score, mask = problem()
    plain = cupyflash.attention(*leaves[:3], score=score, mask=mask)
    with Mode():
        found = cupyflash.attention(*leaves[:3], score=score, mask=mask)
    assert "cupyflash::attention_text" in seen and torch.equal(found, plain)
    with torch.device("meta"):
        x = torch.empty(2, LENGTH, HEADS, 16)
        table = torch.empty(HEADS)
    out = cupyflash.attention(x, x, x, score=lambda s, b, h, q, k: s * table[h])
    assert out.is_meta and out.shape == x.shape
