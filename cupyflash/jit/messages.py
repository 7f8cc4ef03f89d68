"""What compilation tells the user: a log line each, seen on a terminal if it took a second."""

import logging
import sys

from .. import environment
from .entry import Built

logger = logging.getLogger("cupyflash")

_NOTICEABLE = 1.0  # seconds


def compiled(built: Built, terminal: bool = True) -> None:
    """Log a compilation, and print it if the user may wonder what takes so long.

    ``terminal=False`` where a progress bar says so already.
    """
    line = f"compiled {built.expression} for {built.arch} in {built.seconds:.1f} s"
    logger.info(line)
    if terminal and built.seconds > _NOTICEABLE and sys.stderr.isatty() and not _shown():
        print(f"cupyflash: {line}", file=sys.stderr)


def details(built: Built, compiled_now: bool) -> None:
    """With CUPYFLASH_DEBUG=1, print configuration, registers, spills and seconds."""
    if environment.current().debug:
        origin = f"compiled in {built.seconds:.2f} s" if compiled_now else "from the cache"
        print(
            f"cupyflash: {built.expression} for {built.arch}, {origin}: {built.registers} "
            f"registers, {built.spill_bytes} bytes spilled, {built.path.parent}",
            *built.warnings,
            sep="\n  ",
            file=sys.stderr,
        )


def _shown() -> bool:
    """Whether the application's own logging shows the line, or the debug line says more."""
    return environment.current().debug or logger.isEnabledFor(logging.INFO)
