"""All tables and pictures, one script after the other, each in a process of its own.

    python -m bench all --quick       on one H200 in less than 10 minutes
    python -m bench all               everything at full length, which takes much longer
    python -m bench all --quick --only ladder memory

With ``--quick``, scripts that measure only a part of their problems write to bench/results/quick/,
so that no complete results are lost; the others write to bench/results/ as always. A script that
fails, or that takes longer than ``--timeout``, does not stop the others: the end of its output is
printed last, beside the file with all of it. Exit status 1 if any failed, or without a GPU.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.lib import harness, report

QUICK = "quick"  # the folder of results that are a part of the problems
TAIL = 15  # lines of the output of a script that failed


@dataclasses.dataclass(frozen=True)
class Step:
    """One script.

    Attributes:
        arguments: of the module, in every run.
        quick: its further arguments with ``--quick``.
        partial: with ``--quick`` it measures only a part of its problems.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    partial: bool = False


FEW_CELLS = "--head-dim 64 128 --seqlen 1024 4096 16384 --repeats 5"
FEW_MODELS = "--only GPT-2 Llama Mistral Whisper ViT --repeats 5"
STEPS = (
    Step("attention", "attention", quick=tuple(FEW_CELLS.split()), partial=True),
    Step("models", "models", quick=tuple(FEW_MODELS.split()), partial=True),
    Step("ladder", "ladder", ("--traffic",), ("--repeats", "5", "--limit-ms", "1000")),
    Step("precision", "precision", quick=("--lengths", "128", "1024"), partial=True),
    Step("memory", "memory"),
    Step("profile", "profile", quick=("--quick",), partial=True),
    Step("tuning", "tuning", quick=("--quick",), partial=True),
    Step("timeline", "timeline"),
    Step("time budget", "time_budget"),
    Step("rounding", "rounding"),
    Step("diagrams", "plot_diagrams"),
)


def folder_of(step: Step, quick: bool) -> Path:
    return report.RESULTS / QUICK if quick and step.partial else report.RESULTS


def command_of(step: Step, quick: bool) -> list[str]:
    options = [*step.arguments, *(step.quick if quick else ())]
    return [sys.executable, "-m", "bench", step.module, *options]


def run(step: Step, options: argparse.Namespace, log: Path) -> str:
    """Run a step with its output in ``log``; returns why it failed, or ""."""
    environment = {**os.environ, report.FOLDER: str(folder_of(step, options.quick))}
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command_of(step, options.quick),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=options.timeout,
            )
        except subprocess.TimeoutExpired:
            return f"over {options.timeout:g} s"
    return f"exit status {done.returncode}" if done.returncode else ""


def tell(console: Console, step: Step, why: str, log: Path) -> None:
    """Print the end of a failed script's output."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    console.print(f"\n{step.name}: {why}, all of its output is in {log}", markup=False)
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("all", __doc__, repeats=None, output=False)
    add, names = parser.add_argument, [step.name for step in STEPS]
    add("--quick", action="store_true")
    add("--only", nargs="+", choices=names, metavar="STEP", default=names, help=", ".join(names))
    add("--timeout", type=float, help="seconds of a script; default 180 with --quick, else 7200")
    options = parser.parse_args(arguments)
    harness.require_gpu("all")
    options.timeout = options.timeout or (180.0 if options.quick else 7200.0)
    console, logs = report.console(), Path(tempfile.mkdtemp(prefix="bench-all-"))
    table, failed = report.new_table("step", right=("seconds", "result")), []
    begin = time.monotonic()
    for step in STEPS:
        if step.name not in options.only:
            continue
        start, log = time.monotonic(), logs / f"{step.name.replace(' ', '-')}.log"
        with console.status(step.name):
            why = run(step, options, log)
        seconds = f"{time.monotonic() - start:.1f}"
        console.print(f"{step.name}: {why or 'done'} after {seconds} s", markup=False)
        table.add_row(step.name, seconds, why or "done")
        if why:
            failed.append((step, why, log))
    table.add_row("all", f"{time.monotonic() - begin:.1f}", f"{len(failed)} failed")
    for step, why, log in failed:
        tell(console, step, why, log)
    console.print(table)
    return int(bool(failed))
