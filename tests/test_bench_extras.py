"""bench.extras without a GPU: what is compared, how it is counted, a run without the clock."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.attention import extras  # noqa: E402
from bench.attention.extras import Variant, packed  # noqa: E402
from bench.lib import data, providers  # noqa: E402
from cupyflash.testing.problem import Problem  # noqa: E402

SMALL = Problem("bfloat16", 16, 1, 300, 4, 2, True)


def test_visited_tiles():
    for seqlen, window in ((300, None), (300, 64), (1024, 128), (1100, 300), (128, 1000)):
        left = seqlen if window is None else window
        seen = {(i // 128, j // 128) for i in range(seqlen) for j in range(max(0, i - left), i + 1)}
        assert extras.visited_tiles(seqlen, window) == len(seen)
    assert (extras.visited_tiles(16384), extras.visited_tiles(16384, 1024)) == (8256, 1116)


def test_flops():
    equal = packed(replace(SMALL, batch=4), [300] * 4)
    assert equal.problem.batch == 1 and equal.problem.seqlen == 1200
    assert equal.flops("bwd") == replace(SMALL, batch=4).flops("bwd")
    assert Variant(SMALL, window=64).flops("fwd") == SMALL.flops("fwd") * 5 / 6


def test_long_tailed_lengths():
    lengths = extras.long_tailed_lengths()
    assert min(lengths) >= 16 and max(lengths) <= 16384 and max(lengths) > 10 * sorted(lengths)[32]
    like = extras.dense_like(lengths)
    for tokens in (sum(lengths), like.batch * like.seqlen):
        assert tokens == pytest.approx(65536, rel=0.05)


def test_both_sides_of_a_ratio_are_alike():
    compared = extras.comparisons()
    assert len({x.what for x in compared}) == len(compared) == 18
    for comparison in compared:
        ours = comparison.variant.problem
        for other in (x.problem for x in comparison.references):
            assert ours.causal == other.causal and other.heads_kv == other.heads
            tokens = other.batch * other.seqlen
            assert ours.batch * ours.seqlen == pytest.approx(tokens, rel=0.05)
            hidden = ours.heads * ours.head_dim, other.heads * other.head_dim
            assert hidden[0] == pytest.approx(hidden[1], rel=0.07)


@pytest.mark.parametrize("layout", [providers._packed, providers._jagged])
def test_gradients_of_packed_sequences_are_not_copied(monkeypatch, layout):
    """A view of the one batch has a view as its gradient; that of x[0] is a copy among zeros."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(data, "DEVICE", "cpu")
    attention = layout(lambda q, k, v, *packing, causal=True: q + k + v, [2, 3])
    shape = (1, 5, 2, 4) if layout is providers._packed else (1, 2, 5, 4)
    x = torch.ones(shape, requires_grad=True)
    left, names = [attention(x, x, x, True).grad_fn], set()
    while left:
        node = left.pop()
        names.add(node.name())
        left += [after for after, _ in node.next_functions if after is not None]
    assert "SqueezeBackward1" in names and not any("Select" in name for name in names), names


def test_a_backward_must_repeat_its_bits():
    torch = pytest.importorskip("torch")
    gradients, runs = torch.ones(3, 4, dtype=torch.bfloat16), []

    def backward():
        runs.append(1)
        last_run = len(runs) == 50
        return gradients, gradients, gradients * 1.01 if last_run else gradients.clone()

    with pytest.raises(AssertionError, match="dv: run 50 of 50"):
        extras.assert_repeatable(backward)
    extras.assert_repeatable(lambda: (gradients, gradients, gradients.clone()))


def test_dry_run(tmp_path, monkeypatch, capsys):
    without_gpu(monkeypatch, tmp_path)
    plain = Variant(SMALL)
    same_bits, twice = replace(plain, deterministic=True), Variant(replace(SMALL, batch=2))
    compared = [
        extras.Comparison("packed", packed(SMALL, (150, 20, 130)), (plain,), 0.95),
        extras.Comparison("window", replace(plain, window=64), (plain,), 1.15),
        extras.Comparison("same bits", same_bits, (plain,), 1.12, ("bwd",)),
        extras.Comparison("impossible", Variant(replace(SMALL, head_dim=512)), (plain,), 0.9),
        extras.Comparison("mean", same_bits, (plain, twice), 0.9, ("fwd",)),
    ]
    monkeypatch.setattr(extras, "comparisons", lambda: compared)
    assert extras.main(["--repeats", "3"]) == 0
    results = json.loads((tmp_path / "extras.json").read_text())
    # Every call takes a millisecond, so that the rates are as the FLOPs.
    share = round((150**2 + 20**2 + 130**2) / 300**2, 4)
    assert [(x["what"], x["pass"], x["ratio"]) for x in results["rows"]] == [
        ("packed", "fwd", share),
        ("packed", "bwd", share),
        ("window", "fwd", 1.2),
        ("window", "bwd", 1.2),
        ("same bits", "bwd", 1.0),
        ("mean", "fwd", round(2 / 3, 4)),
    ]
    assert results["lengths"] == extras.long_tailed_lengths()
    printed = capsys.readouterr().out
    assert "impossible left out from fwd" in printed and "missed <= 1.15" in printed
    assert "1 of 6 targets met, 2 not run" in printed
    assert "64 sequences, 65543 tokens; least, quartiles, most: 16, 150, 429, 1051, 7324" in printed
    extras.main(["--only", "bits"])
    assert len(json.loads((tmp_path / "extras.json").read_text())["rows"]) == 1
    with pytest.raises(SystemExit):
        extras.main(["--only", "nothing"])


class Windowless(Variant):
    """A window that the kernel does not keep."""

    def call(self, tensors):
        return Variant(self.problem).call(tensors)


def test_a_wrong_result_is_told(tmp_path, monkeypatch, capsys):
    without_gpu(monkeypatch, tmp_path)
    wrong = extras.Comparison("wrong", Windowless(SMALL, window=64), (Variant(SMALL),), 1.15)
    monkeypatch.setattr(extras, "comparisons", lambda: [wrong])
    with pytest.raises(SystemExit, match="nothing was measured"):
        extras.main([])
    printed = capsys.readouterr().out
    assert "wrong left out from fwd on: WRONG RESULT: out" in printed
    assert "0 of 0 targets met, 2 not run" in printed
