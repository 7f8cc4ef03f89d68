"""The shapes of `bench decode --bars`, and the bounds that their times have to keep.

Times are those of the clock of `bench decode`, launch included. A bound holds if the figure is not
larger.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.table import Table

from bench.lib.report import Row, new_table

OURS, CUDNN = "cupyflash", "sdpa-cudnn"
COPY_RATE = 0.97  # of the card's copy
RAGGED = {"model": "32/8", "batch": 32, "length": 512, "longest": 131072}
EVEN = {"model": "32/8", "batch": 32, "length": (31 * 512 + 131072) // 32}
TOKENS = {"model": "32/4", "batch": 8, "length": 8192}
PAGES = {"model": "32/8", "batch": 32, "length": 4096}
CHUNK = {"model": "32/8", "batch": 1, "length": 32768, "tokens": 512}
NARROW = {"model": "32/4", "batch": 1, "length": 262144}
SPLIT = {"model": "32/4", "batch": 1, "length": 8192, "attend_only": True}
WHOLE = {"model": "32/4", "batch": 64, "length": 128, "splits": 1}  # as many bytes
LARGE = [
    PAGES,
    {"model": "32/8", "batch": 8, "length": 32768},
    {"model": "32/8", "batch": 128, "length": 1024},
    {"model": "64/8", "batch": 16, "length": 4096},
    {"model": "64/8", "batch": 4, "length": 32768},
]
SINGLE = [{**SPLIT, "length": length} for length in (1024, 4096, 8192, 32768, 131072)]


class Bar(NamedTuple):
    """A bound.

    Attributes:
        what: the shape.
        figure: from the times of two cells in ms.
        most: what it may be.
        cell, other: the sizes of the cells; each is the time of cupyflash but for ``peer``.
        peer: whose time that of the other cell is.
    """

    what: str
    figure: Callable[[float, float], float]
    most: float
    cell: dict[str, Any]
    other: dict[str, Any]
    peer: str = OURS


def _ratio(ours: float, other: float) -> float:
    return ours / other


BARS = [
    *(Bar("as cuDNN attending only", _ratio, 1.0, cell, cell, CUDNN) for cell in SINGLE),
    Bar("one long sequence, as many keys evenly", _ratio, 1.15, RAGGED, EVEN),
    Bar("4 new tokens, one", _ratio, 1.2, TOKENS | {"tokens": 4}, TOKENS),
    Bar("8 new tokens, one", _ratio, 1.35, TOKENS | {"tokens": 8}, TOKENS),
    *(
        Bar(f"pages of {page}, contiguous", _ratio, most, PAGES | {"page": page}, PAGES)
        for page, most in ((1, 1.08), (8, 1.03), (16, 1.03), (64, 1.03))
    ),
    *(
        Bar(f"512 new tokens, pages of {page}", _ratio, most, CHUNK | {"page": page}, CHUNK)
        for page, most in ((16, 1.05), (64, 1.05), (100, 1.25))
    ),
    *(
        Bar(f"cache of {cache}, of bfloat16", _ratio, 0.58, NARROW | {"cache": cache}, NARROW)
        for cache in ("int8", "float8_e4m3fn")
    ),
    Bar("split, not split: us more", lambda a, b: 1e3 * (a - b), 2.0, SPLIT, WHOLE),
]


def problems(make: Callable[..., Any]) -> list[Any]:
    """The cells of all bounds, each once, by ``make(dtype=..., **sizes)``."""
    pairs = [cell for bar in BARS for cell in (bar.cell, bar.other)]
    return list(dict.fromkeys(make(dtype="bfloat16", **cell) for cell in (*LARGE, *pairs)))


def table(rows: list[Row], copy_gbps: float) -> Table:
    """what | its figure | the bound, of what was measured."""
    found = new_table("what", "", right=("figure", "at most"))

    def add(what: str, figure: float, most: float) -> None:
        found.add_row(what, "ok" if figure <= most else "MISSED", f"{figure:.3f}", f"{most:g}")

    for cell in LARGE:
        for row in _rows(rows, cell, OURS):
            add(f"copy rate / rate, {row['problem']}", copy_gbps / row["gbps"], 1 / COPY_RATE)
    for bar in BARS:
        pairs = zip(_rows(rows, bar.cell, OURS), _rows(rows, bar.other, bar.peer))
        for own, other in pairs:
            add(f"{bar.what}: {own['problem']}", bar.figure(own["ms"], other["ms"]), bar.most)
    return found


def _rows(rows: list[Row], cell: dict[str, Any], impl: str) -> list[Row]:
    """The row of an implementation, if it was measured."""
    sizes = {"tokens": 1, "page": 0, "longest": 0, "cache": "", "splits": 0} | cell
    sizes = {name: x for name, x in sizes.items() if name != "attend_only"} | {"impl": impl}
    return [row for row in rows if all(row[name] == x for name, x in sizes.items())][:1]
