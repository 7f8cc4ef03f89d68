"""Whether .ci/gpu-report.json describes the sources as they are now. Standard library only.

Exit code 0: current. 1: sources changed since (they are listed). 2: no usable report, or it holds a
failure. `pytest --gpu-report=.ci/gpu-report.json` on a GPU machine writes the report; the same with
CUPYFLASH_BACKEND=sm80 or simt adds the run of one backend to the report of the same sources.
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / ".ci" / "gpu-report.json"
FOLDERS = ("cuda_src", "cupyflash", "tests")
BACKENDS = ("sm80", "simt")  # that the suite also runs with alone


def file_digests() -> dict[str, str]:
    """SHA-256 of every source file by its path from the root, sorted; hidden files do not count."""
    digests = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if path.is_file() and not hidden:
                digests["/".join(parts)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(digests.items()))


def source_digest(digests: dict[str, str]) -> str:
    """One SHA-256 over the paths and digests of all files."""
    lines = "".join(f"{digest}  {path}\n" for path, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


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


def merged(
    report: dict,
    backend: str | None,
    machine: dict[str, str],
    run: dict[str, object],
    sanitizer: dict[str, str],
    files: dict[str, str],
) -> dict:
    """The report with a run in it: of everything, or of one forced backend.

    Runs of other sources are dropped from the backends; so is a whole run from a backend's.
    """
    digest = source_digest(files)
    same = report.get("source_digest") == digest
    backends = report.get("backends", {}) if same else {}
    if backend is None:
        whole = {**machine, **run, "sanitizer": sanitizer}
    elif same:
        whole = {name: x for name, x in report.items() if name not in ("backends", "files")}
        whole.pop("source_digest")
    else:
        raise ValueError(
            "gpu-report: a backend's run needs the whole run of the same sources first"
        )
    if backend is not None:
        backends = {**backends, backend: run}
    return {**whole, "backends": backends, "source_digest": digest, "files": files}


def main() -> int:
    try:
        report = json.loads(REPORT.read_text())
        backends = report.get("backends", {})
        failed = report["failed"] + sum(run["failed"] for run in backends.values())
        failed += len([result for result in report["sanitizer"].values() if result != "clean"])
        files, digest = report["files"], report["source_digest"]
    except (OSError, ValueError, KeyError) as error:
        print(f"gpu-report: no usable report at {REPORT.relative_to(ROOT)} ({error!r})")
        return 2
    if failed:
        print(f"gpu-report: {failed} failures on {report['gpu']} ({report['date']})")
        return 2
    now = file_digests()
    missing = [backend for backend in BACKENDS if backend not in backends]
    if source_digest(now) == digest and not missing:
        print("current")
        return 0
    if source_digest(now) == digest:
        print(f"gpu-report: no run with CUPYFLASH_BACKEND={' and '.join(missing)}")
        return 1
    print(f"gpu-report: stale, changed since {report['date']}:")
    print("\n".join(changes(files, now)))
    return 1


if __name__ == "__main__":
    sys.exit(main())
