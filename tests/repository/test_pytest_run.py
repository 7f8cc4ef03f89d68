"""How pytest runs these tests: the number of processes, and what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
from fakes import fake_facts
from places import ROOT
from targets import EMULATED
from tiny_kernel import needs_nvrtc

Source = pytest.Config.ArgsSource


def run(*arguments, **variables):
    """What pytest prints, in a process without a GPU that no variable tells how to run."""
    kept = {x: y for x, y in os.environ.items() if not x.startswith(("PYTEST_", "CUPYFLASH_"))}
    environment = {**kept, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(bool(EMULATED), reason="a run with emulated kernels leaves these tests out")
def test_all_tests_run_on_all_cores():
    """No file is named; that all but test_tolerance.py are ignored keeps it short."""
    pytest.importorskip("xdist")
    ignored = [f"--ignore-glob=*/test_{x}*" for x in ("[!t]", "t[!o]", "to[!l]")]
    printed = run(*ignored, "-v", PYTEST_XDIST_AUTO_NUM_WORKERS="2")
    assert "2 workers [" in printed


@needs_nvrtc
def test_nothing_stays_in_the_folder_of_the_user(tmp_path):
    """Of a test that compiles kernels; CuPy makes an empty folder when it is imported."""
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    printed = run("tests/jit/test_compile.py::test_compile[baselines-sm_75-0]", **home)
    assert "1 passed" in printed and " workers [" not in printed
    assert [path for path in tmp_path.rglob("*") if ".cupy" not in path.parts] == []


@pytest.mark.parametrize(
    "numprocesses, source, others",
    [
        ("auto", Source.TESTPATHS, {}),
        (0, Source.TESTPATHS, {"numprocesses": 0}),
        (None, Source.ARGS, {}),
        (None, Source.TESTPATHS, {"keyword": "norm"}),
        (None, Source.TESTPATHS, {"markexpr": "large"}),
        (None, Source.TESTPATHS, {"capture": "no"}),
        (None, Source.TESTPATHS, {"tx": ["2*popen"]}),
    ],
)
@pytest.mark.parametrize("capability", [0, 90])
def test_number_of_processes(monkeypatch, capability, numprocesses, source, others):
    """All cores for all tests without a GPU, where no option says anything else."""
    option = {"keyword": "", "markexpr": "", "capture": "fd", "tx": [], "dist": "no"}
    option |= {"numprocesses": None, "maxprocesses": None, **others}
    config = SimpleNamespace(
        option=SimpleNamespace(**option),
        args_source=source,
        ArgsSource=Source,
        pluginmanager=SimpleNamespace(hasplugin=lambda name: True),
    )
    fake_facts(monkeypatch, conftest, compute_capability=(capability, ""))
    conftest.pytest_cmdline_main(config)
    expected = None if capability and numprocesses == "auto" else numprocesses
    assert config.option.numprocesses == expected


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("longest", ["", "d", "bde", "abcdefg"])
def test_the_longest_tests_begin_every_stretch(monkeypatch, workers, longest):
    """Each worker has its share of them, and no test is lost."""
    monkeypatch.setattr(conftest, "LONGEST", tuple(longest))
    items = [SimpleNamespace(path=Path(f"test_{name}.py")) for name in "abcdefg"]
    found = conftest._longest_first(items, workers)
    assert sorted(map(id, found)) == sorted(map(id, items))
    names = [item.path.stem[5:] for item in found]
    starts = [number * len(items) // workers for number in range(workers)]
    assert all(names[start] in longest for start in starts[: len(longest)])
