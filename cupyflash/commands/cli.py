"""The command line: ``python -m cupyflash`` or ``cupyflash``.

========  ==========================================================================
info      what this machine has, what it lacks, and the pip line that mends it
check     every operation on shapes of real models, against float64, and its speed
warmup    compile kernels into the cache, without a GPU: for container images
cache     what the cache holds; ``cache clear`` empties it
tune      search the fastest tiles of an operation on this GPU
generate  text from a language model on these kernels
========  ==========================================================================
"""

import argparse
import collections
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import cupyflash

from .. import jit, machine, packages, precompile
from ..ops.attention import backends
from ..runtime.config import ITEM_SIZE
from . import generate, output, tune
from .generate import DTYPES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    1 if it failed or the reader of its output has gone, 2 for bad arguments, 3 where ``check`` ran
    no GPU kernel, 130 where it was interrupted (as shells have it).
    """
    output.never_fail_to_encode()
    status = 0
    try:
        try:
            status = _run(argv)
        finally:
            if sys.stdout:  # None if it was closed
                sys.stdout.flush()
    except OSError as error:
        seen_enough = isinstance(error, BrokenPipeError)  # by `head`
        if not status and not seen_enough:  # else the error has been told, and comes again
            print(f"cupyflash: {error}", file=sys.stderr)
        output.discard_rest()
        return 1
    return status


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    if not machine.has("rich"):
        line = packages.pip_line("cli")
        print(f"cupyflash: the command line needs rich; {line}", file=sys.stderr)
        return 1
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"cupyflash {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError) as error:
        text = str(error).removeprefix("cupyflash: ").removeprefix(f"{arguments.command}: ")
        print(f"cupyflash {arguments.command}: {text}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cupyflash", description="Attention on NVIDIA GPUs and on the CPU."
    )
    parser.add_argument("--version", action="version", version=cupyflash.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    info = commands.add_parser("info", help="what this machine has and what is missing")
    info.set_defaults(run=_info)

    check = commands.add_parser("check", help="verify every operation on this machine, and time it")
    check.set_defaults(run=_check)

    warm = commands.add_parser(
        "warmup",
        help="compile kernels into the cache; needs no GPU",
        description="Compile kernels into the cache. Needs no GPU: for container images. By "
        "default those that calls with default options launch: attention on 16-bit arrays, norms "
        "and decoding; others are compiled at their first use. Backends are those of attention, "
        "topics the kernels beside it.",
    )
    warm.add_argument(
        "--arch", type=_archs, required=True, metavar="SM,…", help="such as sm_80,sm_90a"
    )
    narrow = functools.partial(warm.add_argument, nargs="+")
    dims = ", ".join(map(str, precompile.COMMON_HEAD_DIMS))
    narrow("--head-dim", type=_head_dim, metavar="D", help=f"default {dims}")
    narrow("--dtype", type=_dtype, metavar="TYPE", help=", ".join(DTYPES) + "; default fp16 bf16")
    for option, known, default in (
        ("backend", backends.BACKENDS, "the fastest"),
        ("topic", precompile.TOPICS, " ".join(precompile.COMMON_TOPICS)),
    ):
        text = f"{', '.join(known)}; no name for none; default {default}"
        name = functools.partial(_name, f"{option}s", known)
        narrow(f"--{option}", nargs="*", type=name, metavar="NAME", help=text)
    text = "all kernels within the options given, but attention with a bias or dropout"
    warm.add_argument("--everything", action="store_true", help=text)
    warm.add_argument("--jobs", type=int, metavar="N", help="processes; default one a core")
    warm.set_defaults(run=_warmup)

    cache = commands.add_parser("cache", help="show or clear the cache of compiled kernels")
    cache.add_argument("action", choices=("show", "clear"), nargs="?", default="show")
    cache.set_defaults(run=_cache)

    tune.add_parser(commands)
    generate.add_parser(commands)
    return parser


def _archs(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        _checked(precompile.capability_of, name)
    return names


def _head_dim(text: str) -> int:
    _checked(precompile.check_head_dims, [int(text) if text.isdecimal() else text])
    return int(text)


def _dtype(text: str) -> str:
    return _name("dtypes", ITEM_SIZE, DTYPES.get(text, text))


def _name(what: str, known: Mapping[str, object], text: str) -> str:
    _checked(precompile.check_names, what, [text], known)
    return text


def _checked(check: Callable[..., object], *arguments: object) -> None:
    """Turn what a check of `cupyflash.warmup` raises into an error of the command line."""
    try:
        check(*arguments)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("warmup: ")) from None


def _check(arguments: argparse.Namespace) -> int:
    from .check import check

    return check()


def _warmup(arguments: argparse.Namespace) -> int:
    if arguments.head_dim and arguments.backend == []:
        fact = "--head-dim is of attention, which --backend without a name leaves out"
        raise ValueError(f"{fact}, got both")
    before = len(jit.entries())
    built = precompile.warmup(
        arguments.arch,
        head_dims=arguments.head_dim,
        dtypes=arguments.dtype,
        backends=arguments.backend,
        topics=arguments.topic,
        everything=arguments.everything,
        jobs=arguments.jobs,
    )
    print(f"{len(built)} kernels, {len(jit.entries()) - before} of them new, in {jit.cache_dir()}")
    return 0


def _cache(arguments: argparse.Namespace) -> int:
    folder = jit.cache_dir() or "no folder: you have no home folder"
    if arguments.action == "clear":
        print(f"deleted {jit.clear()} kernels from {folder}")
        return 0
    from .tables import print_kernels

    sizes = collections.defaultdict(list)
    for entry in jit.entries():
        sizes[entry.arch, entry.expression.partition("<")[0]].append(entry.path.stat().st_size)
    if sizes:
        print_kernels(sizes)
    count, size = machine.cache_size()
    print(f"{count} kernels, {size / 2**20:.1f} MiB in {folder}")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from .tables import print_facts

    print_facts(_facts())
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    """Rows (name, value); a name is empty where it continues the row above."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    packages = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    for name, values in {
        "cupyflash": [f"{cupyflash.__version__} in {Path(cupyflash.__file__).resolve().parent}"],
        "GPU": _gpus(),
        "kernels": _kernels(),
        "Python": [python],
        "packages": [packages],
        "cache": [_cache_text()],
        "settings": [f"{name}={x}" for name, x in machine.settings().items()],
        "missing": _missing(),
    }.items():
        for value in values:
            yield name, value
            name = ""


