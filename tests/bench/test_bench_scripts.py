"""Every script of bench from its options to its results, on the CPU with the clock taken out."""

import xml.etree.ElementTree

import pytest
from small_benchmarks import BENCHMARKS, COMPARISONS, MODELS, SMALL

from bench.__main__ import SCRIPTS
from bench.attention import extras, masks, memory
from bench.decode.decode import DecodeProblem
from bench.decode.transformer import BlockProblem
from bench.linear.problems import LinearProblem
from bench.norm import problems as norms
from cupyflash.testing.problem import Problem, attention_flops

# They read results, draw, start others, need a GPU's counters or stamps, or have tests of their own
# (test_architectures, test_bench_profile, test_bench_gguf, test_bench_decode).
ELSEWHERE = {"all", "compare", "plot", "plot_diagrams", "tuning", "architectures"}
ELSEWHERE |= {"profile", "timeline", "time_budget", "gguf_folder", "cache_error"}


def test_scripts_are_known():
    assert set(BENCHMARKS) | ELSEWHERE == set(SCRIPTS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_script(benchmarks, name, capsys):
    status, results = benchmarks.run(name)
    printed = capsys.readouterr().out
    assert status == 0 and "WRONG" not in printed
    assert results["command"].startswith(f"python -m bench {name}")
    rows = results["rows"]
    assert len(rows) == BENCHMARKS[name].rows, rows
    impls = {row.get("impl", "cupyflash") for row in rows}  # extras has no other
    assert name == "rounding" or any(x.startswith("cupyflash") for x in impls)
    assert all(row.get(field, 1) > 0 for row in rows for field in ("ms", "us"))
    assert len({str(row) for row in rows}) == len(rows)
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) > 2 and "…" not in printed
    if hasattr(benchmarks.module(name), "draw"):
        pictures = list(benchmarks.folder.glob("*.svg"))
        assert pictures and all(map(xml.etree.ElementTree.parse, pictures))


def test_what_is_left_out(benchmarks, capsys):
    """Whoever cannot do a model has no row of it, and the reason is printed."""
    _, results = benchmarks.run("models", "--pass", "fwd")
    did = {(row["what"], row["impl"]) for row in results["rows"]}
    names = {x.name for x in MODELS}
    assert {what for what, impl in did if impl == "cupyflash"} == names
    of_peer = {what for what, impl in did if impl == "sdpa-math"}
    assert of_peer == names - {"Softcap", "Sinks", "Local"}
    reason = "sdpa-math left out from fwd Softcap on: NotImplementedError: SDPA has no softcap"
    assert reason in capsys.readouterr().out
    page = (benchmarks.folder / "models.md").read_text()
    line = next(x for x in page.splitlines() if "Softcap" in x)
    assert [x.strip() for x in line.split("|")[1:-1]] == [
        "Softcap", "1 x 150, 2 heads, D=16, softcap 5", "fwd", "1000.0", "-", "-",
    ]  # fmt: skip
    assert "fwd cupyflash: 1.000 x the best peer, geometric mean of 6; 6 at or above 1" in page


def test_a_part_of_the_problems(benchmarks):
    _, results = benchmarks.run("models", "--only", "cross", "groups", "--pass", "fwd")
    assert {row["what"] for row in results["rows"]} == {"Groups", "Cross"}
    for name in ("models", "extras"):
        with pytest.raises(SystemExit):
            benchmarks.run(name, "--only", "nothing")


def test_ratios_of_extras(benchmarks, capsys):
    """Every call takes a millisecond, so that the rates are as the FLOPs."""
    _, results = benchmarks.run("extras")
    share = round((150**2 + 20**2 + 130**2) / 300**2, 4)
    assert [(x["what"], x["pass"], x["ratio"]) for x in results["rows"]] == [
        ("packed", "fwd", share),
        ("packed", "bwd", share),
        ("window", "fwd", 1.2),
        ("window", "bwd", 1.2),
        ("same bits", "bwd", 1.0),
    ]
    assert results["lengths"] == extras.long_tailed_lengths()
    printed = capsys.readouterr().out
    assert "impossible left out from fwd" in printed and "missed <= 1.15" in printed
    assert "1 of 5 targets met, 2 not run" in printed
    assert len(COMPARISONS) == 4


