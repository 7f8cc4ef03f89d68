"""Many kernels at once: processes, because NVRTC holds a lock that threads would share."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from .. import environment
from . import builder, cache, messages, sources
from .cache import Built
from .compiler import Kernel

Task = tuple[Kernel, str]

# Mean seconds of a kernel on one core of a server of 2023, by its folder of cuda_src; for a
# forecast that is right to a factor of two.
SECONDS = {
    "attention": 0.9,
    "baselines": 0.1,
    "block": 2.0,
    "decode": 0.5,
    "diffusion": 0.2,
    "group_norm": 0.4,
    "linear": 0.5,
    "norm": 0.3,
    "transfer": 0.2,
}
START_SECONDS = 2.0  # seconds of a process until it compiles


def build_all(tasks: Iterable[Task], jobs: int | None = None, progress: bool = True) -> list[Built]:
    """Put the kernels of all (configuration, architecture) pairs into the cache. Needs no GPU.

    Args:
        tasks: pairs such as ``(config, "sm_90a")``; repeated ones are compiled once.
        jobs: processes; default one per core. More than one start fresh interpreters, so a script
            must call this under ``if __name__ == "__main__"``.
        progress: say on stderr how much there is to do, and how far it is.

    Returns:
        What was built, in the order of the first occurrences in ``tasks``.

    Raises:
        CompileError: of the first kernel that fails; the rest is given up.
        KeyboardInterrupt: the processes have ended; what was compiled stays in the cache.
        OSError: the cache folder cannot be written.
        The others of `cupyflash.jit.build`.
    """
    tasks = list(dict.fromkeys(tasks))
    if environment.current().no_jit:
        raise RuntimeError("warmup: CUPYFLASH_NO_JIT must be 0 or unset, got 1")
    folder = cache.require_writable()
    lacking = missing(tasks)
    cached = set(tasks).difference(lacking)
    jobs = min(jobs or cores(), len(lacking))
    results: dict[Task, Built] = {}
    for task in tasks:
        if task in cached:
            results[task], compiled = builder.find_or_compile(*task)
            messages.details(results[task], compiled)
    heading = messages.plan(len(lacking), len(cached), forecast(lacking, jobs), jobs)
    with (
        messages.progress(heading, len(lacking), progress) as advance,
        contextlib.closing(_run(lacking, jobs)) as finished,
    ):
        for task, (built, compiled) in finished:
            results[task] = built
            if built.path.parent.parent != folder:  # a private one, of a process that ends
                raise OSError(
                    f"warmup: the cache folder {folder} must have room for all kernels, got a "
                    f"failure to write {task[0].expression} for {task[1]}"
                )
            if compiled:
                messages.compiled(built, terminal=False)
            messages.details(built, compiled)
            advance(f"{task[0].name} {task[1]}")
    return [results[task] for task in tasks]


def missing(tasks: list[Task]) -> list[Task]:
    """The tasks whose kernels the cache lacks."""
    digests = {source: sources.digest(source) for source in {x.source for x, _ in tasks}}
    names = [builder.entry_name(x, arch, digests[x.source]) for x, arch in tasks]
    return [task for task, name in zip(tasks, names) if not cache.lookup(name)]


def forecast(tasks: list[Task], jobs: int) -> float:
    """About how many seconds the compilation takes in so many processes."""
    total = sum(SECONDS.get(config.source.partition("/")[0], 0.5) for config, _ in tasks)
    return total / max(jobs, 1) + (START_SECONDS if jobs > 1 else 0)


def _run(tasks: list[Task], jobs: int) -> Iterator[tuple[Task, tuple[Built, bool]]]:
    """Yield (task, result) pairs in the order in which they finish."""
    if jobs <= 1:
        for task in tasks:
            yield task, builder.find_or_compile(*task)
        return
    # Only warm-ups need these imports, which take longer than `import cupyflash`.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # A forked process would have the parent's locks and CUDA context, but not its threads.
    context = multiprocessing.get_context("spawn")
    settings = (environment.current(),)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, context, environment.install, settings) as pool:
        try:
            with _children_ignore_interrupts():  # the first submissions start the processes
                futures = {pool.submit(builder.find_or_compile, *task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "warmup: a worker process ended early (out of memory?); a script must call this "
                'under `if __name__ == "__main__"`, or with jobs=1'
            ) from error
        except (KeyboardInterrupt, GeneratorExit):  # do not wait for kernels that nobody wants
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, which a terminal sends to all: the parent does."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores() -> int:
    """The number that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
