"""The benchmark scripts without a GPU: counting, checking, tables, files, pictures."""

import dataclasses
import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install cupyflash[bench])")

from bench import attention, bars, memory, plot, providers, report  # noqa: E402
from bench.problem import Problem, attention_flops  # noqa: E402

FULL = Problem("bfloat16", 64, 2, 256, 4, 2, False)
CAUSAL = Problem("float16", 128, 1, 512, 16, 16, True)


def row(impl, ms, shape=FULL, direction="fwd"):
    tflops = shape.flops(direction) / ms / 1e9
    fields = shape.row(impl=impl, ms=ms, tflops=tflops)
    return {"op": "attention", "pass": direction, **fields}


def test_flops():
    # Two products of 2 * seqlen_q * seqlen_k * head_dim operations for each batch and head.
    assert attention_flops(3, 5, 7, 11, 13, causal=False) == 3 * 5 * 2 * (2 * 7 * 11 * 13)
    assert FULL.flops("fwd") == 2 * 4 * 4 * 256 * 256 * 64
    assert FULL.flops("bwd") == 2.5 * FULL.flops("fwd")
    assert CAUSAL.flops("fwd") == 0.5 * attention_flops(1, 16, 512, 512, 128, causal=False)


def test_default_problems_are_those_of_the_issue():
    shapes = attention.problems(attention.parse([]))
    assert len(shapes) == 3 * 2 * 6
    assert all(x.head_dim * x.heads == 2048 and x.batch * x.seqlen == 16384 for x in shapes)
    assert {x.seqlen for x in shapes} == {512, 1024, 2048, 4096, 8192, 16384}


def test_options():
    text = "--head-dim 128 --heads 32 --heads-kv 8 --seqlen 32768 --causal yes --dtype float16"
    (shape,) = attention.problems(attention.parse(text.split()))
    assert shape == Problem("float16", 128, 1, 32768, 32, 8, True)
    assert str(shape) == "float16 D=128 B=1 S=32768 H=32/8 causal"
    with pytest.raises(SystemExit):
        attention.parse(["--providers", "nobody"])


def test_ratios_are_to_the_best_peer_of_the_cell():
    rows = [
        row("cupyflash", 1.0),
        row("cupyflash-simt", 8.0),
        row("sdpa-flash", 2.0),
        row("sdpa-math", 4.0),
        row("cupyflash", 3.0, CAUSAL),
        row("cupyflash-simt", 6.0, CAUSAL),
    ]
    assert report.ratios_to_best(rows) == [2.0, 0.25, 1.0, 0.5, 1.0, 0.5]
    assert "fwd cupyflash: 1.41 x" in "\n".join(report.geometric_means(rows))


def test_table(capsys):
    rows = [row("cupyflash", 0.5), row("sdpa-flash", 1.0)]
    report.console().print(report.attention_table(rows, 2 * rows[0]["tflops"]))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 120
    cells = [[text.strip() for text in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["problem", "impl", "ms", "TFLOP/s", "% of matmul", "vs best peer"]
    assert cells[2][:3] == ["fwd bfloat16 D=64 B=2 S=256 H=4/2 full", "cupyflash", "0.5000"]
    assert cells[2][4:] == ["50 %", "2.00"]
    assert cells[3][:2] == ["", "sdpa-flash"] and cells[3][4:] == ["25 %", "1.00"]


def cell_rows(length, rates, **changes):
    """The rows of one causal forward; ``rates`` in TFLOP/s by implementation."""
    shape = Problem("bfloat16", 128, 16384 // length, length, 16, 16, True)
    shape = dataclasses.replace(shape, **changes)
    return [row(impl, shape.flops("fwd") / rate / 1e9, shape) for impl, rate in rates.items()]


def test_bars_are_multiples_of_cudnn(capsys):
    assert [len(by_mask) for x in bars.BARS["ratios"].values() for by_mask in x.values()] == [2] * 6
    # The bars are 1.17 and 1.19 times cuDNN: one cell passes, one does not.
    rows = cell_rows(4096, {"cupyflash": 1.17 * 600.0, "sdpa-cudnn": 500.0, "sdpa-flash": 300.0})
    rows += cell_rows(8192, {"cupyflash": 1.19 * 450.0, "sdpa-cudnn": 500.0})
    bars.add_bars(rows, "NVIDIA H200")
    assert [x.get("bar_tflops") for x in rows] == [585.0, None, None, 595.0, None]
    assert bars.bar_lines(rows) == [
        "fwd cupyflash: 1.039 x the bar, geometric mean of 2 cells; 1 at or above it; "
        "below: D=128 causal 8192 (0.900)"
    ]
    report.console().print(report.attention_table(rows, 784.0))
    lines = [line for line in capsys.readouterr().out.splitlines() if "|" in line]
    vs_bar = [line.split("|")[-2].strip() for line in lines]
    assert vs_bar[0] == "vs bar" and vs_bar[2:] == ["1.20", "", "", "0.90", ""]


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float16"}, {"heads": 32}, {"heads_kv": 4}, {"batch": 1}]
    + [{"seqlen": 256, "batch": 64}, {"head_dim": 32, "heads": 64, "heads_kv": 64}],
)
def test_no_bar_outside_the_protocol(changes):
    rates = {"cupyflash": 600.0, "sdpa-cudnn": 500.0}
    rows = cell_rows(4096, rates, **changes) + cell_rows(2048, {"cupyflash": 600.0})
    bars.add_bars(rows, "NVIDIA H200")
    other_gpu = cell_rows(4096, rates)
    bars.add_bars(other_gpu, "NVIDIA A100")
    assert not any("bar_tflops" in x for x in rows + other_gpu)
    assert bars.bar_lines(rows) == []


def test_results_file(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rows = [row("cupyflash", 0.5), row("sdpa-flash", 1.0, CAUSAL, "bwd")]
    path = report.write_results("x", rows, "protocol", "command", gpu="G", versions={"a": "1"})
    results = json.loads(path.read_text())
    assert results.pop("rows") == rows
    assert results == {"gpu": "G", "versions": {"a": "1"}, "protocol": "protocol"} | {
        "command": "command"
    }
    assert [report.cell(x) for x in rows] == [("fwd", FULL), ("bwd", CAUSAL)]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_predicted_memory(direction):
    rows, accum_rows = 2 * 4 * 200, 2 * 4 * 256  # rows of a tile of 128 lie in the accumulator
    expected = {
        "fwd": rows * 64 * 2 + rows * 4,
        "bwd": (rows + 2 * rows // 2) * 64 * 2 + accum_rows * (64 + 1 + 1) * 4,
    }
    shape = Problem("bfloat16", 64, 2, 200, 4, 2, True)
    assert memory.predicted_bytes(shape, direction) == expected[direction]


def test_plot(tmp_path):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    rows = [row(impl, 1.0, x) for impl in ("cupyflash", "sdpa-math") for x in (FULL, CAUSAL)]
    rows[0]["bar_tflops"] = 1.2 * rows[0]["tflops"]
    results = {"gpu": "G", "matmul_tflops": 784.0, "rows": rows}
    (tmp_path / "x.json").write_text(json.dumps(results))
    plot.main([str(tmp_path / "x.json")])
    assert [path.name for path in tmp_path.glob("*.png")] == ["x-fwd.png"]  # no row is backward
    results["rows"] += [{**x, "pass": "bwd"} for x in rows]
    (tmp_path / "y.json").write_text(json.dumps(results))
    plot.main([str(tmp_path / "y.json")])
    pictures = {path.name for path in tmp_path.glob("y-*.png")}
    assert pictures == {"y-fwd.png", "y-bwd.png", "y-causal.png"}
    assert set(plot.COLOURS) == set(providers.PROVIDERS)
    orange = tuple(int(plot.COLOURS["cupyflash"][i : i + 2], 16) / 255 for i in (1, 3, 5))
    image = matplotlib_image.imread(tmp_path / "x-fwd.png")[..., :3]
    assert (abs(image - orange).max(axis=-1) < 0.01).sum() > 500
