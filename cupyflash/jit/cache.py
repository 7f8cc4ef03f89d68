"""The cache folder: where compiled kernels are looked up and published, and who may write to it.

An entry is a folder, ``flash_fwd_sm80.sm_90a.<hash>/{kernel.cubin,stub.cu,meta.json}``. Its name
covers all that decides what the cubin does, so it is never out of date, only unused. CuPy relies on
it too: it loads a path once a process. An entry is written to a temporary folder and published by
one rename, so nobody sees half of one; a checksum in meta.json finds what was damaged later.
"""

import atexit
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from .. import environment
from . import ownership
from .ownership import UnsafeCacheError

UNFINISHED = ".building-"
_NAME = re.compile(r"\w+\.sm_\d+[af]?\.[0-9a-f]{16}")

_IN_USE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # something had the name just now
_MEMORY = "/dev/shm"  # Linux has a file system in memory there
# Four registers stored and loaded outside of a loop cost nothing that can be measured.
_FEW_SPILLS = 32

_private: Path | None = None  # this process's own folder, once the cache could not be written


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled kernel.

    Attributes:
        path: the cubin.
        lowered_name: the kernel's mangled name in it.
        expression: the instantiation, ``flash_fwd_sm80<bfloat16_t, 128, …>``.
        arch: what it was compiled for. nvrtc: the version that did it.
        registers: per thread. spill_bytes, stack_bytes: local memory per thread.
        warnings: those of the compiler, and ptxas's C75xx notes.
        seconds: wall time of the compilation.
        has_text: a score or a mask of the caller's is part of it.
    """

    path: Path
    lowered_name: str
    expression: str
    arch: str
    nvrtc: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]
    seconds: float
    has_text: bool = False

    @property
    def slowness(self) -> str:
        """Why the kernel runs slower than NVRTC should have made it, or "".

        Spills for GPUs before Turing are the same with every version, and not looked at, nor are
        those of a text, which may need more registers than there are.
        """
        if self.has_text:
            return ""
        if any("(C75" in line for line in self.warnings):  # ptxas's notes about wgmma
            return "ptxas has serialised its matrix products"
        turing_or_newer = int(self.arch[3:].rstrip("af")) >= 75
        if self.spill_bytes > _FEW_SPILLS and turing_or_newer:
            return f"it spills registers, {self.spill_bytes} bytes"
        return ""


def cache_dir() -> Path | None:
    """The cache folder, which need not exist yet; None where the user has no home folder.

    Raises:
        UnsafeCacheError: others can write to it.
    """
    folder = environment.current().cache_dir
    if folder is not None:
        ownership.refuse_shared(folder)
    return folder


def lookup(name: str) -> Built | None:
    """The healthy entry of this name, or None."""
    try:
        folder = cache_dir()
    except UnsafeCacheError:  # `publish` says so, once
        folder = None
    folders = filter(None, (folder, _private_now()))
    return next(filter(None, (read_entry(folder / name) for folder in folders)), None)


def publish(name: str, built: Built, cubin: bytes, stub: str) -> Built:
    """Store an entry and return ``built`` with its path.

    Where the cache folder cannot be written or is not safe (that of another user, mounted into a
    container), entries go to a private temporary folder that is removed when the process ends, with
    one warning. Where there is no room for that either, the private folder is in memory.

    Raises:
        OSError: none of these can be written.
    """
    if _private is None:
        try:
            return _write(_create() / name, built, cubin, stub)
        except (OSError, UnsafeCacheError) as error:
            reason = str(error).removeprefix("cupyflash: ")
            warnings.warn(
                f"cupyflash: cannot keep compiled kernels ({reason}), so each process compiles "
                "its own; set CUPYFLASH_CACHE_DIR to a folder that you can write to",
                RuntimeWarning,
                stacklevel=2,
            )
    reasons = []
    for directory in (None, _MEMORY):
        try:
            return _write(_private_folder(directory) / name, built, cubin, stub)
        except OSError as error:
            reasons.append(error)
    fact = "a compiled kernel must be kept in the cache or in a folder of temporary files"
    raise OSError(
        f"cupyflash: {fact}, got {reasons[0]}; set CUPYFLASH_CACHE_DIR or TMPDIR to a folder with "
        "room that you can write to"
    ) from reasons[0]


def read_entry(folder: Path) -> Built | None:
    """The entry in this folder; None if it is absent or damaged, or if others can change it."""
    path, meta_path = folder / "kernel.cubin", folder / "meta.json"
    try:
        if any(map(ownership.fault, (folder, path, meta_path))):
            return None
        meta = json.loads(meta_path.read_bytes())
        if meta.pop("sha256") != _checksum(meta, path.read_bytes()):
            return None
        return Built(path=path, **{**meta, "warnings": tuple(meta["warnings"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _write(folder: Path, built: Built, cubin: bytes, stub: str) -> Built:
    """Publish an entry and return ``built`` with its path; an OSError where that is impossible."""
    built = dataclasses.replace(built, path=folder / "kernel.cubin")
    meta = dataclasses.asdict(built)
    del meta["path"]
    meta["sha256"] = _checksum(meta, cubin)
    files = {
        "kernel.cubin": cubin,
        "stub.cu": stub.encode(),
        "meta.json": json.dumps(meta, indent=2).encode(),
    }
    while not _published(folder, files):
        pass  # another process or thread has moved or deleted it meanwhile
    return built


def _published(folder: Path, files: dict[str, bytes]) -> bool:
    temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
            (temporary / name).chmod(0o644)  # whatever the umask: a cubin is code
        temporary.chmod(0o755)  # a container image is filled by root and read by others
        return _renamed(temporary, folder, tuple(files))
    except FileNotFoundError:
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _renamed(temporary: Path, folder: Path, names: tuple[str, ...]) -> bool:
    try:
        temporary.rename(folder)
        return True
    except OSError as error:
        if read_entry(folder) is not None:  # another process was first
            return True
        if not os.path.lexists(folder):
            if error.errno in _IN_USE:
                return False
            raise
    if not folder.is_dir() or ownership.fault(folder):  # nobody loads from it
        _delete(folder.rename(f"{temporary}-unsafe"))
        return False
    # Damaged: mend it file by file, because others may be about to load that very path.
    for name in names:
        os.replace(temporary / name, folder / name)
    return True


def _checksum(meta: dict[str, object], cubin: bytes) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode() + cubin).hexdigest()


def require_writable() -> Path:
    """Create the cache folder and return it; an OSError where nothing can be written to it."""
    try:
        folder = _create()
        with tempfile.NamedTemporaryFile(prefix=UNFINISHED, dir=folder) as file:
            file.write(bytes(4096))  # a full disk may have room for an empty file
    except OSError as error:
        fact = "the cache folder must be one that you can write to"
        text = f"cupyflash: {fact}, got {environment.current().cache_dir} ({error})"
        raise OSError(f"{text}; set CUPYFLASH_CACHE_DIR to another folder") from error
    return folder


def entries() -> list[Built]:
    """The healthy entries of the cache folder, by name."""
    return [built for path in _paths(_NAME.fullmatch) if (built := read_entry(path))]


def clear() -> int:
    """Delete all entries, also damaged and unfinished ones; returns how many were deleted.

    Where an entry is a symbolic link, the link alone is deleted.
    """
    doomed = _paths(lambda name: _NAME.fullmatch(name) or name.startswith(UNFINISHED))
    for path in doomed:
        _delete(path)
    return len(doomed)


def _delete(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process deletes it, too
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _paths(wanted: Callable[[str], object]) -> list[Path]:
    root = cache_dir()
    if root is None or not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if wanted(path.name))


def _create() -> Path:
    folder = cache_dir()
    if folder is None:
        raise OSError("you have no home folder")
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o755, exist_ok=True)  # whatever the umask, those above, too
    ownership.refuse_shared(folder)  # another may have created it just now
    return folder


def _private_now() -> Path | None:
    """The private folder, if it is still there and still ours.

    A cleaner of temporary files may have removed it, and made room for somebody else's.
    """
    with contextlib.suppress(OSError):
        if _private and not ownership.fault(_private):
            return _private
    return None


def _private_folder(directory: str | None) -> Path:
    """The private folder, made anew where it is gone.

    Args:
        directory: where it must be; None for that of temporary files, or wherever it is now.
    """
    global _private
    folder = _private_now()
    if folder is None or directory not in (None, str(folder.parent)):
        folder = _private = Path(tempfile.mkdtemp(prefix="cupyflash-", dir=directory))
        atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, process: int) -> None:
    """Remove the private folder of a process, unless this is a child that was forked from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
