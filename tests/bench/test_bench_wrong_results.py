"""A wrong result of any benchmark is told, is in no table, and fails the run.

Runs are those of small_benchmarks.py.
"""

import functools

import pytest
import torch

import cupyflash
from bench.attention import extras
from bench.decode.decode import DecodeProblem
from bench.decode.transformer import BlockProblem
from bench.diffusion.unet import UnetProblem
from bench.engine import ours as engine
from bench.lib.providers import PROVIDERS, Provider
from bench.linear import problems as linear
from bench.linear import training
from bench.norm import problems as norms
from bench.transformers import gpt, train_char_gpt
from cupyflash.models.gpt2 import Gpt2


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.05 * gradient


def larger(call):
    """A call whose results are 1 % too large."""

    @functools.wraps(call)
    def wrong(*arguments, **options):
        found = call(*arguments, **options)
        return tuple(1.01 * x for x in found) if isinstance(found, tuple) else 1.01 * found

    return wrong


def of_ours(method):
    """A method call(problem, impl, tensors) of problems, wrong for cupyflash."""

    def call(problem, impl, tensors):
        right = method(problem, impl, tensors)
        return larger(right) if impl == "cupyflash" else right

    return call


def wrong_loop(problem, kind, graph, right=UnetProblem.our_loop):
    return larger(right(problem, kind, graph))


def wrong_weight(problem, weight1, right=linear.ours, **others):
    return right(problem, weight1=WrongGradient.apply(weight1), **others)


def wrong_norm(op, right=norms._ours):
    return larger(right(op))


def wrong_logits(model, given, right=Gpt2.logits):
    return [1.01 * x for x in right(model, given)]


def zeros(q, k, v, **options):
    return torch.zeros_like(q)