def _gpus() -> list[str]:
    driver = machine.driver()
    if not driver.gpus:
        return ["none; attention runs on the CPU, with NumPy"]
    lines = [
        f"{gpu.name}, {jit.arch_of(gpu.capability)}, {gpu.memory / 2**30:.0f} GiB"
        for gpu in driver.gpus
    ]
    return [*lines, f"the driver runs CUDA {driver.cuda[0]}.{driver.cuda[1]}"]


def _kernels() -> list[str]:
    """The backends of the first GPU, or of all GPUs where there is none."""
    gpus = machine.driver().gpus
    if gpus:
        found = machine.backend_dtypes(gpus[0].capability)
        return [f"{name}: {', '.join(dtypes)}" for name, dtypes in found.items() if dtypes]
    lines = []
    for name in backends.BACKENDS:
        capabilities, since = machine.backend_capabilities(name), {}  # dtypes by the oldest of them
        for dtype in ITEM_SIZE:
            found = [c for c in capabilities if dtype in machine.backend_dtypes(c)[name]]
            if found:
                since.setdefault(found[0], []).append(dtype)
        least = "≥ " * (len(capabilities) > 1)
        texts = [f"{', '.join(x)} on {least}{c[0]}.{c[1]}" for c, x in sorted(since.items())]
        lines.append(f"{name}: {'; '.join(texts)}".replace(" on ", " on compute capability ", 1))
    return lines


def _cache_text() -> str:
    try:
        count, size = machine.cache_size()
    except (jit.UnsafeCacheError, OSError) as error:
        return f"not usable: {error}"
    folder = jit.cache_dir() or "none: you have no home folder"
    if os.path.isfile(folder):
        return f"not usable: {folder} is a file; set CUPYFLASH_CACHE_DIR to a folder"
    return f"{folder} ({count} kernels, {size / 2**20:.1f} MiB)"


def _missing() -> list[str]:
    missing = []
    if problem := machine.gpu_problem():
        missing += [f"a GPU to run on: {problem}", *(f"to mend: {x}" for x in machine.mend())]
    if machine.has("cupy") and not machine.has("ml_dtypes"):
        missing += ["bfloat16 in CuPy arrays", "to mend: pip install ml_dtypes"]
    if slow := machine.slow_kernels():
        missing += [f"speed: {slow[0]}", f"to mend: {slow[1]}"]
    return missing
