"""``python -m cupyflash tune``: the fastest tiles of an operation on this GPU."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from .. import machine
from ..runtime import tuning
from .generate import DTYPES

if TYPE_CHECKING:
    from ..testing.problem import Problem
    from .tuner import Found

OPERATIONS = ("attention",)
TOKENS, HIDDEN = 16384, 2048  # tokens of the default batch; columns of all heads together
DEFAULT_SECONDS = 60.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="search the fastest tiles of an operation on this GPU",
        description="Compiles, checks and times the tiles that the kernels of a pass can have, "
        "beside the built-in choice. What --save writes is used by new processes in calls of the "
        "same dtype, head dim, options and class of lengths.",
    )
    add = parser.add_argument
    add("--operation", choices=OPERATIONS, default="attention")
    add("--pass", dest="direction", choices=("fwd", "bwd"), default="fwd")
    add("--dtype", type=_dtype, default="bfloat16", metavar="TYPE", help="default bf16")
    add("--head-dim", type=_positive, default=128, metavar="D", help="default 128")
    add("--seqlen", type=_positive, default=4096, metavar="N", help="default 4096")
    add("--batch", type=_positive, metavar="N", help=f"default {TOKENS} / seqlen")
    add("--heads", type=_positive, metavar="N", help=f"default {HIDDEN} / head dim")
    add("--heads-kv", type=_positive, metavar="N", help="of keys and values; default as many")
    add("--causal", action="store_true")
    add("--softcap", type=float, default=0.0, metavar="X", help="default 0: none")
    text = f"for all of it; default {DEFAULT_SECONDS:g}"
    add("--budget", type=_seconds, default=DEFAULT_SECONDS, metavar="SECONDS", help=text)
    text = "keep the choice for new processes, if it is faster than the built-in one"
    add("--save", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 1 if a candidate gave a wrong result."""
    if arguments.head_dim % 8:
        raise ValueError(f"--head-dim must be a multiple of 8, got {arguments.head_dim}")
    if problem := machine.gpu_problem():
        raise RuntimeError(f"needs a GPU to run on: {problem}")
    if arguments.dtype == "bfloat16" and not machine.has("ml_dtypes"):
        raise ImportError("bf16 in CuPy arrays needs ml_dtypes: pip install ml_dtypes")
    if arguments.save:
        tuning.require_writable()  # before the search, which takes its time
    from rich.console import Console

    from .tables import print_whole

    console = Console(highlight=False)
    found = _search(_problem(arguments), arguments.direction, arguments.budget)
    print_whole(table(found))
    console.print(verdict(found), soft_wrap=True, markup=False)
    if arguments.save:
        console.print(_save(found), soft_wrap=True, markup=False)
    return int(any(x.wrong for x in found.candidates))


def table(found: "Found") -> Any:
    """The candidates, the built-in choice first; a rich table."""
    from .tables import TERMINAL, new_table
    from .tuner import label

    rows = new_table("tile", "", right=("registers", "KiB", "ms", "speed"), **TERMINAL)
    for x in found.candidates:
        note = "built in" if x is found.built_in else ""
        if x is found.best:
            note = f"[bold green]{note + ', ' if note else ''}best[/]"
        ms = "" if x.ms is None else f"{x.ms:.4f}"
        speed = "" if x.ms is None else f"{found.built_in.ms / x.ms:.3f}"
        memory = f"{x.config.shared_memory / 1024:.0f}"
        note = "[bold red]WRONG RESULT[/]" if x.wrong else x.note or note
        rows.add_row(label(x.tile), note, f"{x.registers or ''}", memory, ms, speed)
    return rows


def verdict(found: "Found") -> str:
    """The text that compares the best tile, and names each wrong result."""
    from .tuner import label

    lines = [f"{label(x.tile)} is wrong: {x.wrong}" for x in found.candidates if x.wrong]
    gain = found.built_in.ms / found.best.ms - 1
    text = f"{label(found.best.tile)} is {gain:.1%} faster than the built-in choice"
    if found.best is found.built_in:
        text = "nothing is faster than the built-in choice by 1 % or more"
    return "\n".join([*lines, f"{found.key}: {text} (medians of {found.rounds} rounds)"])


def _search(problem: "Problem", direction: str, seconds: float) -> "Found":
    """Search with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from .tuner import search

    columns = (
        TextColumn("tune"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("inputs", total=seconds)

        def advance(text: str) -> None:
            bar.update(task, completed=min(seconds, time.monotonic() - start), description=text)

        return search(problem, direction, seconds, advance)


def _problem(arguments: argparse.Namespace) -> "Problem":
    from ..testing.problem import Problem

    heads = arguments.heads or max(1, HIDDEN // arguments.head_dim)
    return Problem(
        dtype=arguments.dtype,
        head_dim=arguments.head_dim,
        batch=arguments.batch or max(1, TOKENS // arguments.seqlen),
        seqlen=arguments.seqlen,
        heads=heads,
        heads_kv=arguments.heads_kv or heads,
        causal=arguments.causal,
        softcap=arguments.softcap,
    )


def _save(found: "Found") -> str:
    """Keep the best, or forget an older choice where the built-in one is the best."""
    import cupy

    device = cupy.cuda.Device().id
    if found.best is found.built_in:
        if tuning.tile(device, found.key) is None:
            return "nothing to save"
        return f"removed the older choice from {tuning.save(device, found.key, None)}"
    path = tuning.save(device, found.key, found.best.tile)
    return f"saved to {path}; processes that start from now on use it"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _dtype(text: str) -> str:
    dtype = DTYPES.get(text, text)
    if dtype not in DTYPES.values():
        allowed = ", ".join((*DTYPES, *DTYPES.values()))
        raise argparse.ArgumentTypeError(f"must be one of {allowed}, got {text!r}")
    return dtype


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds
