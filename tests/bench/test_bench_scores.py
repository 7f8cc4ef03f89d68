"""The calls of `bench scores`, and those of `bench host_time` that torch compiles."""

from types import SimpleNamespace

import pytest

from cupyflash.ops.attention.kind import BOOL, Features
from cupyflash.ops.attention.sm90 import boolean_bias
from cupyflash.testing.problem import Problem

torch = pytest.importorskip("torch", reason="the benchmarks compare with torch")

from bench.attention import host_time  # noqa: E402
from bench.lib import data  # noqa: E402
from bench.lib.providers import Provider  # noqa: E402
from bench.scores.calls import Prepared  # noqa: E402
from bench.scores.problems import BUILT_IN, OURS  # noqa: E402


@pytest.mark.parametrize(
    ("impl", "bias", "wanted"), [(OURS, BOOL, True), (OURS, 0, False), (BUILT_IN, BOOL, False)]
)
def test_a_boolean_bias_alone_becomes_a_text(impl, bias, wanted):
    problem = SimpleNamespace(features=Features(bias=bias))
    found = Prepared.planned(None, impl, lambda: boolean_bias.is_text(problem))
    assert found == wanted


def test_dynamo_compiles_more_calls_than_it_keeps_for_a_function(monkeypatch):
    monkeypatch.setattr(data, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda f, **options: functions.append(f) or f)
    problem, functions = Problem("float32", 16, 1, 4, 1, 1, False), []
    provider = Provider("sum", lambda: lambda q, k, v, causal: q + k + v)
    for pass_ in host_time.PASSES:
        host_time.torch_call(provider, problem, pass_, "compiled")()
    assert len({id(f.__code__) for f in functions}) == len(host_time.PASSES)
