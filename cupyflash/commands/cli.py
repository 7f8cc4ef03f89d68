"""The command line: ``python -m cupyflash`` or ``cupyflash``.

======  ==========================================================================
info    what this machine has, what it lacks, and the pip line that mends it
check   attention on shapes of real models, verified against float64, and its speed
warmup  compile kernels into the cache, without a GPU: for container images
cache   what the cache holds; ``cache clear`` empties it
gpt2    text from a GPT-2 on these kernels, and its benchmark
======  ==========================================================================
"""

import argparse
import collections
import functools
import sys
from collections.abc import Sequence

import cupyflash

from .. import jit, kernels, machine
from ..attention import families
from ..models.gpt2 import cli as gpt2
from ..precompile import ALL_HEAD_DIMS, capability_of, warmup

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 1 if it failed, 2 for bad arguments."""
    arguments = _parser().parse_args(argv)
    if not machine.has("rich"):
        print(f"cupyflash: the command line needs rich; {machine.pip_line('cli')}", file=sys.stderr)
        return 1
    try:
        return arguments.run(arguments)
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError) as error:
        print(f"cupyflash {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cupyflash", description="Attention on every NVIDIA GPU and on the CPU."
    )
    parser.add_argument("--version", action="version", version=cupyflash.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    info = commands.add_parser("info", help="what this machine has and what is missing")
    info.set_defaults(run=_info)

    check = commands.add_parser("check", help="verify attention on this machine, and time it")
    check.set_defaults(run=_check)

    warm = commands.add_parser(
        "warmup",
        help="compile kernels into the cache; needs no GPU",
        description="Compile kernels into the cache. Needs no GPU: for container images. "
        "Without the options that narrow it down, everything that can be launched. Families are "
        "those of attention, topics the kernels beside it.",
    )
    warm.add_argument(
        "--arch", type=_archs, required=True, metavar="SM,…", help="such as sm_80,sm_90a"
    )
    narrow = functools.partial(warm.add_argument, nargs="+")
    narrow("--head-dim", type=_head_dim, default=ALL_HEAD_DIMS, metavar="D", help="default all")
    narrow("--dtype", choices=DTYPES, default=list(DTYPES), metavar="TYPE", help="|".join(DTYPES))
    for option, known in (("--family", list(families.FAMILIES)), ("--topic", list(kernels.TOPICS))):
        text = "|".join(known) + "; no name for none"
        narrow(option, nargs="*", choices=known, default=known, metavar="NAME", help=text)
    text = "without softcap, ALiBi and sinks, and without unaligned arrays beside attention"
    warm.add_argument("--plain", action="store_true", help=text)
    warm.set_defaults(run=_warmup)

    cache = commands.add_parser("cache", help="show or clear the cache of compiled kernels")
    cache.add_argument("action", choices=("show", "clear"), nargs="?", default="show")
    cache.set_defaults(run=_cache)

    gpt2.add_parser(commands)
    return parser


def _archs(text: str) -> list[str]:
    names = text.split(",")
    try:
        for name in names:
            capability_of(name)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be names such as sm_80,sm_90a, got {text!r}"
        ) from None
    return names


def _head_dim(text: str) -> int:
    if not text.isdecimal() or int(text) not in ALL_HEAD_DIMS:
        raise argparse.ArgumentTypeError(f"must be a multiple of 8 up to 256, got {text!r}")
    return int(text)


def _info(arguments: argparse.Namespace) -> int:
    from .info import show

    return show()


def _check(arguments: argparse.Namespace) -> int:
    from .check import check

    return check()


def _warmup(arguments: argparse.Namespace) -> int:
    before = len(jit.entries())
    built = warmup(
        arguments.arch,
        head_dims=arguments.head_dim,
        dtypes=[DTYPES[name] for name in arguments.dtype],
        families=arguments.family,
        topics=arguments.topic,
        plain=arguments.plain,
    )
    print(f"{len(built)} kernels, {len(jit.entries()) - before} of them new, in {jit.cache_dir()}")
    return 0


def _cache(arguments: argparse.Namespace) -> int:
    folder = jit.cache_dir()
    if arguments.action == "clear":
        print(f"deleted {jit.clear()} kernels from {folder}")
        return 0
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    groups = collections.defaultdict(list)
    for entry in jit.entries():
        groups[entry.arch, entry.expression.partition("<")[0]].append(entry.path.stat().st_size)
    table = Table("architecture", "kernel", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("variants", "KiB"):
        table.add_column(heading, justify="right")
    for (arch, kernel), sizes in sorted(groups.items()):
        table.add_row(arch, kernel, str(len(sizes)), f"{sum(sizes) / 1024:.0f}")
    if groups:
        Console().print(table)
    count, size = machine.cache_size()
    print(f"{count} kernels, {size / 2**20:.1f} MiB in {folder}")
    return 0