WRONG = {  # what is replaced, by what, and further arguments
    "linear": ((linear, "ours"), larger(linear.ours), "--ops mlp"),
    "linear_training": ((training, "ours"), wrong_weight, "--ops mlp"),
    "norms": ((norms, "_ours"), wrong_norm, "--ops rms_norm"),
    "decode": ((DecodeProblem, "call"), of_ours(DecodeProblem.call), ""),
    "transformer": ((BlockProblem, "call"), of_ours(BlockProblem.call), ""),
    "unet": ((UnetProblem, "our_loop"), wrong_loop, "--samplers ddim"),
    "gpt2": ((Gpt2, "logits"), wrong_logits, ""),
    "engine": ((engine, "whole_logits"), larger(engine.whole_logits), ""),
    "masks": ((cupyflash, "attention"), zeros, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result(benchmarks, monkeypatch, capsys, name):
    place, wrong, arguments = WRONG[name]
    monkeypatch.setattr(*place, wrong)
    status, results = benchmarks.run(name, *arguments.split())
    ours = [row for row in results["rows"] if row["impl"].startswith("cupyflash")]
    # Nothing compares dropout and lengths, whose tests are those of the package.
    assert status == 1 and {row.get("what") for row in ours} <= {"dropout 0.1", "lengths S/2"}
    assert results["rows"] and "WRONG RESULT: " in capsys.readouterr().out


def provider(name, attention, monkeypatch):
    replaced(monkeypatch, Provider(name, lambda **options: attention, layout="bhsd"))


def replaced(monkeypatch, provider):
    monkeypatch.setitem(PROVIDERS, provider.name, provider)


def test_wrong_passes_of_attention(benchmarks, monkeypatch, capsys):
    math = PROVIDERS["sdpa-math"].load()
    provider("sdpa-efficient", lambda *x: 1.2 * math(*x), monkeypatch)
    wrong_k = lambda q, k, v, causal: math(q, WrongGradient.apply(k), v, causal)
    provider("cupyflash-simt", wrong_k, monkeypatch)
    names = ("sdpa-math", "sdpa-efficient", "cupyflash-simt", "flash-attn-4")
    status, results = benchmarks.run("attention", "--providers", *names)
    assert status == 1  # one of ours was wrong
    timed = {(x["pass"], x["impl"]) for x in results["rows"]}
    # A wrong forward is in no table; a wrong backward, in none of the backward.
    assert timed == {("fwd", "sdpa-math"), ("fwd", "cupyflash-simt"), ("bwd", "sdpa-math")}
    printed = capsys.readouterr().out
    assert "sdpa-efficient left out from fwd" in printed and "WRONG RESULT: out" in printed
    assert "cupyflash-simt left out from bwd" in printed and "WRONG RESULT: dk" in printed
    assert "flash-attn-4 left out" in printed and "No module named" in printed
    status, results = benchmarks.run("attention", "--providers", "sdpa-math", "sdpa-efficient")
    assert status == 0  # a peer was


@pytest.mark.parametrize("name", ["window", "lengths", "softcap", "sinks", "bias", "scale"])
def test_an_option_that_is_not_kept_is_wrong(benchmarks, monkeypatch, capsys, name):
    """Each option, ignored by cupyflash, fails the check of the forward."""
    ours, left_out = PROVIDERS["cupyflash"].load, []

    def without(**options):
        left_out.append(options.pop(name, None))
        return ours(**options)

    replaced(monkeypatch, Provider("cupyflash", without))
    kinds = {"window": "Local", "lengths": "Documents", "bias": "Padding", "scale": "Pair"}
    of_model = ("--only", kinds.get(name, name.capitalize()), "--pass", "fwd")
    with pytest.raises(SystemExit, match="nothing was measured"):
        benchmarks.run("models", *of_model, "--providers", "cupyflash")
    assert left_out[0] is not None
    assert "WRONG RESULT: out" in capsys.readouterr().out


@pytest.mark.parametrize("name, model", [("bias", "Pair"), ("sinks", "Sinks")])
def test_a_wrong_gradient_of_an_option(benchmarks, monkeypatch, capsys, name, model):
    ours = PROVIDERS["cupyflash"].load

    def twice_as_large(**options):
        x = options[name]
        if x.requires_grad:
            x = 2 * x - x.detach()
        return ours(**{**options, name: x})

    replaced(monkeypatch, Provider("cupyflash", twice_as_large))
    status, results = benchmarks.run("models", "--only", model, "--providers", "cupyflash")
    assert status == 1 and [x["pass"] for x in results["rows"]] == ["fwd"]
    assert f"WRONG RESULT: d{name}" in capsys.readouterr().out


def test_a_window_that_is_not_kept(benchmarks, monkeypatch, capsys):
    all_keys = lambda variant, tensors: extras.Call(PROVIDERS["cupyflash"], tensors, True)
    monkeypatch.setattr(extras.Variant, "call", all_keys)
    with pytest.raises(SystemExit, match="nothing was measured"):
        benchmarks.run("extras", "--only", "window")
    printed = capsys.readouterr().out
    assert "window left out from fwd on: WRONG RESULT: out" in printed
    assert "0 of 0 targets met, 2 not run" in printed


def test_a_backward_must_repeat_its_bits():
    gradients, runs = torch.ones(3, 4, dtype=torch.bfloat16), []

    def backward():
        runs.append(1)
        last_run = len(runs) == 50
        return gradients, gradients, gradients * 1.01 if last_run else gradients.clone()

    with pytest.raises(AssertionError, match="dv: run 50 of 50"):
        extras.assert_repeatable(backward)
    extras.assert_repeatable(lambda: (gradients, gradients, gradients.clone()))


def sees_the_future(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_a_curve_that_parts(benchmarks, monkeypatch, capsys):
    monkeypatch.setitem(gpt.IMPLEMENTATIONS, "cupyflash", (sees_the_future, None))
    assert benchmarks.run("train_char_gpt")[0] == 1
    assert "WRONG: the curve of cupyflash" in capsys.readouterr().out
    assert not train_char_gpt.coincides({"distance": float("nan"), "allowed": 1.0})


def test_a_loss_that_is_not_that_of_the_others(benchmarks, monkeypatch, capsys):
    not_finite = lambda q, k, v: float("nan") * v
    monkeypatch.setitem(gpt.IMPLEMENTATIONS, "cupyflash", (not_finite, None))
    assert benchmarks.run("train_step")[0] == 1
    assert "WRONG RESULT" in capsys.readouterr().out
