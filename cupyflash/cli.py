"""The command line: ``python -m cupyflash`` or ``cupyflash``.

======  ==========================================================================
info    what this machine has, what it lacks, and the pip line that mends it
check   attention on shapes of real models, verified against float64, and its speed
warmup  compile kernels into the cache, without a GPU: for container images
cache   what the cache holds; ``cache clear`` empties it
======  ==========================================================================
"""

import argparse
import collections
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Sequence

import cupyflash

from . import families, jit, machine
from .jit import compiler
from .kernel_config import KernelConfig

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 1 if it failed, 2 for bad arguments."""
    arguments = _parser().parse_args(argv)
    if not machine.has("rich"):
        print(f"cupyflash: the command line needs rich; {machine.pip_line('cli')}", file=sys.stderr)
        return 1
    try:
        return arguments.run(arguments)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
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

    warmup = commands.add_parser(
        "warmup",
        help="compile kernels into the cache; needs no GPU",
        description="Compile kernels into the cache. Needs no GPU: for container images. "
        "Without the options that narrow it down, everything that can be launched.",
    )
    warmup.add_argument(
        "--arch", type=_archs, required=True, metavar="SM,…", help="such as sm_80,sm_90a"
    )
    narrow = functools.partial(warmup.add_argument, nargs="+")
    narrow("--head-dim", type=_head_dim, default=range(8, 257, 8), metavar="D", help="default all")
    narrow("--dtype", choices=DTYPES, default=list(DTYPES), metavar="TYPE", help="|".join(DTYPES))
    names = list(families.FAMILIES)
    narrow("--family", choices=names, default=names, metavar="NAME", help="|".join(names))
    warmup.add_argument("--plain", action="store_true", help="without softcap and ALiBi")
    warmup.set_defaults(run=_warmup)

    cache = commands.add_parser("cache", help="show or clear the cache of compiled kernels")
    cache.add_argument("action", choices=("show", "clear"), nargs="?", default="show")
    cache.set_defaults(run=_cache)
    return parser


def _archs(text: str) -> list[tuple[int, int]]:
    """Compute capabilities of architecture names: "sm_80,sm_90a" is [(8, 0), (9, 0)]."""
    matches = [re.fullmatch(r"sm_(\d+)(\d)[af]?", name.strip()) for name in text.split(",")]
    if not all(matches):
        raise argparse.ArgumentTypeError(f"must be names such as sm_80,sm_90a, got {text!r}")
    return [(int(match[1]), int(match[2])) for match in matches]


def _head_dim(text: str) -> int:
    if not text.isdecimal() or int(text) not in range(8, 257, 8):
        raise argparse.ArgumentTypeError(f"must be a multiple of 8 up to 256, got {text!r}")
    return int(text)


def _info(arguments: argparse.Namespace) -> int:
    from .info import show

    return show()


def _check(arguments: argparse.Namespace) -> int:
    from .check import check

    return check()


def _warmup(arguments: argparse.Namespace) -> int:
    known = compiler.supported_archs()
    tasks = []
    for capability in arguments.arch:
        arch = jit.arch_of(capability)
        if capability[0] * 10 + capability[1] not in known:
            allowed = ", ".join(jit.arch_of(divmod(number, 10)) for number in known)
            raise ValueError(f"NVRTC {compiler.version()} knows {allowed}, got {arch}")
        tasks += [(config, arch) for config in _selected(arguments, capability)]
    if not tasks:
        raise ValueError("no kernel family computes that on any of these architectures")
    before = len(jit.entries())
    built = jit.build_all(tasks)
    print(f"{len(built)} kernels, {len(jit.entries()) - before} of them new, in {jit.cache_dir()}")
    return 0


def _selected(arguments: argparse.Namespace, capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """What the families can pick for a GPU within the limits given on the command line."""
    switches = (False,) if arguments.plain else (False, True)
    for name, dtype, head_dim, softcap, alibi in itertools.product(
        arguments.family, arguments.dtype, arguments.head_dim, switches, switches
    ):
        family, key = families.FAMILIES[name], (DTYPES[dtype], head_dim)
        problem = (*key, softcap, alibi, capability)
        if family.supports(*key, True, capability, backward=False):
            yield family.forward(*problem)
        if family.supports(*key, True, capability, backward=True):
            yield from family.backward(*problem)


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
