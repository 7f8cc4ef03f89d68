"""bench precision and bench rounding: errors of known size, models of the tensor core.

Runs are those of small_benchmarks.py.
"""

import json
import math
from pathlib import Path

import numpy
import pytest

from bench.attention import precision, rounding, tensor_core
from bench.attention.precision import Case


def test_errors_of_the_precisions(benchmarks):
    _, results = benchmarks.run("precision", "--lengths", "64", "130")
    rows = {(row["case"], row["impl"]): row for row in results["rows"]}
    for impl, error in (("cupyflash", 1e-6), ("sdpa-math", 1e-6), ("cupyflash-bfloat16", 2e-2)):
        row = rows["normal D=128 full 130", impl]
        assert all(x < error for x in row["rms"].values()), (impl, row)
        assert error / 200 < min(row["rms"][name] for name in ("out", "dq", "dk", "dv"))
        assert all(x < 5 * error for x in row["max"].values())
    assert set(row["rms"]) == set(precision.RESULTS)
    assert "lse" not in rows["normal D=128 full 130", "sdpa-math"]["rms"]
    assert rows["logits x 100 D=128 full 130", "cupyflash"]["largest_logit"] > 300
    page = (benchmarks.folder / "precision.md").read_text()
    assert "rms error of cupyflash / sdpa-math: geometric mean " in page
    assert "outliers D=64 causal 130" in page


def test_rounding(benchmarks):
    with_fma, rounded = benchmarks.run("rounding")[1]["rows"]
    assert rounded["lse_error"] < 2e-7 and with_fma["lse_error"] > 5 * rounded["lse_error"]
    assert with_fma["warps"] == 0 and 0.2 < rounded["warps"] < rounded["rows"] < 1


def test_cases_are_different():
    cases = list(precision.cases(precision.LENGTHS))
    assert len(cases) == len(set(map(str, cases))) <= 40
    assert {x.seqlen for x in cases} == set(precision.LENGTHS)
    assert {x.spread for x in cases if x.seqlen == 4096} == set(precision.SPREADS)


@pytest.mark.parametrize("wrong", ["out", "lse", "dq", "dk", "dv"])
def test_error_of_one_number(benchmarks, wrong):
    case = Case(70, 16, causal=True)
    exact, largest = precision.exact_results(case, case.tensors())
    found = precision.results_of("cupyflash", case, case.tensors())
    assert 2 < largest < 8
    found[wrong] = found[wrong].clone()
    found[wrong].flatten()[5] += 1e-2 * exact[wrong].abs().max()
    of = precision.errors(found, exact)
    for name in precision.RESULTS:
        assert (of["max"][name] == 0.01) == (name == wrong), name
        assert (of["rms"][name] > 1e-5) == (name == wrong), name
    found[wrong].flatten()[5] = math.nan
    with pytest.raises(AssertionError, match=f"^{wrong}: not finite"):
        precision.errors(found, exact)


def model_of(extra_bits, at_once, rounded):
    """An mma that adds ``at_once`` products, which keep ``extra_bits`` below the last place."""

    def add(c, products):
        exponent = max(math.frexp(x)[1] for x in (c, *products))
        unit = 2.0 ** (exponent - 24 - extra_bits)
        total = sum(math.trunc(x / unit) * unit for x in (c, *products))
        last = 2.0 ** (math.frexp(total)[1] - 24)
        return rounded(total / last) * last

    def mma(c, a, b):
        products = (numpy.float64(a) * b).reshape(-1, at_once)
        for step in products:
            c = add(c, step)
        return c

    return mma


@pytest.mark.parametrize("extra_bits, at_once", [(1, 8), (2, 16), (3, 4)])
def test_tensor_cores_that_truncate(extra_bits, at_once):
    found = tensor_core.measure(model_of(extra_bits, at_once, math.trunc))
    assert (found["rounding"], found["extra_bits"]) == ("towards zero", extra_bits)
    assert found["at_once"] == at_once
    assert found["drift"] < -1e-5 < -2e-6 < found["drift_of_tiles"] < 0
    assert "towards zero" in str(list(tensor_core.table(found).columns[1].cells))


def test_tensor_cores_that_round():
    found = tensor_core.measure(model_of(20, 16, round))
    assert found["rounding"] == "to nearest" and abs(found["drift"]) < 1e-6
    assert tensor_core.measure(model_of(20, 16, math.floor))["rounding"] == "down"


def test_the_page_has_the_figures_of_the_results():
    """PRECISION.md quotes lines of results/precision.md, which shows results/precision.json."""
    bench = Path(precision.__file__).parent.parent
    page = (bench / "PRECISION.md").read_text()
    results = json.loads((bench / "results" / "precision.json").read_text())
    shown = [" ".join(x.split()) for x in page.splitlines()]
    for name in ("normal", "outliers", "logits x 14"):
        rows = [x for x in results["rows"] if x["case"] == f"{name} D=128 full 4096"]
        assert len(rows) == len(precision.IMPLS)
        cells = [list(column.cells) for column in precision.precision_table(rows).columns]
        for line in zip(*cells):
            assert " ".join(f"| {' | '.join(line)} |".split()) in shown, line
    for column in zip(*(x.cells for x in tensor_core.table(results["tensor_core"]).columns)):
        assert f"| {' | '.join(column)} |" in shown
    written = " ".join((bench / "results" / "precision.md").read_text().split())
    for line in precision.summary(results["rows"]):
        assert line in written and line in " ".join(shown)


@pytest.mark.parametrize("fma", [False, True])
def test_online_softmax(fma):
    """The last tile is not whole, and only it moves the maximum of row 0."""
    scores = numpy.zeros((2, 2 * rounding.TILE + 40), "float32")
    scores[0, -1] = 16.0
    lse, rescales = rounding.online(scores, fma)
    log2_scale = numpy.float32(numpy.log2(numpy.e) / rounding.HEAD_DIM**0.5)
    exact = numpy.logaddexp2.reduce(scores * numpy.float64(log2_scale), axis=1)
    assert abs(lse - exact).max() < 1e-6
    assert (rescales[:, 1] == 1).all() and rescales[0, 0] == 1
    assert abs(rescales[1, 0] * 2 ** (16 * log2_scale) - 1) < 1e-6
