"""The providers of attention: how each option and layout reaches the library."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_modules
from small_benchmarks import MODELS

from bench.lib import data, providers
from bench.lib.providers import PROVIDERS, Call, Provider


def test_a_forward_wants_no_gradient(benchmarks):
    pair = next(x for x in MODELS if x.name == "Pair")
    options, seen = pair.make_options(), []

    def load(**options):
        seen.append(options["bias"].requires_grad)
        return PROVIDERS["cupyflash"].load(**options)

    call = Call(Provider("x", load), data.of_problem(pair.problem), False, **options)
    assert not call.forward().requires_grad and seen == [False]
    assert [x.shape for x in call.backward()][3] == options["bias"].shape and seen == [False, True]
    assert torch.equal(call.forward(), call.graph[0])


def test_sdpa_takes_windows_and_packed_sequences(benchmarks):
    """Both against one bool mask."""
    q, k, v, _ = data.of_problem(dataclasses.replace(MODELS[2].problem, seqlen=6))
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    block = torch.block_diag(torch.ones(4, 4), torch.ones(2, 2)).bool()
    near = torch.tensor([[-2 <= j - i <= 1 for j in range(6)] for i in range(6)])
    math = PROVIDERS["sdpa-math"]
    for options, causal, mask in [
        ({"lengths": (4, 2)}, False, block),
        ({"window": (2, 1)}, False, near),
        ({"window": (2, 1)}, True, near.tril()),
    ]:
        out, expected = math.load(**options)(q, k, v, causal), math.load(bias=mask)(q, k, v, False)
        # torch's own attention twice, by two ways to give it the mask.
        torch.testing.assert_close(out, expected)
    for wrong in ({"lengths": (4, 2), "window": (2, 1)}, {"sinks": q}):
        with pytest.raises(NotImplementedError):
            math.load(**wrong)


def test_flash_attn_gets_its_own_names(monkeypatch):

    pytest.importorskip("torch")
    called = []
    fake = SimpleNamespace(flash_attn_func=lambda *x, **options: called.append(options))
    fake_modules(monkeypatch, flash_attn=fake)
    load = PROVIDERS["flash-attn-2"].load
    load(scale=2.0, window=(3, 0), softcap=5.0)(1, 2, 3, True)
    assert called == [{"causal": True, "softmax_scale": 2.0, "window_size": (3, 0), "softcap": 5.0}]
    with pytest.raises(NotImplementedError, match="flash_attn has no bias, sinks"):
        load(bias=1, sinks=2)
    with pytest.raises(NotImplementedError, match=providers.VARLEN_ONLY):
        PROVIDERS["torch-varlen"].load()


@pytest.mark.parametrize("layout", [providers._packed, providers._jagged])
def test_gradients_of_packed_sequences_are_not_copied(benchmarks, layout):
    """A view of the one batch has a view as its gradient; that of x[0] is a copy among zeros."""
    attention = layout(lambda q, k, v, *packing, causal=True: q + k + v, [2, 3])
    shape = (1, 5, 2, 4) if layout is providers._packed else (1, 2, 5, 4)
    x = torch.ones(shape, requires_grad=True)
    left, names = [attention(x, x, x, True).grad_fn], set()
    while left:
        node = left.pop()
        names.add(node.name())
        left += [after for after, _ in node.next_functions if after is not None]
    assert "SqueezeBackward1" in names and not any("Select" in name for name in names), names
