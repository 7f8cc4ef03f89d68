"""bench profile and bench timeline without a GPU: cases, stamps, pages."""

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
from bench.profile import profile, sass, timeline
from cupyflash.jit import sources

COVERAGE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from bench.profile import profile, sass
from bench.lib import report
from cupyflash import jit
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.precompile import TOPICS

of_one_gpu = [topic for name, topic in TOPICS.items() if name != "transfer"]
kernels = {x.name for y in (*BACKENDS.values(), *of_one_gpu) for x in y.configurations((9, 0))}
report.RESULTS = Path(sys.argv[1])
status = profile.main(["--static", "--only", "vector_add"])
sass.static_facts = lambda config, arch: config.name  # nothing more is compiled
spills_nothing = SimpleNamespace(stack_bytes=0, spill_bytes=0, warnings=())
jit.build = lambda *_: spills_nothing  # also not for a tile that fits
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


def test_page(tmp_path, monkeypatch, capsys):
    """The whole script with what ncu printed, and without."""
    facts = [fact("a", "flash_fwd_sm90", "norm_fwd")]
    launches = [counted("_Zflash_fwd_sm90", tensor=80.0), counted("_Znorm_fwd", DRAM=71.0, L2=91.0)]
    tmp_path = tmp_path / "not there yet"
    results_into(monkeypatch, tmp_path)
    fields = {"gpu": "G", "versions": {}}
    fake_facts(monkeypatch, harness, machine_fields=fields, gpu_problem="")
    printed = profile.FACT + json.dumps(facts[0])
    fake_facts(monkeypatch, counters, available=[], output_of=printed, launches_of=launches)
    roofs = {"matmul_tflops": 780.0, "copy_gbps": 4300.0, "fp32_tflops": 67.0}
    fake_facts(monkeypatch, profile, ceilings=roofs, facts_without_gpu=facts)
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


@pytest.mark.skipif(not is_hopper(), reason="the debug build is of kernels for sm_90a")
@pytest.mark.parametrize("name", timeline.STAMPS)
def test_trace(name):
    """The debug build gives the results of the kernel, and a record of every tile."""
    pytest.importorskip("torch")
    from cupyflash.testing.problem import Problem

    shape = Problem("bfloat16", 128, 2, 1024, 5, 5, True)  # one tile for each block
    row = timeline.measure(name, shape)
    rows = 64 if name == "flash_fwd_sm90" else 128  # smaller where tiles are few
    assert len(row["tiles"]) == 2 * 5 * 1024 // rows
    assert 0 < row["busy"] <= 1 and all(begin <= end for _, begin, end, *_ in row["tiles"])
