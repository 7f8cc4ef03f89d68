"""Two results files of one script: what became faster or slower beyond the noise of both.

    python -m bench compare old.json new.json
    git show HEAD:bench/results/models.json > /tmp/old.json
    python -m bench compare /tmp/old.json bench/results/models.json --threshold 0.03

A row is slower if its median time grew by more than the threshold and if the quartiles of both runs
do not overlap; faster likewise. Rows without quartiles have the threshold alone. Peers do not
change with the project, so that the mean change of theirs is the drift between the runs: of clocks,
temperature and versions. ``--without-drift`` divides it out. Only rows of cupyflash decide.

Exit status 1 if any of them is slower, 2 if the files cannot be compared.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.lib import harness, report
from bench.lib.report import Row

# What was measured, besides all floats; the other fields say which row it is.
MEASURED = {"repeats", "sm_mhz", "tokens_per_s", "losses", "quartiles_ms", "gpu_ms"}
MEASURED |= {"built_in", "fastest", "rounds", "candidates", "left_out"}  # of bench tuning


@dataclasses.dataclass(frozen=True)
class Change:
    """A row of the old file and the same of the new one.

    Attributes:
        drift: that the time of the new one is divided by.
    """

    old: Row
    new: Row
    drift: float = 1.0

    @property
    def impl(self) -> str:
        return self.new.get("impl", "cupyflash")

    @property
    def ratio(self) -> float:
        """How many times as long as before."""
        return time_of(self.new) / time_of(self.old) / self.drift

    def verdict(self, threshold: float) -> str:
        """Whether it is "slower" or "faster"; empty if it is neither."""
        of_old, of_new = quartiles_of(self.old), quartiles_of(self.new)
        if self.ratio > 1 + threshold and of_new[0] / self.drift > of_old[1]:
            return "slower"
        if 1 / self.ratio > 1 + threshold and of_new[1] / self.drift < of_old[0]:
            return "faster"
        return ""


def time_of(row: Row) -> float | None:
    return row.get("ms", row.get("us"))


def quartiles_of(row: Row) -> Sequence[float]:
    """The first and the third; the median where a row has none."""
    return row.get("quartiles_ms", [time_of(row)] * 2)


def by_name(rows: list[Row]) -> dict[tuple, Row]:
    """Rows with a time, by the fields that name them."""
    names = lambda row: tuple(  # noqa: E731
        (field, str(value))
        for field, value in sorted(row.items())
        if field not in MEASURED and not isinstance(value, float)
    )
    return {names(row): row for row in rows if time_of(row)}


def changes_of(old: dict[tuple, Row], new: dict[tuple, Row]) -> list[Change]:
    """All rows that both files have."""
    return [Change(old[name], row) for name, row in new.items() if name in old]


def drift_of(changes: list[Change]) -> float:
    """The mean change of the peers; 1 without any."""
    ratios = [x.ratio for x in changes if not report.is_ours(x.impl)]
    return report.geometric_mean(ratios) if ratios else 1.0


def title_of(row: Row) -> str:
    """What to call a row: its pass and problem, or all texts and counts."""
    if {"what", "problem"} & row.keys():
        return " ".join(row[name] for name in ("pass", "what", "problem") if name in row)
    if {"pass", "head_dim"} <= row.keys():
        return "{} {}".format(*report.cell(row))
    fields = {"impl", *MEASURED}
    return " ".join(
        str(x) for name, x in row.items() if name not in fields and type(x) is not float
    )


def changes_table(changes: list[Change], threshold: float) -> Table:
    """row | implementation | old | new | times as long | verdict, the slowest first."""
    table = report.new_table("row", "impl", right=("old", "new", "new / old", "verdict"))
    for change in sorted(changes, key=lambda x: -x.ratio):
        if verdict := change.verdict(threshold):
            figures = (f"{time_of(change.old):.4f}", f"{time_of(change.new):.4f}")
            style = "bold" if report.is_ours(change.impl) else ""
            cells = (title_of(change.new), change.impl, *figures, f"{change.ratio:.3f}", verdict)
            table.add_row(*cells, style=style)
    return table


def summary(changes: list[Change], threshold: float) -> list[str]:
    """The mean change of each implementation, and how many rows of ours changed."""
    by_impl: dict[str, list[float]] = {}
    for change in changes:
        by_impl.setdefault(change.impl, []).append(change.ratio)
    lines = [
        f"{impl}: {report.geometric_mean(ratios):.3f} times as long, mean of {len(ratios)} rows"
        for impl, ratios in by_impl.items()
    ]
    verdicts = [x.verdict(threshold) for x in changes if report.is_ours(x.impl)]
    slower, faster, same = (verdicts.count(x) for x in ("slower", "faster", ""))
    counts = f"{slower} slower, {faster} faster, {same} within the noise or {threshold:.1%}"
    return [*lines, f"rows of cupyflash: {counts}"]


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("compare", __doc__, repeats=None, output=False)
    add = parser.add_argument
    add("old", type=Path)
    add("new", type=Path)
    add("--threshold", type=float, default=0.02, help="a share of the old time; default 0.02")
    add("--without-drift", action="store_true", help="divide by the mean change of the peers")
    add("--any-gpu", action="store_true", help="compare files of different GPUs")
    options = parser.parse_args(arguments)
    files: list[dict[str, Any]] = [json.loads(x.read_text()) for x in (options.old, options.new)]
    gpus = [results["gpu"] for results in files]
    if gpus[0] != gpus[1] and not options.any_gpu:
        parser.error(f"the files must be of one GPU (or take --any-gpu), got {' and '.join(gpus)}")
    old, new = (by_name(results["rows"]) for results in files)
    changes = changes_of(old, new)
    if not changes:
        parser.error("the files must have times of the same rows, got none in common")
    drift = drift_of(changes)
    if options.without_drift:
        changes = [dataclasses.replace(change, drift=drift) for change in changes]
    out = report.console()
    out.print(changes_table(changes, options.threshold))
    for line in summary(changes, options.threshold):
        out.print(line, soft_wrap=True)
    how = "divided out" if options.without_drift else "not divided out"
    out.print(f"drift {drift:.3f}, {how}; {len(old.keys() ^ new.keys())} rows in one file only")
    return int(
        any(report.is_ours(x.impl) and x.verdict(options.threshold) == "slower" for x in changes)
    )
