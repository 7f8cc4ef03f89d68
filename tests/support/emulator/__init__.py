"""The kernels of attention, and that of sampling, on a CPU, for calls as on a Hopper GPU: slow.

A C++ compiler compiles the same files of ``cuda_src`` with ``cuda.h`` and ``ptx.h``, which stand in
for the language and for the instructions. Plans, launches and their arguments are those of a GPU.
What is not emulated: the compiler, the time that anything takes, and memory that arrives late for
ordinary loads and stores.
"""

import contextlib
import ctypes
import functools
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

from bench.lib import dry_run
from cupyflash import jit
from cupyflash.jit import compiler, sources
from cupyflash.runtime import tensor_map
from cupyflash.runtime.config import ITEM_SIZE

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # which is quicker
FLAGS = [
    # -Og takes a quarter less time than -O1, and what it compiles is as fast.
    *("-std=c++20", "-Og", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC"),
    "-fno-gnu-unique",  # each kernel has memory of its own
    "-U_FORTIFY_SOURCE",  # whose longjmp, on by default in some systems, refuses other stacks
]
# Kernels whose blocks wait for no other: they run in a random order, another one at each launch.
ANY_ORDER = ("flash_bwd_captures_sm80", "flash_bwd_captures_simt")
MULTIPROCESSORS = 3  # so few that blocks take several tiles
# EmulatedMap of ptx.h: the address, dims, strides in bytes, the size of a tile, its swizzle.
pack_map = struct.Struct("Q4Q4Q2i").pack


@contextlib.contextmanager
def hopper(folder: Path, without: str = "") -> Iterator[list[str]]:
    """Calls with torch's CPU tensors run the kernels of a Hopper GPU, which `folder` will hold.

    In a process that does nothing else. Yields the names of the kernels that have run.

    Args:
        without: a statement that is left out of the kernels.
    """
    import cupy

    folder = prepared(folder, without)
    with dry_run.hopper(), contextlib.ExitStack() as stack:
        change = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        launched = []
        change(jit, "load", lambda config, device: Emulated(config, folder, launched, without))
        change(jit, "build", lambda config, arch: Mock(stack_bytes=0, spill_bytes=0, warnings=()))
        change(tensor_map.TensorMapSpec, "encode", _encode)
        change(cupy.cuda.runtime, "memsetAsync", lambda *where: ctypes.memset(*where[:3]))
        of_device = cupy.cuda.Device.attributes | {"MultiProcessorCount": MULTIPROCESSORS}
        change(cupy.cuda.Device, "attributes", of_device)
        yield launched


class Emulated:
    """A kernel as `jit.load` returns it."""

    def __init__(self, config: Any, folder: Path, launched: list[str], without: str) -> None:
        self.config, self.folder, self.launched = config, folder, launched
        self.without = without

    def __call__(self, grid, threads, params, shared_memory, stream, cooperative=False) -> None:
        memory = ctypes.create_string_buffer(len(params) + 64)
        address = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
        ctypes.memmove(address, params, len(params))
        self.launched.append(self.config.name)
        seed, shuffled = len(self.launched), self.config.name in ANY_ORDER
        failure = self.launch(address, grid, threads, shared_memory, seed, shuffled)
        if failure:
            raise RuntimeError(f"{self.config.expression}: {failure.decode()}")

    @functools.cached_property
    def launch(self) -> Any:
        """Runs the blocks; a test may put another function in its place."""
        text, source = _text(self.config), self.config.source
        launch = load(self.folder, text, source, without=self.without).launch
        launch.restype = ctypes.c_char_p
        sizes = (*[ctypes.c_uint] * 2, ctypes.c_size_t)
        launch.argtypes = (ctypes.c_void_p, *sizes, ctypes.c_uint, ctypes.c_bool)
        return launch


def load(folder: Path, text: str, *names: str, without: str = "") -> ctypes.PyDLL:
    """A program that includes these files of `cuda_src`; `folder` is that of `prepared`."""
    read = b"\0".join(x for name in names for x in _sources(name).values())
    without = without if without.encode() in read else ""
    library = folder / f"{_digest(text.encode(), read, without.encode())}.so"
    if not library.exists():
        of_cuda = f"-I{_copied(folder, without)}"
        own = ("-x", "c++", "-", "-x", "none", "hardware.o")
        _compile(library, "-shared", *LINKER, "-I.", of_cuda, *own, text=text)
    return ctypes.PyDLL(str(library))  # which one thread at a time can call


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(to: Path, *arguments: str, text: str = "") -> None:
    with replacing(to) as own:
        command = [COMPILER, *FLAGS, *arguments, "-o", str(own)]
        # In its folder, because a program from a pipe includes files from the current folder.
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=to.parent)
        if done.returncode:
            raise RuntimeError(f"{command}\n{text}\n{done.stderr[:4000]}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of one that others make or read meanwhile.

    Others are processes, and threads: those of `tests/parallel` are ranks that compile at once.
    """
    with tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as folder:
        own = Path(folder) / path.name
        yield own
        own.replace(path)


@functools.cache
def _sources(source: str) -> dict[str, bytes]:
    return sources.closure(source)


def _text(config: Any) -> str:
    return (
        '#include "cuda.h"\n'
        f"{compiler.stub(config)}"
        'extern "C" const char* launch(const void* params, unsigned grid, unsigned threads,\n'
        "                              size_t shared_memory, unsigned seed, bool shuffled) {\n"
        f"  return emulator::launch(grid, threads, shared_memory, seed, shuffled, [&] {{\n"
        f"    {config.expression}(*static_cast<const {config.params.__name__}*>(params));\n"
        "  });\n"
        "}\n"
    )


def _copied(folder: Path, without: str) -> Path:
    return folder / (f"cuda_src_{_digest(without.encode())}" if without else "cuda_src")


def prepared(folder: Path, without: str = "") -> Path:
    """The folder of this emulator below `folder`, with what `load` needs."""
    files = [path for path in sorted(HERE.iterdir()) if path.is_file()]
    folder = folder.absolute() / _digest(*(path.read_bytes() for path in files))
    for path in files:
        if path.suffix in (".h", ".cpp"):
            _write(folder / path.name, path.read_text())
    if not (folder / "hardware.o").exists():
        _compile(folder / "hardware.o", "-O3", "-march=native", "-c", "hardware.cpp")
        _compile(folder / "cuda.h.gch", "-x", "c++-header", "cuda.h")
    for statement in dict.fromkeys(("", without)):
        _copy_sources(folder, statement)
    return folder


def _copy_sources(folder: Path, without: str) -> None:
    """Write cuda_src, with ptx.h in the place of the instructions."""
    root = sources.root()
    for path in root.rglob("*.cu*"):
        copy = _copied(folder, without) / path.relative_to(root)
        if copy.parent.name == "ptx":
            text = '#pragma once\n#include "../common/types.cuh"\n#include "ptx.h"\n'
        else:
            dynamic = r"extern __shared__ __align__\(\d+\) unsigned char smem\[\];"
            static = "unsigned char* const smem = emulator::dynamic_memory;"
            text = re.sub(dynamic, static, path.read_text())
            text = text.replace(without, "") if without else text
        _write(copy, text)


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as own:
        own.write_text(text)


def _encode(self: tensor_map.TensorMapSpec, pointer: int) -> bytes:
    item = ITEM_SIZE[self.dtype]
    packed = pack_map(pointer, *self.dims, item, *self.strides, self.box_columns, self.box_rows)
    return packed.ljust(128, b"\0")
