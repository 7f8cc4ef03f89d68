"""bench.models without a GPU: the shapes, runs of small ones, what a wrong result does."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.attention import models  # noqa: E402
from bench.attention.model_shapes import DOCUMENTS, MODELS, PADDING, PAIR, SENTENCES, model  # noqa: E402
from bench.lib import data, providers, report  # noqa: E402
from bench.lib.providers import PROVIDERS, Call, Provider  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
STARTS = (("fwd ", "bwd "), "where flash-attn-3 runs, ", "flash-attn-3 as the peer, ")
# One of each kind; sdpa-math does all but softcap, sinks, and a window in packed sequences.
SMALL = (
    model("Groups", 1, 150, 4, 16, heads_kv=2, causal=True),
    model("Window", 1, 150, 4, 16, heads_kv=2, causal=True, window=(20, 0)),
    model("Documents", 1, 100, 2, 16, lengths=(60, 1, 39)),
    model("Local", 1, 300, 2, 16, lengths=(60, 1, 239), window=(9, 9)),
    model("Softcap", 1, 150, 2, 16, softcap=5.0),
    model("Sinks", 1, 150, 4, 16, heads_kv=2, causal=True, sinks=True, window=(20, 0)),
    model("Pair", 3, 49, 2, 16, bias=PAIR, scale=1.0),
    model("Padding", 2, 150, 2, 16, bias=PADDING),
    model("Cross", 2, 150, 2, 16, keys=77, head_dim_v=24),
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """bench.models on small models; returns its exit status and its results."""
    torch = without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(models, "MODELS", SMALL)

    def run(*arguments, provider=None):
        if provider is not None:
            fake = Provider("cupyflash", provider)
            monkeypatch.setitem(PROVIDERS, "cupyflash", fake)
        status = models.main([*arguments, "--repeats", "3"])
        return status, json.loads((tmp_path / "models.json").read_text())

    run.torch, run.path = torch, tmp_path
    return run


def test_shapes(capsys):
    names = [x.name for x in MODELS]
    assert len(names) == len(set(names)) >= 30
    for shape in (x.problem for x in MODELS):
        assert shape.heads % shape.heads_kv == 0 and shape.dtype == "bfloat16"
    for x in MODELS:
        if lengths := x.options.get("lengths"):
            assert sum(lengths) == x.problem.seqlen and x.problem.batch == 1
    assert (sum(DOCUMENTS), sum(SENTENCES)) == (8192, 16384)
    by_name = {x.name: str(x) for x in MODELS}
    assert by_name["Llama 3 70B on 8 GPUs"] == "1 x 8192, 8/1 heads, D=128, causal"
    assert by_name["Swin-B, 64 images"] == "4096 x 49, 4 heads, D=32, pair bias, trained"
    assert by_name["SD 1.5, cross"] == "4 x 4096/77, 8 heads, D=40"
    assert models.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for x in MODELS for text in (x.name, str(x)))


def test_dry_run(run, capsys):
    pytest.importorskip("matplotlib")
    status, results = run("--providers", "cupyflash", "sdpa-math", "torch-varlen")
    assert status == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed and "cupyflash left out" not in printed
    did = {(x["what"], x["pass"], x["impl"]) for x in results["rows"]}
    passes, names = ("fwd", "bwd"), {x.name for x in SMALL}
    assert {(x, y) for x, y, impl in did if impl == "cupyflash"} == {
        (name, y) for name in names for y in passes
    }
    of_peer = {x for x, _, impl in did if impl == "sdpa-math"}
    assert of_peer == names - {"Softcap", "Sinks", "Local"}
    assert (
        "sdpa-math left out from fwd Softcap on: NotImplementedError: SDPA has no softcap"
        in printed
    )
    (row,) = (
        x
        for x in results["rows"]
        if (x["what"], x["impl"]) == ("Cross", "sdpa-math") and x["pass"] == "fwd"
    )
    assert (row["seqlen_q"], row["seqlen_k"], row["quartiles_ms"]) == (150, 77, [0.9, 1.1])
    page = (run.path / "models.md").read_text()
    line = next(x for x in page.splitlines() if "Softcap" in x)
    assert [x.strip() for x in line.split("|")[1:-1]] == [
        "Softcap", "1 x 150, 2 heads, D=16, softcap 5", "fwd", "1000.0", "-", "-",
    ]  # fmt: skip
    assert "fwd cupyflash: 1.000 x the best peer, geometric mean of 6; 6 at or above 1" in page
    assert "python -m bench models --providers" in page and "sdpa-math: 1" not in page
    picture = (run.path / "models.svg").read_text()
    assert "Padding" in picture and "Softcap" not in picture and "#D55E00".lower() in picture


def test_only(run, capsys):
    _, results = run("--only", "cross", "groups", "--pass", "fwd", "--providers", "cupyflash")
    assert [x["what"] for x in results["rows"]] == ["Groups", "Cross"]
    with pytest.raises(SystemExit):
        run("--only", "nothing")


@pytest.mark.parametrize("name", ["window", "lengths", "softcap", "sinks", "bias", "scale"])
def test_an_option_that_is_not_kept_is_wrong(run, capsys, name):
    """Each option, ignored by cupyflash, fails the check of the forward."""
    ours, left_out = PROVIDERS["cupyflash"].load, []

    def without(**options):
        left_out.append(options.pop(name, None))
        return ours(**options)

    kinds = {"window": "Local", "lengths": "Documents", "bias": "Padding", "scale": "Pair"}
    model = kinds.get(name, name.capitalize())
    with pytest.raises(SystemExit, match="nothing was measured"):
        run("--only", model, "--pass", "fwd", "--providers", "cupyflash", provider=without)
    assert left_out[0] is not None
    assert "WRONG RESULT: out" in capsys.readouterr().out


@pytest.mark.parametrize("name, model", [("bias", "Pair"), ("sinks", "Sinks")])
def test_a_wrong_gradient_of_an_option(run, capsys, name, model):
    ours = PROVIDERS["cupyflash"].load

    def twice_as_large(**options):
        x = options[name]
        if x.requires_grad:
            x = 2 * x - x.detach()
        return ours(**{**options, name: x})

    status, results = run("--only", model, "--providers", "cupyflash", provider=twice_as_large)
    assert status == 1 and [x["pass"] for x in results["rows"]] == ["fwd"]
    assert f"WRONG RESULT: d{name}" in capsys.readouterr().out


def test_a_forward_wants_no_gradient(run):
    torch, pair = run.torch, next(x for x in SMALL if x.name == "Pair")
    options, seen = pair.make_options(), []

    def load(**options):
        seen.append(options["bias"].requires_grad)
        return PROVIDERS["cupyflash"].load(**options)

    call = Call(Provider("x", load), data.of_problem(pair.problem), False, **options)
    assert not call.forward().requires_grad and seen == [False]
    assert [x.shape for x in call.backward()][3] == options["bias"].shape and seen == [False, True]
    assert torch.equal(call.forward(), call.graph[0])


def test_sdpa_takes_windows_and_packed_sequences(run):
    """Both against one bool mask."""
    torch = run.torch
    q, k, v, _ = data.of_problem(dataclasses.replace(SMALL[2].problem, seqlen=6))
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
    import sys

    pytest.importorskip("torch")
    called = []
    fake = SimpleNamespace(flash_attn_func=lambda *x, **options: called.append(options))
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    load = PROVIDERS["flash-attn-2"].load
    load(scale=2.0, window=(3, 0), softcap=5.0)(1, 2, 3, True)
    assert called == [{"causal": True, "softmax_scale": 2.0, "window_size": (3, 0), "softcap": 5.0}]
    with pytest.raises(NotImplementedError, match="flash_attn has no bias, sinks"):
        load(bias=1, sinks=2)
    with pytest.raises(NotImplementedError, match=providers.VARLEN_ONLY):
        PROVIDERS["torch-varlen"].load()


def test_the_page_of_the_results(tmp_path, monkeypatch):
    """That of models.json: nothing in it is cut, and bench/README.md has its means."""
    results = json.loads((report.RESULTS / "models.json").read_text())
    page = (report.RESULTS / "models.md").read_text()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lines = models.summary(results["rows"])
    report.write_page("models", results, [models.models_table(results["rows"])], lines)
    assert (tmp_path / "models.md").read_text() == page
    assert "…" not in page and "| FA2 varlen |" in page and "| ratio |" in page
    best, where, beside = ([line for line in lines if line.startswith(x)] for x in STARTS)
    assert [len(x) for x in (best, where, beside)] == [2, 2, 2]
    readme = " ".join((ROOT / "bench" / "README.md").read_text().split())
    for text, (backward, forward) in (
        ("is {0} forward (all at or above 1) and {1} backward", best),
        ("the ratio to the best peer is {0} and {1}, and", where),
        ("to FlashAttention-3 itself {0} and {1}.", beside),
    ):
        means = [f"{float(re.search(r': ([.0-9]+) x', x)[1]):.2f}" for x in (forward, backward)]
        assert text.format(*means) in readme