def test_lengths_count_the_scores_that_they_leave(benchmarks):
    _, results = benchmarks.run("masks")
    ours = [x for x in results["rows"] if x["impl"] == "cupyflash" and x["pass"] == "fwd"]
    assert [row["what"] for row in ours] == list(masks.KINDS)
    rates = {row["what"]: row["tflops"] for row in ours}
    assert rates[masks.PLAIN] == pytest.approx(4 * rates[masks.LENGTHS], abs=0.02)


def test_rungs_end_where_a_call_would_take_too_long(benchmarks):
    """A call takes 1 ms: four times as much is beyond the limit of the second length."""
    _, results = benchmarks.run("ladder", "--limit-ms", "3")
    assert {row["seqlen_q"] for row in results["rows"]} == {128}
    why = {(row["seqlen_q"], row["why"]) for row in results["left_out"]}
    assert why == {(256, "over 0.003 s")}
    page = (benchmarks.folder / "ladder.md").read_text()
    assert "over 0.003 s" in page and "DRAM MB (no ncu)" in page


def test_visited_tiles():
    for seqlen, window in ((300, None), (300, 64), (1024, 128), (1100, 300), (128, 1000)):
        left = seqlen if window is None else window
        seen = {(i // 128, j // 128) for i in range(seqlen) for j in range(max(0, i - left), i + 1)}
        assert extras.visited_tiles(seqlen, window) == len(seen)


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


def test_flops_and_bytes():
    # Two products of 2 * seqlen_q * seqlen_k * head_dim operations for each batch and head.
    assert attention_flops(3, 5, 7, 11, 13, causal=False) == 3 * 5 * 2 * (2 * 7 * 11 * 13)
    assert SMALL.flops("fwd") == 0.5 * attention_flops(1, 4, 300, 300, 16, causal=False)
    assert SMALL.flops("bwd") == 2.5 * SMALL.flops("fwd")
    packed = extras.packed(Problem("bfloat16", 16, 4, 300, 4, 2, True), [300] * 4)
    assert packed.problem.seqlen == 1200 and packed.flops("bwd") == 4 * SMALL.flops("bwd")
    assert extras.Variant(SMALL, window=64).flops("fwd") == SMALL.flops("fwd") * 5 / 6
    mlp = LinearProblem("mlp", "bfloat16", 4, 10, 30, True, "silu")
    assert mlp.bytes == 2 * 900 and mlp.flops == 2 * 4 * 900
    qkv = LinearProblem("qkv_projection", "float32", 4, 4096, 14336, True, "silu")
    assert qkv.heads == (32, 8) and qkv.bytes == 4 * 6144 * 4096
    norm = norms.NormProblem("rms_norm", "bfloat16", (10, 100))
    assert norm.bytes("fwd") == norm.bytes("bwd") == 4 * 2000
    group = norms.NormProblem("group_norm_activation", "float32", (2, 32, 5))
    assert (group.bytes("fwd"), group.bytes("bwd")) == (2 * 1280, 3 * 1280)
    assert DecodeProblem("bfloat16", "llama3-8b", 2, 512).bytes == 2 * 2 * 2 * 512 * 8 * 128
    # 12 layers of GPT-2 small in bfloat16 are 170 MB, their caches 19 MB a sequence.
    one, two = (BlockProblem("bfloat16", "small", 12, batch).bytes for batch in (1, 2))
    assert two - one == 12 * 2 * 512 * 768 * 2
    assert one - (two - one) == 12 * (12 * 768 * 768 + 13 * 768) * 2


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_predicted_memory(direction):
    rows, accum_rows = 2 * 4 * 200, 2 * 4 * 256  # rows of a tile of 128 lie in the accumulator
    expected = {
        "fwd": rows * 64 * 2 + rows * 4,
        "bwd": (rows + 2 * rows // 2) * 64 * 2 + accum_rows * (64 + 1 + 1) * 4,
    }
    shape = Problem("bfloat16", 64, 2, 200, 4, 2, True)
    assert memory.predicted_bytes(shape, direction) == expected[direction]


def test_every_norm_has_shapes_beyond_the_l2_cache():
    assert set(norms.SHAPES) == set(norms.OPS)
    for op in norms.OPS:
        assert max(x.bytes("fwd") for x in norms.problems([op], ["bfloat16"])) > 200e6
