"""The CUDA sources: where they are, and a digest of everything a kernel includes."""

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include\b[ \t]*(.*)$", re.MULTILINE)
_TARGET = re.compile(rb'"([^"\n]+)"|<([^>\n]+)>')


@functools.cache
def root() -> Path:
    """The folder ``cuda_src``: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"cupyflash: the CUDA sources must be in {package / 'cuda_src'} or beside the package, "
        "found neither; install cupyflash again"
    )


def included(source: str) -> Iterator[Path]:
    """``source`` (a path below `root`) and all files that it includes, transitively, each once.

    Includes inside comments and inactive branches count too: a digest over too much recompiles
    once too often, one over too little runs a stale kernel. For the same reason an include whose
    name is a macro is a ValueError.
    """
    found, pending = set(), [root() / source]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        yield path
        for directive in _INCLUDE.finditer(path.read_bytes()):
            target = _TARGET.match(directive[1])
            if target is None:
                text = directive[0].decode(errors="replace").strip()
                raise ValueError(f"{path}: an include must name its file literally, got {text!r}")
            if path_of_target := _resolve(path, target):
                pending.append(path_of_target)


def closure(source: str) -> dict[Path, bytes]:
    """The bytes of all files of `included`."""
    return {path: path.read_bytes() for path in included(source)}


def digest(source: str) -> str:
    """SHA-256 (hexadecimal) over the names and bytes of `closure`."""
    total = hashlib.sha256()
    for path, data in sorted(closure(source).items()):
        name = os.path.relpath(path, root())
        total.update(f"{name} {len(data)}\n".encode())
        total.update(data)
    return total.hexdigest()


def _resolve(includer: Path, target: re.Match[bytes]) -> Path | None:
    """The file that NVRTC takes, or None for one of its built-in headers.

    A quoted name is searched beside the file that includes it, then below `root`.
    """
    if target[1]:
        candidates = [includer.parent / os.fsdecode(target[1]), root() / os.fsdecode(target[1])]
    else:
        candidates = [root() / os.fsdecode(target[2])]
    for candidate in candidates:
        path = Path(os.path.normpath(candidate))
        if path.is_file():
            return path
    return None
