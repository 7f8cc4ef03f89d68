"""Whether .ci/gpu-report.json describes the sources as they are now. Standard library only.

    python3 .ci/gpu_report.py              exit code 0: current. 1: something has not run on these
                                           sources. 2: no usable report, or a failure on them
    python3 .ci/gpu_report.py --missing    the test files that have not run; --backend sm80 or simt:
                                           those of a run with that backend alone

`pytest --gpu-report=.ci/gpu-report.json` on a GPU machine writes the report, a test file as soon as
all of its tests have ended: a run that is cut off goes on with

    pytest --gpu-report=.ci/gpu-report.json $(python3 .ci/gpu_report.py --missing)

All results are lost when a source changes, and those of a test file when it changes or a module of
`tests` that it uses.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / ".ci" / "gpu-report.json"
FOLDERS = ("cuda_src", "cupyflash", "tests")
MOST = 20  # changed files that are listed
NAMED = re.compile(r"\b(?:from|import) +(\w+)|\b(\w+)\.py\b")
LOADED = re.compile(r"^(?:from|import) +(\w+)", re.M)  # without the imports inside functions
RUNS = ("default", "sm80", "simt")  # the backends that are forced; one run forces none
# Folders of which a forced backend changes nothing, so that such runs leave them out; they are in
# tests/conftest.py too.
NO_BACKEND = ("baselines", "bench", "block", "diffusion", "group_norm", "jit", "norm", "repository")

Report = dict[str, dict]


def sources() -> dict[str, str]:
    """SHA-256 of every file that all results depend on, by its path; hidden files do not count.

    Those of `tests` are what conftest.py imports when it is loaded, and what no test file names.
    """
    texts = module_texts()
    named = set().union(*(used(Path(path).stem, texts) for path in test_files()))
    common = used("conftest", texts, LOADED) | texts.keys() - named
    return {
        path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
        for path in sorted(files())
        if not path.startswith("tests/") or module_of(path) in common
    }


def test_files() -> dict[str, str]:
    """SHA-256 of every test file with the modules that it names, by its path."""
    texts = module_texts()
    digests = {}
    for path in sorted(files()):
        name = module_of(path)
        if path.startswith("tests/") and name.startswith("test_"):
            text = "\0".join(texts[x] for x in sorted(used(name, texts)))
            digests[path] = hashlib.sha256(text.encode()).hexdigest()
    return digests


def used(name: str, texts: dict[str, str], pattern: re.Pattern[str] = NAMED) -> set[str]:
    """The module itself, and those that it imports or runs, directly or through others."""
    found, new = set(), {name}
    while new:
        found |= new
        words = {word for x in new for y in pattern.finditer(texts[x]) for word in y.groups()}
        new = (words & texts.keys()) - found
    return found


def module_texts() -> dict[str, str]:
    """The text of every module in `tests`."""
    texts: dict[str, str] = {}
    for path in sorted(files()):
        if path.startswith("tests/"):
            name = module_of(path)
            texts[name] = texts.get(name, "") + (ROOT / path).read_text()
    return texts


def module_of(path: str) -> str:
    """The module of a file below `tests`: "tests/support/emulator/cuda.h" is in "emulator"."""
    _, *folders, name = Path(path).parts
    return (folders[1:] or [name])[0].partition(".")[0]


def files() -> Iterator[str]:
    """The paths of all files that results depend on."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if path.is_file() and not hidden:
                yield "/".join(parts)


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
    known = report if report.get("sources") == sources() else {"runs": {}}
    return not_run(known, run, test_files())


def not_run(report: Report, run: str, tests: dict[str, str]) -> list[str]:
    """Those of the test files that a report of these sources has no results of."""
    ran = report["runs"].get(run, {})
    return [
        file
        for file, digest in tests.items()
        if ran.get(file, {}).get("digest") != digest
        and (run == RUNS[0] or Path(file).parent.name not in NO_BACKEND)
    ]


def failures(report: Report, tests: dict[str, str]) -> list[str]:
    """What failed of the tests as they are now, and what the sanitizer found."""
    failed = [
        f"{run}: {test}"
        for run, files in report["runs"].items()
        for file, result in files.items()
        for test in result["failed"]
        if result["digest"] == tests.get(file)
    ]
    found = [f"{name}: {result}" for name, result in report["sanitizer"].items()]
    return failed + [line for line in found if not line.endswith(": clean")]


def verdict(report: Report) -> tuple[int, list[str]]:
    """The exit code, and what to say."""
    gpu, tests = report["machine"]["gpu"], test_files()
    if lines := changes(report["sources"], sources()):
        more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
        return 1, [f"gpu-report: stale, changed since the run on {gpu}:", *lines[:MOST], *more]
    if failed := failures(report, tests):
        return 2, [f"gpu-report: {len(failed)} failures on {gpu}:", *failed]
    left = {run: len(not_run(report, run, tests)) for run in RUNS}
    lines = [f"{number} files in the run {run}" for run, number in left.items() if number]
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
