"""What `bench decode` measures, on torch's CPU, and the bounds beside it."""

import pytest
import torch

from bench.decode import bars, decode
from bench.decode.decode import DecodeProblem, checked_call
from bench.engine.cache_error import CACHES, predictions, rounded
from bench.lib import data

SIZES = {"dtype": "bfloat16", "model": "small", "batch": 3, "length": 40}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(data, "DEVICE", "cpu")
    monkeypatch.setitem(decode.HEADS, "small", (4, 2, 16))


@pytest.mark.parametrize(
    "change",
    [
        {"cache": "int8", "page": 3},
        {"cache": "float8_e4m3fn", "tokens": 5},
        {"longest": 70, "tokens": 9, "page": 16},
        {"splits": 2},
        {"batch": 1, "attend_only": True},
    ],
    ids=str,
)
def test_results_are_checked(change, monkeypatch):
    problem = DecodeProblem(**SIZES | change)
    call = checked_call(problem, "cupyflash")
    assert call().shape == (problem.batch, problem.tokens, 4, 16)
    ours = DecodeProblem._ours
    wrong = lambda self, tensors: lambda: ours(self, tensors)() + 0.2  # noqa: E731
    monkeypatch.setattr(DecodeProblem, "_ours", wrong)
    with pytest.raises(AssertionError):
        checked_call(problem, "cupyflash")


def test_numbers_of_8_bits_are_exact():
    """So that 16 bits, and what is computed of them, can be compared."""
    for cache in decode.NARROW:
        for dtype in ("float16", "bfloat16"):
            problem = DecodeProblem(**SIZES | {"cache": cache, "dtype": dtype})
            for x in problem.tensors()[1:]:
                back = problem._narrow(x).double() * decode.NARROW[cache][1]
                assert torch.equal(back, x.double()) and len(x.unique()) > 30


def test_bars():
    """Each bound finds the rows of its cells; a cell that was not measured has none."""
    problems = bars.problems(DecodeProblem)
    assert len({*problems}) == len(problems) > 20
    rows = [
        problem.row(impl=impl, ms=1.0, gbps=100.0)
        for problem in problems
        for impl in ("cupyflash", "sdpa-cudnn")
    ]
    assert bars.table(rows, 100.0).row_count == len(bars.LARGE) + len(bars.BARS)
    assert 0 < bars.table(rows[:30], 100.0).row_count < len(bars.LARGE) + len(bars.BARS)


def test_rounded_keys():
    x = torch.randn(1, 2, 5, 16)
    row = x.abs().amax(-1, keepdim=True)
    assert torch.equal(rounded(x, "float32"), x)
    assert ((rounded(x, "int8") - x).abs() <= row / 253).all()
    assert ((rounded(x, "float8_e4m3fn") - x).abs() <= x.abs() / 15 + row / 448 / 512).all()


def test_a_cache_of_8_bits_changes_the_predictions_of_a_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    tokens = torch.randint(50, (40,))
    exact = model(tokens[None]).logits[0].double().detach()
    errors = [(predictions(model, tokens, x) - exact).norm() for x in CACHES]
    same, bfloat16, int8, e4m3 = errors
    assert same < bfloat16 / 100 and bfloat16 < int8 < e4m3
