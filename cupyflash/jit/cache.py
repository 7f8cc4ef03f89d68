"""The cache folder: where compiled kernels are looked up and published, and who may write to it.

An entry is a folder, ``flash_fwd_sm80.sm_90a.<hash>/{kernel.cubin,stub.cu,meta.json}``. Its name
covers all that decides what the cubin does, so it is never out of date, only unused. CuPy relies on
it too: it loads a path once a process. An entry is written to a temporary folder and published by
one rename, so nobody sees half of one; a checksum in meta.json finds what was damaged later.
"""

import atexit
import dataclasses
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

UNFINISHED = ".building-"
_NAME = re.compile(r"\w+\.sm_\d+[af]?\.[0-9a-f]{16}")

# Four registers, stored and loaded: outside of a loop that costs nothing that one could measure.
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

    @property
    def slowness(self) -> str:
        """Why the kernel runs slower than NVRTC should have made it, or "".

        Spills for GPUs before Turing are the same with every version, and not looked at.
        """
        if any("(C75" in line for line in self.warnings):  # ptxas's notes about wgmma
            return "ptxas has serialised its matrix products"
        turing_or_newer = int(self.arch[3:].rstrip("af")) >= 75
        if self.spill_bytes > _FEW_SPILLS and turing_or_newer:
            return f"it spills registers, {self.spill_bytes} bytes"
        return ""


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
    return next(filter(None, (read_entry(folder / name) for folder in folders)), None)


def publish(name: str, built: Built, cubin: bytes, stub: str) -> Built:
    """Store an entry and return ``built`` with its path.

    Where the cache folder cannot be written or is not safe (that of another user, mounted into a
    container), entries go to a private temporary folder that is removed when the process ends, with
    one warning.
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
    return _write(_private_folder() / name, built, cubin, stub)


def read_entry(folder: Path) -> Built | None:
    """The entry in this folder; None if it is absent or damaged."""
    path = folder / "kernel.cubin"
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta.pop("sha256") != _checksum(meta, path.read_bytes()):
            return None
        return Built(path=path, **{**meta, "warnings": tuple(meta["warnings"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
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
    temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
            (temporary / name).chmod(0o644)  # whatever the umask: a cubin is code
        temporary.chmod(0o755)  # a container image is filled by root and read by others
        _rename(temporary, folder, tuple(files))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return built


def _rename(temporary: Path, folder: Path, names: tuple[str, ...]) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if read_entry(folder) is not None:  # another process was first
            return
        # Damaged: mend it file by file, because others may be about to load that very path.
        for name in names:
            os.replace(temporary / name, folder / name)


def _checksum(meta: dict[str, object], cubin: bytes) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode() + cubin).hexdigest()


def require_writable() -> None:
    """Create the cache folder; an OSError where nothing can be written to it."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=UNFINISHED, dir=_create()))
    except OSError as error:
        fact = "the cache folder must be one that you can write to"
        text = f"cupyflash: {fact}, got {environment.current().cache_dir} ({error})"
        raise OSError(f"{text}; set CUPYFLASH_CACHE_DIR to another folder") from error


def entries() -> list[Built]:
    """The healthy entries of the cache folder, by name."""
    return [built for path in _folders(_NAME.fullmatch) if (built := read_entry(path))]


def clear() -> int:
    """Delete all entries, also damaged and unfinished ones; returns how many were deleted."""
    doomed = _folders(lambda name: _NAME.fullmatch(name) or name.startswith(UNFINISHED))
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
