"""What all scripts of bench have in common: what they do without a GPU, and without results."""

import importlib
import os
import subprocess
import sys

import pytest
from fakes import fake_facts
from places import ROOT
from small_benchmarks import results_into

from bench import __main__
from bench.lib import harness

# They read or write files, draw, compute in NumPy, or compare models of transformers anywhere.
WITHOUT_GPU = {"architectures", "compare", "gguf_folder", "plot", "plot_diagrams", "rounding"}
WITHOUT_GPU |= {"cache_error"}
ON_GPU = sorted(__main__.SCRIPTS.keys() - WITHOUT_GPU)


@pytest.mark.parametrize("name", [*ON_GPU, "attention --once"])
def test_a_script_without_a_gpu(monkeypatch, tmp_path, capsys, name):
    """It says so with the exit status 1, and writes nothing."""
    results_into(monkeypatch, tmp_path)
    fake_facts(monkeypatch, harness, gpu_problem="there is none")
    name, *arguments = name.split()
    module = importlib.import_module(f"bench.{__main__.SCRIPTS[name]}")
    with pytest.raises(SystemExit) as error:
        module.main(arguments)
    assert error.value.code == f"bench {name}: needs a GPU, and has written nothing: there is none"
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


def test_the_command():
    def run(*arguments):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "bench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    done = run("attention")
    assert done.returncode == 1 and done.stderr.startswith("bench attention: needs a GPU, and has")
    assert done.stderr.count("\n") == 1 and not done.stdout
    done = run("nothing")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 + len(__main__.SCRIPTS)
    assert all(f"  {name} " in done.stderr for name in __main__.SCRIPTS)


def test_a_run_without_results_keeps_the_file(monkeypatch, tmp_path, capsys):
    """As where every implementation was left out."""
    results_into(monkeypatch, tmp_path)
    fake_facts(monkeypatch, harness, machine_fields={})
    (tmp_path / "memory.json").write_text("earlier")
    options = harness.parser("memory", None, repeats=None, output=False).parse_args([])
    run = harness.Run("memory", "", [], options, timed=False, on_gpu=False)
    assert list(run.each([1, 2])) == [1, 2]
    with pytest.raises(SystemExit, match=r"bench memory: nothing was measured"):
        run.finish("a table")
    assert (tmp_path / "memory.json").read_text() == "earlier"
    assert "a table" in capsys.readouterr().out
