"""Every script of bench as a user without a GPU runs it: a word, exit status 1, and no file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")
pytest.importorskip("torch", reason="some scripts import it first")

from bench import __main__  # noqa: E402
from bench.lib import harness, report  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = set(__main__.SCRIPTS)
# They read results, draw, compute in NumPy, or compare models of transformers, on any machine.
WITHOUT_GPU = {"architectures", "compare", "plot", "plot_diagrams", "rounding"}


def contents(folder):
    return {x: x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the scripts and their committed results, which a script that fails may spoil."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.png", "*.svg")
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=ignore)
    return folder


@pytest.mark.parametrize("command", [*sorted(SCRIPTS - WITHOUT_GPU), "attention --once"])
def test_script(copy, command):
    script, *arguments = command.split()
    before = contents(copy / "bench" / "results")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), report.FOLDER: ""}
    command = [sys.executable, "-m", "bench", script, *arguments]
    options = {"cwd": copy, "env": {**os.environ, **hidden}, "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    reason = f"bench {script}: needs a GPU, and has written nothing: "
    assert done.returncode == 1 and done.stderr.startswith(reason), done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout
    assert contents(copy / "bench" / "results") == before


def test_scripts_are_known():
    assert SCRIPTS > WITHOUT_GPU and len(SCRIPTS) > 25


def test_a_run_without_results_keeps_the_file(monkeypatch, tmp_path, capsys):
    """As where every implementation was left out."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "machine_fields", dict)
    (tmp_path / "memory.json").write_text("earlier")
    options = harness.parser("memory", None, repeats=None, output=False).parse_args([])
    run = harness.Run("memory", "", [], options, timed=False, on_gpu=False)
    assert list(run.each([1, 2])) == [1, 2]
    with pytest.raises(SystemExit, match=r"bench memory: nothing was measured"):
        run.finish("a table")
    assert (tmp_path / "memory.json").read_text() == "earlier"
    assert "a table" in capsys.readouterr().out
