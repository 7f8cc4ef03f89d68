"""bench profile and bench timeline without a GPU: ncu's output, SASS, cubins, stamps, pictures."""

import json
import os
import subprocess
import sys

import pytest
from fakes import fake_facts
from small_benchmarks import results_into
from targets import is_hopper
from tiny_kernel import needs_nvrtc

from bench.lib import counters, harness
from bench.lib import traffic as gpt2_traffic
from bench.profile import profile, sass, timeline
from bench.profile import report as profile_report
from cupyflash.jit import sources

NCU = """==PROF== Connected to process 1
profiled: naive
profiled: fused: head
==PROF== Disconnected from process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","a","dram__bytes_read.sum","byte","1,000,000"
"0","a","dram__bytes_write.sum","byte","500"
"1","b","dram__bytes_read.sum","byte","7"
"1","b","dram__bytes_write.sum","byte","0"
"1","b","sm__warps_active.avg.pct_of_peak_sustained_active","%","n/a"
"2","_Z10vector_addIfEv15VectorAddParams","dram__bytes_read.sum","byte","64"
"2","_Z10vector_addIfEv15VectorAddParams","dram__bytes_write.sum","byte","32"
"3","_Z10vector_addI10bfloat16_tEv15VectorAddParams","dram__bytes_read.sum","byte","11"
"3","_Z10vector_addI10bfloat16_tEv15VectorAddParams","dram__bytes_write.sum","byte","0"
"4","_Z10vector_addIfEv15VectorAddParams","dram__bytes_read.sum","byte","64"
"""


def test_parse():
    calls = gpt2_traffic.parse(NCU)
    assert [x.name for x in calls["naive"]] == ["a", "b"]
    assert {name: counters.dram_bytes(x) for name, x in calls.items()} == {
        "naive": 1000507,
        "fused: head": 11,
    }
    with pytest.raises(RuntimeError, match="measured nothing"):
        gpt2_traffic.parse("==ERROR== something\n")
    with pytest.raises(RuntimeError, match="no bytes"):
        gpt2_traffic.parse(NCU.replace('"byte"', '"Mbyte"'))
    with pytest.raises(RuntimeError, match="2 calls, expected 1"):
        gpt2_traffic.parse(NCU.replace("profiled: naive\n", ""))


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Puts a program that prints a text and exits with a status in the place of ncu."""

    def install(text, status=0):
        path = tmp_path / "ncu"
        (tmp_path / "text").write_text(text)
        path.write_text(f"#!/bin/sh\ncat {tmp_path / 'text'}\nexit {status}\n")
        path.chmod(0o755)
        monkeypatch.setattr(counters, "find_ncu", lambda: str(path))

    return install


def test_what_to_do_without_counters(fake_ncu, monkeypatch):
    fake_ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", 1)
    with pytest.raises(RuntimeError, match="NVreg_RestrictProfilingToAdminUsers=0"):
        counters.output_of("gpt2", [], ["a"])
    fake_ncu("some other failure\n", 3)
    with pytest.raises(RuntimeError, match="ncu failed: some other failure"):
        counters.output_of("gpt2", [], ["a"])
    fake_ncu(NCU)
    assert gpt2_traffic.bytes_of("gpt2", []) == {"naive": 1000507, "fused: head": 11}
    fake_ncu("dram__bytes_read   Counter  byte  # of bytes\n")
    wanted = ("dram__bytes_read.sum", "launch__grid_size", "unknown__metric.sum")
    assert counters.available(wanted) == list(wanted[:2])
    monkeypatch.setattr(counters, "find_ncu", lambda: None)
    for ask in (lambda: counters.available(["a"]), lambda: gpt2_traffic.bytes_of("gpt2", [])):
        with pytest.raises(RuntimeError, match="ncu is not installed; it is part of"):
            ask()


COVERAGE = """
import json, sys
from pathlib import Path
from bench.profile import profile, sass
from bench.lib import report
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.precompile import TOPICS

