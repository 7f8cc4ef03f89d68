""".ci/gpu_report.py: when a report is current, stale or unusable."""

import json

import pytest
from conftest import gpu_report_module


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The script with a small project of its own, and a function that writes its report."""
    script = gpu_report_module()
    for folder in script.FOLDERS:
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text(folder)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "REPORT", tmp_path / "report.json")

    def write(failed=0, sanitizer="clean", backends=("sm80", "simt"), backend_failed=0):
        files, report = script.file_digests(), {}
        for backend in (None, *backends):
            run = {"date": "2026-11-21", "failed": backend_failed if backend else failed}
            known = {"memcheck simt": sanitizer}
            report = script.merged(report, backend, {"gpu": "H200"}, run, known, files)
        script.REPORT.write_text(json.dumps(report))

    return script, write


def test_current(project, capsys):
    script, write = project
    write()
    (script.ROOT / "tests" / "__pycache__" / "a.pyc").write_text("not a source")
    assert script.main() == 0
    assert capsys.readouterr().out == "current\n"


def test_stale_lists_what_changed(project, capsys):
    script, write = project
    write()
    (script.ROOT / "tests" / "a.txt").write_text("new")
    (script.ROOT / "cupyflash" / "a.txt").unlink()
    (script.ROOT / "cuda_src" / "b.txt").write_text("new")
    assert script.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "added    cuda_src/b.txt",
        "removed  cupyflash/a.txt",
        "changed  tests/a.txt",
    ]


def test_a_backend_is_missing(project, capsys):
    script, write = project
    write(backends=["simt"])
    assert script.main() == 1
    assert capsys.readouterr().out == "gpu-report: no run with CUPYFLASH_BACKEND=sm80\n"


def test_runs_of_other_sources_are_dropped(project):
    script, write = project
    write()
    (script.ROOT / "tests" / "a.txt").write_text("new")
    old, files = json.loads(script.REPORT.read_text()), script.file_digests()
    with pytest.raises(ValueError, match="needs the whole run of the same sources first"):
        script.merged(old, "sm80", {}, {"failed": 0}, {}, files)
    new = script.merged(old, None, {"gpu": "H200"}, {"failed": 0}, {}, files)
    assert new["backends"] == {} and new["sanitizer"] == {}
    both = script.merged(new, "simt", {}, {"failed": 2}, {"racecheck": "clean"}, files)
    assert both["failed"] == 0 and both["backends"] == {"simt": {"failed": 2}}
    assert both["sanitizer"] == {} and both["gpu"] == "H200"


@pytest.mark.parametrize(
    "outcome",
    [{"failed": 1}, {"sanitizer": "3 errors"}, {"backend_failed": 1, "backends": ["sm80"]}],
    ids=str,
)
def test_failure(project, outcome, capsys):
    script, write = project
    write(**outcome)
    assert script.main() == 2
    assert "1 failures on H200" in capsys.readouterr().out


def test_missing(project, capsys):
    script, _ = project
    assert script.main() == 2
    assert "no usable report at report.json" in capsys.readouterr().out
