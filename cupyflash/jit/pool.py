"""Many kernels at once: processes, because NVRTC holds a lock that threads would share."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool

from .. import environment
from ..kernel_config import KernelConfig
from . import builder, cache, messages
from .entry import Built

Task = tuple[KernelConfig, str]


def build_all(tasks: Iterable[Task], jobs: int | None = None, progress: bool = True) -> list[Built]:
    """Put the kernels of all (configuration, architecture) pairs into the cache. Needs no GPU.

    Args:
        tasks: pairs such as ``(config, "sm_90a")``; repeated ones are compiled once.
        jobs: processes; default one per core. More than one start fresh interpreters, so a script
            must call this under ``if __name__ == "__main__"``.
        progress: show a progress bar on stderr (plain lines where rich is not installed).

    Returns:
        What was built, in the order of the first occurrences in ``tasks``.

    Raises:
        CompileError: of the first kernel that fails; the rest is given up.
        OSError: the cache folder cannot be written.
        The others of `cupyflash.jit.build`.
    """
    tasks = list(dict.fromkeys(tasks))
    jobs = min(jobs or _cores(), len(tasks))
    cache.require_writable()
    results: dict[Task, Built] = {}
    with _progress(len(tasks), progress) as advance:
        for task, (built, compiled) in _run(tasks, jobs):
            results[task] = built
            if compiled:
                messages.compiled(built, terminal=False)
            messages.details(built, compiled)
            advance(f"{task[0].name} {task[1]}")
    return [results[task] for task in tasks]


def _run(tasks: list[Task], jobs: int) -> Iterator[tuple[Task, tuple[Built, bool]]]:
    """Yield (task, result) pairs in the order in which they finish."""
    if jobs <= 1:
        for task in tasks:
            yield task, builder.find_or_compile(*task)
        return
    # Not fork: the parent may hold threads, locks and a CUDA context.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        jobs, context, environment.install, (environment.current(),)
    ) as pool:
        futures = {pool.submit(builder.find_or_compile, *task): task for task in tasks}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "warmup: a worker process ended early (out of memory?); a script must call this "
                'under `if __name__ == "__main__"`, or with jobs=1'
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """A function to call with a text whenever one of ``total`` steps is done."""
    if not wanted:
        yield lambda text: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
    except ImportError:
        done = itertools.count(1)
        yield lambda text: print(f"[{next(done)}/{total}] {text}", file=sys.stderr)
        return
    columns = BarColumn(), MofNCompleteColumn(), Elapsed(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
