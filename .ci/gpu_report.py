"""Whether .ci/gpu-report.json describes the sources as they are now. Standard library only.

    python3 .ci/gpu_report.py              exit code 0: current. 1: something has not run on these
                                           sources. 2: no usable report, or it holds a failure
    python3 .ci/gpu_report.py --missing    the test files that have not run; --backend sm80 or simt:
                                           those of a run with that backend alone

`pytest --gpu-report=.ci/gpu-report.json` on a GPU machine writes the report, a test file as soon as
all of its tests have ended: a run that is cut off goes on with

    pytest --gpu-report=.ci/gpu-report.json $(python3 .ci/gpu_report.py --missing)

All results are lost when a file changes that is no test, and those of a test file when it changes.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / ".ci" / "gpu-report.json"
FOLDERS = ("cuda_src", "cupyflash", "tests")
MOST = 20  # changed files that are listed
RUNS = ("default", "sm80", "simt")  # the backends that are forced; one run forces none

Report = dict[str, dict]


def sources() -> dict[str, str]:
    """SHA-256 of every file that is no test, by its path; hidden files do not count."""
    tests = test_files()
    digests = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if path.is_file() and not hidden and "/".join(parts) not in tests:
                digests["/".join(parts)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(digests.items()))


def test_files() -> dict[str, str]:
    """SHA-256 of every test file, and of those that it imports, by its path."""
    texts = {path.stem: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}

    def closure(name: str, found: set[str]) -> set[str]:
        for imported in {name, *re.findall(r"^from (test_\w+) import", texts[name], re.M)} - found:
            found.add(imported)
            closure(imported, found)
        return found

    return {
        f"tests/{name}.py": hashlib.sha256(
            "\0".join(texts[x] for x in sorted(closure(name, set()))).encode()
        ).hexdigest()
        for name in sorted(texts)
    }


def load(path: Path) -> Report:
    """The report, or an empty one."""
    return json.loads(path.read_text()) if path.is_file() else {}


def with_results(
    report: Report,
    machine: dict[str, str],
    sources: dict[str, str],
    run: str,
    results: Report,
    sanitizer: dict[str, str],
) -> Report:
    """The report with results of test files in it, and without those of other sources.

    Args:
        machine: GPU, driver and versions; other machines do not add to a report.
        run: one of `RUNS`.
        results: of a test file each: digest, date, passed, failed (the tests), skipped, seconds.
    """
    head = {"machine": machine, "sources": sources}
    same = all(report.get(name) == value for name, value in head.items())
    runs, known = (report["runs"], report["sanitizer"]) if same else ({}, {})
    files = dict(sorted({**runs.get(run, {}), **results}.items()))
    sanitizer = dict(sorted({**known, **sanitizer}.items()))
    return {**head, "sanitizer": sanitizer, "runs": {**runs, run: files}}


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """One line for each file that was added, removed or changed."""
    lines = []
    for path in sorted(before.keys() | now.keys()):
        if path not in before:
            lines.append(f"added    {path}")
        elif path not in now:
            lines.append(f"removed  {path}")
        elif before[path] != now[path]:
            lines.append(f"changed  {path}")
    return lines


def missing(report: Report, run: str) -> list[str]:
    """The test files that have not run on these sources, as they are now."""
    same = report.get("sources") == sources()
    ran = report["runs"].get(run, {}) if same else {}
    return [x for x, digest in test_files().items() if ran.get(x, {}).get("digest") != digest]


def failures(report: Report) -> list[str]:
    """The tests that failed, and what the sanitizer found."""
    tests = [
        f"{run}: {test}"
        for run, files in report["runs"].items()
        for result in files.values()
        for test in result["failed"]
    ]
    found = [f"{name}: {result}" for name, result in report["sanitizer"].items()]
    return tests + [line for line in found if not line.endswith(": clean")]


def verdict(report: Report) -> tuple[int, list[str]]:
    """The exit code, and what to say."""
    gpu = report["machine"]["gpu"]
    if failed := failures(report):
        return 2, [f"gpu-report: {len(failed)} failures on {gpu}:", *failed]
    if lines := changes(report["sources"], sources()):
        more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
        return 1, [f"gpu-report: stale, changed since the run on {gpu}:", *lines[:MOST], *more]
    lines = [f"{len(x)} files in the run {run}" for run in RUNS if (x := missing(report, run))]
    return (1, ["gpu-report: not run are", *lines]) if lines else (0, ["current"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Is .ci/gpu-report.json current?")
    parser.add_argument("--missing", action="store_true", help="print the files that have not run")
    parser.add_argument("--backend", choices=RUNS, default=RUNS[0])
    args = parser.parse_args(arguments)
    try:
        report = load(REPORT)
        code, lines = (0, missing(report, args.backend)) if args.missing else verdict(report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        code, lines = 2, [f"gpu-report: no usable report at {REPORT.relative_to(ROOT)} ({error!r})"]
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
