"""The cache folder: where entries are looked up and published, and who may write to it.

An entry's name, ``flash_fwd_sm80.sm_90a.<hash>``, covers all that decides what its cubin does, so
an entry is never out of date, only unused. CuPy relies on it too: it loads a path once a process.
"""

import atexit
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from .. import environment
from . import entry
from .entry import Built

_NAME = re.compile(r"\w+\.sm_\d+[af]?\.[0-9a-f]{16}")

_private: Path | None = None  # this process's own folder, once the cache could not be written


class UnsafeCacheError(RuntimeError):
    """The cache folder can be written by others, and a cubin is code; nothing is loaded from it."""


def cache_dir() -> Path | None:
    """The cache folder, which need not exist yet; None where the user has no home folder.

    Raises:
        UnsafeCacheError: others can write to it.
    """
    folder = environment.current().cache_dir
    if folder is not None:
        _refuse_shared(folder)
    return folder


def lookup(name: str) -> Built | None:
    """The healthy entry of this name, or None."""
    try:
        folder = cache_dir()
    except UnsafeCacheError:  # `publish` says so, once
        folder = None
    folders = filter(None, (folder, _private))
    return next(filter(None, (entry.read(folder / name) for folder in folders)), None)


def publish(name: str, built: Built, cubin: bytes, stub: str) -> Built:
    """Store an entry and return ``built`` with its path.

    Where the cache folder cannot be written or is not safe (that of another user, mounted into a
    container), entries go to a private temporary folder that is removed when the process ends, with
    one warning.
    """
    if _private is None:
        try:
            return entry.write(_create() / name, built, cubin, stub)
        except (OSError, UnsafeCacheError) as error:
            reason = str(error).removeprefix("cupyflash: ")
            warnings.warn(
                f"cupyflash: cannot keep compiled kernels ({reason}), so each process compiles "
                "its own; set CUPYFLASH_CACHE_DIR to a folder that you can write to",
                RuntimeWarning,
                stacklevel=2,
            )
    return entry.write(_private_folder() / name, built, cubin, stub)


def require_writable() -> None:
    """Create the cache folder; an OSError where nothing can be written to it."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=entry.UNFINISHED, dir=_create()))
    except OSError as error:
        fact = "the cache folder must be one that you can write to"
        text = f"cupyflash: {fact}, got {environment.current().cache_dir} ({error})"
        raise OSError(f"{text}; set CUPYFLASH_CACHE_DIR to another folder") from error


def entries() -> list[Built]:
    """The healthy entries of the cache folder, by name."""
    return [built for path in _folders(_NAME.fullmatch) if (built := entry.read(path))]


def clear() -> int:
    """Delete all entries, also damaged and unfinished ones; returns how many were deleted."""
    doomed = _folders(lambda name: _NAME.fullmatch(name) or name.startswith(entry.UNFINISHED))
    for path in doomed:
        shutil.rmtree(path)
    return len(doomed)


def _folders(wanted: Callable[[str], object]) -> list[Path]:
    root = cache_dir()
    if root is None or not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if wanted(path.name) and path.is_dir())


def _create() -> Path:
    folder = cache_dir()
    if folder is None:
        raise OSError("you have no home folder")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    _refuse_shared(folder)  # another may have created it just now
    return folder


def _private_folder() -> Path:
    global _private
    if _private is None:
        _private = Path(tempfile.mkdtemp(prefix="cupyflash-"))
        atexit.register(shutil.rmtree, _private, ignore_errors=True)
    return _private


def _refuse_shared(folder: Path) -> None:
    if os.name == "nt":  # there the user's folders are private, and modes say nothing
        return
    try:
        status = folder.stat()
    except OSError:  # absent or out of reach: nothing will be loaded from it
        return
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise UnsafeCacheError(
            f"cupyflash: the cache folder {folder} must belong to you or root and be writable by "
            f"its owner alone, because it holds code; got mode {status.st_mode & 0o7777:o}, owner "
            f"{status.st_uid}, and you are user {os.geteuid()}. Mend it (chown, chmod go-w) or set "
            "CUPYFLASH_CACHE_DIR to another folder"
        )
