"""bench.compare: which rows changed, what decides, which files it refuses."""

import json

import pytest

from bench.lib import compare

QUARTILES = {"quartiles_ms": [0.98, 1.02]}


def row(impl, ms, what="a", **fields):
    return {"op": "models", "what": what, "pass": "fwd", "impl": impl, "ms": ms, **fields}


@pytest.fixture
def run(tmp_path, capsys):
    """bench.compare of rows; returns its exit status and what it printed."""

    def run(old, new, *options, gpus=("G", "G")):
        paths = [tmp_path / "old.json", tmp_path / "new.json"]
        for path, rows, gpu in zip(paths, (old, new), gpus):
            path.write_text(json.dumps({"gpu": gpu, "rows": rows}))
        status = compare.main([*map(str, paths), *options])
        return status, capsys.readouterr().out

    return run


def verdicts(printed):
    """(row, implementation, verdict) of the table."""
    lines = [line.split("|") for line in printed.splitlines() if line.startswith("|")]
    return [(x[1].strip(), x[2].strip(), x[6].strip()) for x in lines[2:]]


def test_slower_and_faster(run):
    old = [row("cupyflash", 1.0), row("cupyflash", 1.0, "b"), row("cupyflash", 1.0, "c")]
    new = [row("cupyflash", 1.01), row("cupyflash", 1.05, "b"), row("cupyflash", 0.9, "c")]
    status, printed = run(old, new)
    assert status == 1
    assert verdicts(printed) == [("fwd b", "cupyflash", "slower"), ("fwd c", "cupyflash", "faster")]
    assert "1 slower, 1 faster, 1 within the noise or 2.0%" in printed
    assert run(old, new, "--threshold", "0.06")[0] == 0
    status, printed = run(old, [*new[::2], row("cupyflash", 1.0, "d")])
    assert status == 0 and "2 rows in one file only" in printed


def test_the_noise_of_both_files_counts(run):
    old, steady = row("cupyflash", 1.0, **QUARTILES), {"quartiles_ms": [1.04, 1.06]}
    assert run([old], [row("cupyflash", 1.05, **steady)])[0] == 1
    noisy = {"quartiles_ms": [1.0, 1.2]}
    assert run([old], [row("cupyflash", 1.05, **noisy)])[0] == 0
    assert run([row("cupyflash", 1.0, quartiles_ms=[0.9, 1.1])], [row("cupyflash", 1.05)])[0] == 0
    assert run([row("cupyflash", 1.0)], [row("cupyflash", 1.05)])[0] == 1  # no noise is known
    faster = run([old], [row("cupyflash", 0.9, quartiles_ms=[0.85, 0.99])])[1]
    assert "0 slower, 0 faster" in faster


def test_peers_tell_the_drift_and_do_not_decide(run):
    old = [row("cupyflash", 1.0, **QUARTILES), row("sdpa-cudnn", 1.0, **QUARTILES)]
    new = [row("cupyflash", 1.1, quartiles_ms=[1.09, 1.11])]
    status, printed = run(old, [*new, row("sdpa-cudnn", 1.1, quartiles_ms=[1.09, 1.11])])
    assert status == 1 and "drift 1.100, not divided out" in printed
    assert ("fwd a", "sdpa-cudnn", "slower") in verdicts(printed)
    status, printed = run(old, [*new, row("sdpa-cudnn", 1.1)], "--without-drift")
    assert status == 0 and verdicts(printed) == []
    assert run(old, [row("cupyflash", 1.0), row("sdpa-cudnn", 1.3)])[0] == 0


def test_files_that_cannot_be_compared(run):
    rows = [row("cupyflash", 1.0)]
    for arguments, options in [
        ((rows, rows), {"gpus": ("G", "H")}),
        ((rows, [row("cupyflash", 1.0, "b")]), {}),
        (([{"op": "memory", "bytes": 3}],) * 2, {}),
    ]:
        with pytest.raises(SystemExit) as error:
            run(*arguments, **options)
        assert error.value.code == 2
    assert run(rows, rows, "--any-gpu", gpus=("G", "H"))[0] == 0


def test_every_results_file_has_names_for_its_rows(capsys):
    """Each file with times, beside itself: no two of its rows have one name."""
    from bench.lib.report import RESULTS

    compared = 0
    for path in sorted(RESULTS.glob("*.json")):
        results = json.loads(path.read_text())
        timed = [x for x in results.get("rows", ()) if "gpu" in results and compare.time_of(x)]
        if timed:
            assert len(compare.by_name(timed)) == len(timed), path.name
            assert all(map(compare.title_of, timed))
            assert compare.main([str(path), str(path)]) == 0
            compared += 1
    assert compared >= 10 and " 0 slower, 0 faster" in capsys.readouterr().out
