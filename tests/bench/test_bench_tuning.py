"""bench tuning without a GPU: its shapes, its table, and what a wrong candidate does.

Runs are those of small_benchmarks.py.
"""

import json

import pytest

from bench.attention import tuning
from cupyflash import environment
from cupyflash.commands.tuner import Candidate, Found
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.ops.attention.problem import Features, Kind

KIND = Kind("bfloat16", 64, Features(), (9, 0))


@pytest.fixture
def run(benchmarks, monkeypatch):
    """bench tuning with a search that finds these times; returns its status, rows and page."""
    searched = []

    def run(*ms, wrong="", arguments=("--quick",)):
        def search(problem, direction, seconds):
            searched.append((problem, environment.current().backend, seconds))
            if not ms:
                raise MemoryError("too large")
            tiles = BACKENDS["sm90"].forward_candidates(KIND)
            found = [Candidate(*tile, ms=x) for tile, x in zip(tiles.items(), ms)]
            found.append(Candidate((1, 1), None, note="" if wrong else "it spills", wrong=wrong))
            return Found("attention fwd sm90 …", found, 7)

        monkeypatch.setattr(tuning, "search", search)
        status = tuning.main([*arguments, "--budget", "3"])
        page = (benchmarks.folder / "tuning.md").read_text()
        return status, json.loads((benchmarks.folder / "tuning.json").read_text())["rows"], page

    run.searched = searched
    return run


def test_shapes():
    assert len(tuning.SHAPES) == len(set(tuning.SHAPES)) == 20
    assert {shape[0] for shape in tuning.SHAPES[: tuning.QUICK]} == {"fwd", "bwd"}


def test_rows(run, capsys):
    status, rows, page = run(1.03, 1.0, 2.0)
    assert status == 0 and len(rows) == tuning.QUICK
    assert rows[0]["built_in"] == "192×128, 2, 3" and rows[0]["fastest"] == "128×128, 2, 2"
    assert (rows[0]["ms"], rows[0]["fastest_ms"], rows[0]["ratio"]) == (1.03, 1.0, 1.03)
    assert rows[0]["left_out"] == {"1×1": "it spills"}
    text = "0 of 6 built-in choices are within 2 % of the fastest candidate; not: fwd sm90 D=64 "
    assert text in page and text in capsys.readouterr().out
    assert [backend for _, backend, _ in run.searched][3:] == [None, "sm80", "fp16x3"]
    problem, _, seconds = run.searched[0]
    assert (problem.batch, problem.heads, problem.seqlen, seconds) == (4, 32, 4096, 3.0)
    assert run(1.02, 1.0)[2].endswith(
        "6 of 6 built-in choices are within 2 % of the fastest candidate\n"
    )
    assert len(run(1.0, arguments=())[1]) == 20


def test_what_went_wrong(run, capsys):
    assert run(1.0, wrong="out: max error 1")[0] == 1
    assert "WRONG RESULT: out: max error 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="nothing was measured"):
        run()
    assert "left out from fwd bfloat16 D=64 B=4" in capsys.readouterr().out
