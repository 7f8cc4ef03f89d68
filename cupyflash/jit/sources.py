"""The CUDA sources: where they are, and a digest of all code that a kernel includes."""

import functools
import hashlib
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include\b[ \t]*(.*)$", re.MULTILINE)
_TARGET = re.compile(rb'"([^"\n]+)"|<([^>\n]+)>')

# The group is kept: literals and directives, in which white space or "//" has a meaning, and
# brackets, which are tokens also where no space is beside them.
_LITERAL = rb"""(?:\b(?:u8|[uUL]))?(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')\w*"""
_DIRECTIVE = rb"#(?:%b|/\*.*?\*/|(?!//)[^\n])*" % _LITERAL
_BETWEEN_TOKENS = re.compile(
    rb"(%b|%b|[()\[\]{},;])|(?:\s|//[^\n]*|/\*.*?\*/)+" % (_LITERAL, _DIRECTIVE), re.DOTALL
)
_RAW_STRING_OR_SEPARATOR = re.compile(rb"R\"|[0-9a-fA-F]'[0-9a-fA-F]")


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
    """``source`` (a path below `root`) and all files that it includes, transitively, each once."""
    return (root() / name for name, _ in _files(source))


def closure(source: str) -> dict[str, bytes]:
    """The bytes of the files of `included`, by their names below `root`."""
    return dict(_files(source))


def digest(source: str) -> str:
    """SHA-256 (hexadecimal) over the names and the `code` of the files of `closure`.

    A change of comments or white space does not change it, so a kernel that was compiled before is
    used again. The line numbers that -lineinfo put into it are then those of the older text.
    """
    total = hashlib.sha256()
    for name, data in sorted(closure(source).items()):
        tokens = code(data)
        total.update(f"{name} {len(tokens)}\n".encode())
        total.update(tokens)
    return total.hexdigest()


@functools.cache
def code(data: bytes) -> bytes:
    """The tokens of a file, which the compiler sees: no comments, no surplus white space.

    Literals stay as they are, directives but for a comment at their end. Two texts with the same
    result compile to the same code. The reverse need not hold: a file with a raw string or a digit
    separator is returned as it is, because both would take a whole lexer.
    """
    if _RAW_STRING_OR_SEPARATOR.search(data):
        return data
    joined_lines = data.replace(b"\r\n", b"\n").replace(b"\\\n", b"")
    pieces = _BETWEEN_TOKENS.split(joined_lines)
    return b"\n".join(piece.rstrip() for piece in pieces if piece)


def _files(source: str) -> Iterator[tuple[str, bytes]]:
    """The files of `included`: their names below `root`, and their bytes.

    Includes inside comments and inactive branches count too: a digest over too much recompiles
    once too often, one over too little runs a stale kernel. For the same reason an include whose
    name is a macro is a ValueError.
    """
    folder, found, pending = str(root()), set(), [source]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        yield name, data
        for directive in _INCLUDE.finditer(data):
            target = _TARGET.match(directive[1])
            if target is None:
                path, text = Path(folder, name), directive[0].decode(errors="replace").strip()
                raise ValueError(f"{path}: an include must name its file literally, got {text!r}")
            # NVRTC searches a quoted name beside the file that includes it, then below `root`, and
            # has headers of its own.
            wanted = os.fsdecode(target[1] or target[2])
            for place in (posixpath.dirname(name), "") if target[1] else ("",):
                path = posixpath.normpath(posixpath.join(place, wanted))
                if path in found or os.path.isfile(os.path.join(folder, path)):
                    pending.append(path)
                    break
