""".ci/gpu_report.py: when a report is current, stale or unusable; and how a run writes it."""

import json
import re
from types import SimpleNamespace
from unittest import mock

import conftest
import pytest

GPU = {"gpu": "H200"}
TESTS = {
    "one/test_a.py": "",
    "one/test_b.py": "import os\nfrom test_a import x\n",
    "two/test_c.py": 'run(HERE / "help.py")',
    "support/help.py": "import helped",
    "support/helped/a.h": "",
    "conftest.py": "def f():\n    import helped\nimport common\n",
    "support/common.py": "",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The script with a small project: test_b imports test_a, and test_c runs help.py."""
    script = conftest.gpu_report_module()
    for folder in script.FOLDERS:
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text(folder)
    for folder in ("one", "two", "support/helped"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    for path, text in TESTS.items():
        (tmp_path / "tests" / path).write_text(text)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "REPORT", tmp_path / "report.json")
    monkeypatch.setattr(conftest, "gpu_report_module", lambda: script)
    monkeypatch.setattr(conftest, "FORCED", None)
    return script


def write(script, runs=("default", "sm80", "simt"), failed=(), sanitizer="clean", gpu=GPU):
    """Add results of all test files to the report."""
    results = {
        file: {"digest": digest, "failed": list(failed)}
        for file, digest in script.test_files().items()
    }
    for run in runs:
        arguments = (gpu, script.sources(), run, results, {"memcheck simt": sanitizer})
        report = script.with_results(script.load(script.REPORT), *arguments)
        script.REPORT.write_text(json.dumps(report))


def change(script, path):
    path = script.ROOT / "tests" / path
    path.write_text(path.read_text() + "# new")


def missing(script):
    return script.missing(script.load(script.REPORT), "default")


def test_current(project, capsys):
    write(project)
    (project.ROOT / "tests" / "__pycache__" / "a.pyc").write_text("not a source")
    assert project.main([]) == 0
    assert capsys.readouterr().out == "current\n"
    assert missing(project) == []


def test_stale_lists_what_changed(project, capsys):
    write(project)
    (project.ROOT / "tests" / "a.txt").write_text("new")
    (project.ROOT / "cupyflash" / "a.txt").unlink()
    (project.ROOT / "cuda_src" / "b.txt").write_text("new")
    assert project.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "added    cuda_src/b.txt",
        "removed  cupyflash/a.txt",
        "changed  tests/a.txt",
    ]
    assert len(missing(project)) == 3


def test_a_changed_test_runs_alone(project, capsys):
    write(project)
    change(project, "two/test_c.py")
    assert missing(project) == ["tests/two/test_c.py"]
    assert project.main(["--missing", "--backend", "simt"]) == 0
    assert capsys.readouterr().out == "tests/two/test_c.py\n"
    assert project.main([]) == 1
    write(project)
    change(project, "one/test_a.py")
    assert missing(project) == ["tests/one/test_a.py", "tests/one/test_b.py"]


@pytest.mark.parametrize("path", ["support/help.py", "support/helped/a.h"])
def test_a_changed_module_loses_the_tests_that_use_it(project, path):
    write(project)
    change(project, path)
    assert missing(project) == ["tests/two/test_c.py"]


@pytest.mark.parametrize("path", ["conftest.py", "support/common.py"])
def test_what_conftest_loads_counts_for_all(project, path):
    write(project)
    change(project, path)
    assert len(missing(project)) == 3


@pytest.mark.parametrize(
    ("fixture", "module"), [("benchmarks", "small_benchmarks"), ("two|four", "ranks")]
)
def test_users_of_a_fixture_name_its_module(fixture, module):
    """A fixture has no import that would say where a test file gets it from."""
    script = conftest.gpu_report_module()
    texts = script.module_texts()
    pattern = rf"def test\w+\(.*\b({fixture})\b"
    users = [x for x, text in texts.items() if re.search(pattern, text)]
    assert len(users) > 3
    assert [x for x in users if module not in script.used(x, texts)] == []


def test_a_backend_is_missing(project, capsys):
    write(project, runs=["default", "simt"])
    assert project.main([]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == ["3 files in the run sm80"]


def test_a_forced_backend_leaves_out_what_it_does_not_change(project):
    assert project.NO_BACKEND == conftest.NO_BACKEND
    write(project)
    for folder in ("norm", "attention"):
        (project.ROOT / "tests" / folder).mkdir()
        (project.ROOT / "tests" / folder / f"test_of_{folder}.py").write_text("")
    report = project.load(project.REPORT)
    found = {run: project.missing(report, run) for run in ("default", "sm80")}
    attention, norm = (f"tests/{x}/test_of_{x}.py" for x in ("attention", "norm"))
    assert found == {"default": [attention, norm], "sm80": [attention]}


@pytest.mark.parametrize("what", ["sources", "machine"])
def test_results_of_other_sources_are_dropped(project, what):
    write(project, sanitizer="3 errors")
    if what == "sources":
        (project.ROOT / "tests" / "a.txt").write_text("new")
    write(project, runs=["simt"], gpu=GPU if what == "sources" else {"gpu": "H100"})
    report = project.load(project.REPORT)
    assert list(report["runs"]) == ["simt"]
    assert report["sanitizer"] == {"memcheck simt": "clean"}


@pytest.mark.parametrize("outcome", [{"failed": ["x"]}, {"sanitizer": "3 errors"}], ids=str)
def test_failure(project, outcome, capsys):
    write(project, **outcome)
    assert project.main([]) == 2
    assert " failures on H200:\n" in capsys.readouterr().out
    (project.ROOT / "cuda_src" / "a.txt").write_text("mended")
    assert project.main([]) == 1


def test_failure_of_a_test_that_has_changed(project, capsys):
    write(project, failed=["x"])
    for path in ("one/test_a.py", "two/test_c.py"):
        change(project, path)
    assert project.main([]) == 1
    assert "3 files in the run default" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "{}", "[]", '{"passed": 7}', "{"])
def test_unusable(project, text, capsys):
    if text is not None:
        project.REPORT.write_text(text)
    assert project.main([]) == 2
    assert "no usable report at report.json" in capsys.readouterr().out


def test_without_a_report_all_are_missing(project):
    assert len(missing(project)) == 3


def outcome(test, when="call", failed=False, skipped=False, properties=()):
    """A report of pytest."""
    return SimpleNamespace(
        **{"nodeid": test, "when": when, "failed": failed, "skipped": skipped, "duration": 0.5},
        **{"passed": not failed and not skipped, "user_properties": list(properties)},
        **{"longrepr": None, "longreprtext": "the reason\nand more"},
    )


def run(project, *reports, collected=(), exitstatus=0, names=frozenset()):
    """A run of two tests in test_a and one in test_b."""
    found = conftest.GpuReport(project.REPORT, GPU, set(names))
    found.terminal = mock.Mock()
    tests = [
        "tests/one/test_a.py::test_1",
        "tests/one/test_a.py::test_2",
        "tests/one/test_b.py::test[1]",
    ]
    for report in collected:
        found.pytest_collectreport(report)
    found.pytest_xdist_node_collection_finished(tests)
    for report in reports:
        found.pytest_runtest_logreport(report)
    if exitstatus is not None:
        found.pytest_sessionfinish(exitstatus)
    lines = [call.args[0] for call in found.terminal.write_line.call_args_list]
    return project.load(project.REPORT).get("runs", {}).get("default", {}), lines


def test_a_run_that_is_cut_off_keeps_whole_files(project):
    first, second, third = "tests/one/test_a.py::test_1", "tests/one/test_b.py::test[1]", "teardown"
    found, lines = run(
        project,
        outcome(first, "setup"),
        outcome(first),
        outcome(first, third),
        outcome(second, "setup"),
        outcome(second, failed=True),
        outcome(second, third, properties=[("sanitizer", "memcheck x: 3 errors")]),
        exitstatus=None,
    )
    assert list(found) == ["tests/one/test_b.py"]
    result = found["tests/one/test_b.py"]
    assert result["failed"] == [second] and result["passed"] == 0 and result["seconds"] == 1.5
    assert lines == [f"\nfailed: {second}: the reason"]
    assert project.load(project.REPORT)["sanitizer"] == {"memcheck x": "3 errors"}


def test_a_crash_and_a_file_that_cannot_be_imported_are_failures(project):
    test = "tests/one/test_b.py::test[1]"
    found, _ = run(project, outcome(test, "setup"), outcome(test, "???", failed=True))
    assert found["tests/one/test_b.py"]["failed"] == [test]
    broken = SimpleNamespace(nodeid="tests/two/test_c.py", failed=True)
    found, _ = run(project, collected=[broken], exitstatus=1)
    assert found["tests/two/test_c.py"]["failed"] == ["tests/two/test_c.py"]


@pytest.mark.parametrize("exitstatus", pytest.ExitCode)
def test_a_file_whose_tests_were_all_left_out(project, exitstatus):
    """It has no result where tests were not collected, as in a run that was interrupted."""
    codes = pytest.ExitCode
    ended = exitstatus in (codes.OK, codes.TESTS_FAILED, codes.NO_TESTS_COLLECTED)
    found, _ = run(project, exitstatus=exitstatus)
    assert list(found) == ["tests/two/test_c.py"] * ended


def test_the_end_of_a_run(project):
    first, second = "tests/one/test_a.py::test_1", "tests/one/test_a.py::test_2"
    reports = [outcome(first, "setup", skipped=True), outcome(first, "teardown")]
    found, lines = run(project, *reports)
    assert list(found) == ["tests/two/test_c.py"]  # all of its tests were left out
    assert any("tests/one/test_a.py, 1 tests" in line for line in lines)
    reports += [outcome(second), outcome(second, "teardown")]
    found, _ = run(project, *reports, names=["test_a.py", "test_b.py"])
    assert list(found) == ["tests/one/test_a.py", "tests/two/test_c.py"]
    a = found["tests/one/test_a.py"]
    assert (a["passed"], a["skipped"], a["failed"]) == (1, 1, [])