kernels = {x.name for y in (*BACKENDS.values(), *TOPICS.values()) for x in y.configurations((9, 0))}
report.RESULTS = Path(sys.argv[1])
status = profile.main(["--static", "--only", "vector_add"])
sass.static_facts = lambda config, arch: config.name  # nothing more is compiled
facts = profile.facts_without_gpu("", False)
found = {name for of_case in facts for name in of_case["kernels"]}
least = {of_case["case"]: of_case["least_bytes"] for of_case in facts}
print(json.dumps([sorted(kernels - found), least, len(facts), status]))
"""


@pytest.fixture(scope="module")
def coverage(tmp_path_factory):
    """What the script prints, and the kernels in its results file; of whatever GPU and backend."""
    pytest.importorskip("torch")
    pytest.importorskip("cupy")
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-c", COVERAGE, str(folder)]
    variables = os.environ | {"CUPYFLASH_BACKEND": ""}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads((folder / "profile_static.json").read_text())["kernels"]
    return *json.loads(done.stdout.splitlines()[-1]), kernels


def test_every_kernel_has_a_case(coverage):
    missing, least, count, *_ = coverage
    assert missing == []
    assert len(least) == count > 24


@needs_nvrtc
def test_static_run(coverage):
    """``python -m bench profile --static --only vector_add``."""
    *_, status, (found,) = coverage
    assert status == 0 and found["kernel"] == "vector_add" and found["registers"] > 0


def test_least_bytes(coverage):
    least, numbers = coverage[1], 16384 * 2048
    assert least["attention fwd 128 causal 8192"] == 4 * 2 * numbers + 4 * numbers // 128
    assert least["attention bwd 128 full 4096"] == 8 * 2 * numbers + 4 * numbers // 128
    assert all(x > 0 for x in least.values())


def counted(name, us=100.0, **busy):
    """A launch with counters; ``busy`` in percent by the names of `profile.UNITS`."""
    values = {profile.TIME: 1e3 * us, "dram__bytes_read.sum": 6.0, "dram__bytes_write.sum": 4.0}
    values |= {profile.UNITS[unit]: share for unit, share in busy.items()}
    values |= {profile.TENSOR_OPS[0]: 1e9, next(iter(profile.FP32_OPS)): 50.0}
    values |= {profile.STALLED.format(x): n for x, n in (("wait", 1.0), ("barrier", 3.0))}
    return counters.Counted(name, values)


def fact(case, *names):
    loop = dict.fromkeys(sass.KINDS, 1)
    of_kernel = {"registers": 8, "spill_bytes": 0, "threads": 32, "static_shared": 0}
    of_kernel |= {"dynamic_shared": 64, "loop": loop, "no_loop": False}
    kernels = [
        {"kernel": x, "expression": f"{x}<float, false>", "lowered_name": f"_Z{x}"} | of_kernel
        for x in names
    ]
    return {
        **{"case": case, "least_bytes": 8.0, "workspace_bytes": 2.0, "flops": 1e9},
        "kernels": kernels,
    }


def test_rows():
    facts = [fact("a", "one", "two"), fact("b", "one")]
    launches = [counted("_Zone", tensor=80.0, issue=70.0), counted("torch"), counted("_Ztwo")]
    launches += [counted("_Zone", us=3.0, DRAM=90.0)]
    rows = profile.rows_of(facts, launches)
    with pytest.raises(RuntimeError, match="3 launches were expected, in their order, ncu saw 2"):
        profile.rows_of(facts, launches[:3])
    assert [(row["case"], row["kernel"], row["bound"]) for row in rows] == [
        *[("a", "one", "tensor"), ("a", "two", "latency (barrier)"), ("b", "one", "launch")],
    ]
    assert [x["kernel"] for x in profile.kernels_of(facts)] == ["one", "two"]
    assert rows[0]["tensor_flops"] == 1e9 and rows[0]["fp32_flops"] == 100
    assert rows[0]["stalls"]["barrier"] == 75
    cases = profile.case_rows(facts, rows)
    assert [(x["ratio"], x["of_all"]) for x in cases] == [(2.5, 2.0), (1.25, 1.0)]
    found = profile_report.longest(rows)
    assert [(x["kernel"], x["case"]) for x in found] == [("one", "a"), ("two", "a")]


def test_short():
    short = profile_report.short("one<bfloat16_t, 128, false, true, 0, 196608>")
    assert short == "one<bfloat16_t, 128, true, 0>"
    assert profile_report.short("two<float>") == "two<float>"


def test_page(tmp_path, monkeypatch, capsys):
    """The whole script with what ncu printed, and without."""
    facts = [fact("a", "flash_fwd_sm90", "norm_fwd")]
    launches = [counted("_Zflash_fwd_sm90", tensor=80.0), counted("_Znorm_fwd", DRAM=71.0, L2=91.0)]
    tmp_path = tmp_path / "not there yet"
    results_into(monkeypatch, tmp_path)
    fields = {"gpu": "G", "versions": {}}
    fake_facts(monkeypatch, harness, machine_fields=fields, gpu_problem="")
    monkeypatch.setattr(counters, "available", list)
    monkeypatch.setattr(counters, "output_of", lambda *a: profile.FACT + json.dumps(facts[0]))
    monkeypatch.setattr(counters, "launches_of", lambda text: launches)
    roofs = {"matmul_tflops": 780.0, "copy_gbps": 4300.0, "fp32_tflops": 67.0}
    monkeypatch.setattr(profile, "ceilings", lambda: roofs)
    pytest.importorskip("matplotlib")
    assert profile.main(["--output", "p"]) == 0
    page = (tmp_path / "p.md").read_text()
    assert "| flash_fwd_sm90<float> | tensor | barrier 75" in " ".join(page.split())
    assert "| norm_fwd<float> | DRAM |" in " ".join(page.split())
    assert "TFLOP/s" in (tmp_path / "p.svg").read_text()
    assert json.loads((tmp_path / "p.json").read_text())["cases"][0]["ratio"] == 2.5

    def refuses(*arguments):
        raise RuntimeError("no rights; do this")

    monkeypatch.setattr(counters, "output_of", refuses)
    monkeypatch.setattr(profile, "facts_without_gpu", lambda *a: facts)
    assert profile.main(["--output", "q"]) == 1
    assert "no counters: no rights; do this" in capsys.readouterr().out
    assert "What the kernels are made of" in (tmp_path / "q_static.md").read_text()


@pytest.mark.parametrize("name", timeline.STAMPS)
def test_stamps_have_their_places(name):
    """A change of the source that takes a stamp's place fails here."""
    text = next(sources.root().rglob(f"{name}.cu")).read_text()
    changed = timeline.stamped(name, text)
    assert changed.count("trace_begin(") == changed.count("trace_end(") == 1
    for _, stamp in timeline.STAMPS[name]:
        changed = changed.replace(stamp, "")
    assert changed == text
    with pytest.raises(ValueError, match="must have the line of a stamp once, got 2"):
        timeline.stamped(name, text + text)


def test_tiles():
    records = (timeline.TraceRecord * 3)()
    records[2] = timeline.TraceRecord(1000, 3000, 7, 128, 1, 0)
    records[0] = timeline.TraceRecord(2000, 5000, 8, 0, 1, 0)
    tiles = timeline.tiles_of(records)
    assert timeline.compact(tiles) == [[7, 0, 2, 128, 1, 0], [8, 1, 4, 0, 1, 0]]
    assert timeline.busy_share(tiles) == 5 / 8


@pytest.mark.skipif(not is_hopper(), reason="the debug build is of kernels for sm_90a")
@pytest.mark.parametrize("name", timeline.STAMPS)
def test_trace(name):
    """The debug build gives the results of the kernel, and a record of every tile."""
    pytest.importorskip("torch")
    from cupyflash.testing.problem import Problem

    shape = Problem("bfloat16", 128, 2, 1024, 5, 5, True)  # one tile for each block
    row = timeline.measure(name, shape)
    assert len(row["tiles"]) == 2 * 5 * 1024 // 128
    assert 0 < row["busy"] <= 1 and all(begin <= end for _, begin, end, *_ in row["tiles"])
