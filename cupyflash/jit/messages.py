"""Texts for the user: a log line for each compilation, shown on a terminal if it took a second."""

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from .. import environment
from . import compiler
from .cache import Built

logger = logging.getLogger("cupyflash")

_NOTICEABLE = 1.0  # seconds
_LINE_SECONDS = 5.0  # between two lines of progress where there is no terminal

_warned = False  # whether a slow kernel has been reported


def compiled(built: Built, terminal: bool = True) -> None:
    """Log a compilation, and print it if the user may wonder what takes so long.

    ``terminal=False`` where a progress bar says so already.
    """
    line = f"compiled {built.expression} for {built.arch} in {built.seconds:.1f} s"
    logger.info(line)
    if terminal and built.seconds > _NOTICEABLE and sys.stderr.isatty() and not _shown():
        print(f"cupyflash: {line}", file=sys.stderr)


def details(built: Built, compiled_now: bool) -> None:
    """Print configuration, registers, spills and seconds if CUPYFLASH_DEBUG=1."""
    if environment.current().debug:
        origin = f"compiled in {built.seconds:.2f} s" if compiled_now else "from the cache"
        print(
            f"cupyflash: {built.expression} for {built.arch}, {origin}: {built.registers} "
            f"registers, {built.spill_bytes} bytes spilled, {built.path.parent}",
            *built.warnings,
            sep="\n  ",
            file=sys.stderr,
        )


def warn_of_slow(built: Built) -> None:
    """Warn, once a process, of a kernel that NVRTC has made slower than it should be."""
    global _warned
    if built.slowness and not _warned:
        _warned = True
        text = f"{slow_kernel(built)}; {compiler.cure(built.nvrtc)}"
        warnings.warn(f"cupyflash: {text}", RuntimeWarning, stacklevel=2)


def slow_kernel(built: Built) -> str:
    """The fact that `warn_of_slow` tells."""
    return f"{built.expression} is slow, as NVRTC {built.nvrtc} has compiled it: {built.slowness}"


def plan(missing: int, cached: int, seconds: float, jobs: int) -> str:
    """The heading of a warm-up: "188 kernels to compile (…), about 2 minutes …"."""
    text = f"cupyflash: {_count(missing, 'kernel')} to compile"
    if cached:
        text += f" ({cached} more {'is' if cached == 1 else 'are'} in the cache)"
    return f"{text}, about {_about(seconds)} in {_count(jobs, 'process')}" if missing else text


@contextlib.contextmanager
def progress(heading: str, total: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Print the heading on stderr; a function to call with a text when one of the steps is done.

    A bar on a terminal; elsewhere, and without rich, a line every few seconds and one at the end.
    """
    if not wanted:
        yield lambda text: None
        return
    print(heading, file=sys.stderr, flush=True)
    rich = _rich_progress() if sys.stderr.isatty() and total else None
    if rich is None:
        yield _lines(total)
        return
    with rich as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _lines(total: int) -> Callable[[str], None]:
    start = last = time.monotonic()
    done = 0

    def advance(text: str) -> None:
        nonlocal done, last
        done, now = done + 1, time.monotonic()
        if done == total or now - last >= _LINE_SECONDS:
            last, left = now, (now - start) / done * (total - done)
            rest = f"about {_about(left)} left" if done < total else f"in {_about(now - start)}"
            print(f"[{done}/{total}] {text}, {rest}", file=sys.stderr, flush=True)

    return advance


def _rich_progress() -> "contextlib.AbstractContextManager | None":
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        return None
    columns = BarColumn(), MofNCompleteColumn(), Remaining(), TextColumn("{task.description}")
    return Progress(*columns, console=Console(stderr=True))


def _about(seconds: float) -> str:
    if seconds < 90:
        return _count(max(round(seconds), 1), "second")
    minutes = round(seconds / 60)
    return _count(minutes, "minute") if minutes < 90 else _count(round(minutes / 60), "hour")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def _shown() -> bool:
    """Whether the application's own logging shows the line, or the debug line says more."""
    return environment.current().debug or logger.isEnabledFor(logging.INFO)
