"""The benchmark scripts without a GPU: counting, checking, tables, files, pictures."""

import json

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench.attention import attention, memory  # noqa: E402
from bench.lib import report  # noqa: E402
from cupyflash.testing.problem import Problem, attention_flops  # noqa: E402

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
    # The second cell has no peer, so that it does not count.
    assert report.geometric_means(rows) == [
        "fwd cupyflash: 2.000 x the best peer, geometric mean of 1; 1 at or above 1",
        "fwd cupyflash-simt: 0.250 x the best peer, geometric mean of 1; 0 at or above 1; "
        "below: D=64 full 256 (0.250)",
        "fwd sdpa-flash: 1.000 x the best peer, geometric mean of 1",
        "fwd sdpa-math: 0.500 x the best peer, geometric mean of 1",
    ]


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
