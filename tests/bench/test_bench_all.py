"""bench all without the scripts: commands, folders of results, and what it does on failure."""

import subprocess
from types import SimpleNamespace

import pytest
from fakes import fake_facts
from small_benchmarks import results_into

from bench import __main__
from bench import all as bench_all
from bench.lib import harness, report


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Runs no script, but records its command and its folder of results."""
    results_into(monkeypatch, tmp_path)
    fake_facts(monkeypatch, harness, gpu_problem="")
    started, failures = {}, {}

    def run(command, stdout, stderr, env, timeout):
        module, *arguments = command[3:]
        started[module] = (arguments, env[report.FOLDER])
        stdout.write(f"output of {module}\n")
        if failures.get(module) == "hangs":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=failures.get(module, 0))

    monkeypatch.setattr(bench_all.subprocess, "run", run)
    return started, failures, tmp_path


def test_quick(scripts, capsys):
    started, _, folder = scripts
    assert bench_all.main(["--quick"]) == 0
    assert list(started) == [step.module for step in bench_all.STEPS]
    # Results of a part of the problems do not replace complete ones.
    assert started["attention"][1] == str(folder / "quick")
    assert started["memory"][1] == str(folder)
    assert started["ladder"][0][0] == "--traffic" and started["ladder"][1] == str(folder)
    assert "0 failed" in capsys.readouterr().out


def test_everything(scripts):
    started, _, folder = scripts
    assert bench_all.main([]) == 0
    assert {where for _, where in started.values()} == {str(folder)}
    assert started["attention"][0] == [] and started["ladder"][0] == ["--traffic"]


def test_failures_do_not_stop_the_others(scripts, capsys):
    started, failures, _ = scripts
    failures |= {"ladder": 3, "memory": "hangs"}
    assert bench_all.main(["--quick", "--only", "ladder", "memory", "precision"]) == 1
    assert set(started) == {"ladder", "memory", "precision"}
    printed = capsys.readouterr().out
    assert "ladder: exit status 3" in printed and "  output of ladder" in printed
    assert "memory: over 180 s" in printed and "2 failed" in printed
    assert "  output of precision" not in printed


@pytest.mark.parametrize("step", bench_all.STEPS, ids=lambda step: step.name)
def test_scripts_exist(step):
    assert step.module in __main__.SCRIPTS
