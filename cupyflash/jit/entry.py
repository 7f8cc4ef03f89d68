"""One kernel, and what is compiled of it on disk: ``<name>/{kernel.cubin,stub.cu,meta.json}``.

An entry is written to a temporary folder and published by one rename, so nobody sees half of one;
a checksum in meta.json finds what was damaged later.
"""

import ctypes
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

UNFINISHED = ".building-"


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


def read(entry: Path) -> Built | None:
    """The entry in this folder; None if it is absent or damaged."""
    path = entry / "kernel.cubin"
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        if meta.pop("sha256") != _checksum(meta, path.read_bytes()):
            return None
        return Built(path=path, **{**meta, "warnings": tuple(meta["warnings"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write(entry: Path, built: Built, cubin: bytes, stub: str) -> Built:
    """Publish an entry and return ``built`` with its path; an OSError where that is impossible."""
    built = dataclasses.replace(built, path=entry / "kernel.cubin")
    meta = dataclasses.asdict(built)
    del meta["path"]
    meta["sha256"] = _checksum(meta, cubin)
    files = {
        "kernel.cubin": cubin,
        "stub.cu": stub.encode(),
        "meta.json": json.dumps(meta, indent=2).encode(),
    }
    temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=entry.parent))
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
            (temporary / name).chmod(0o644)  # whatever the umask: a cubin is code
        temporary.chmod(0o755)  # a container image is filled by root and read by others
        _publish(temporary, entry, tuple(files))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return built


def _publish(temporary: Path, entry: Path, names: tuple[str, ...]) -> None:
    try:
        temporary.rename(entry)
    except OSError:
        if read(entry) is not None:  # another process was first
            return
        # Damaged: mend it file by file, because others may be about to load that very path.
        for name in names:
            os.replace(temporary / name, entry / name)


def _checksum(meta: dict[str, object], cubin: bytes) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode() + cubin).hexdigest()


class Kernel(Protocol):
    """One instantiation of one ``__global__`` template; `cupyflash.runtime.config` makes them.

    Attributes:
        source: path of its file below ``cuda_src/``.
        params: the structure that it takes by value.
        name: of the ``__global__`` function.
        expression: NVRTC's name expression, ``flash_fwd_sm80<bfloat16_t, 128, …>``.
        shared_memory: dynamic shared memory of a block, in bytes.
    """

    source: str
    params: type[ctypes.Structure]
    name: str
    expression: str
    shared_memory: int
