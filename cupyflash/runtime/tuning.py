"""The tuning file: tiles that ``python -m cupyflash tune --save`` found faster than the built-in.

It is JSON: the ``machine`` that it was measured on, and ``tiles``, numbers by the key of what they
are for. A process reads it once, when it makes its first plan for a GPU. A file of another GPU,
driver, NVRTC or version of cupyflash is ignored with one warning, and so is one that cannot be
read: the built-in choices are always there.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from .. import environment
from ..jit import compiler

LEAST_ROOM = 4096  # bytes
Tiles = dict[str, tuple[int, ...]]


def machine(device: int) -> dict[str, str]:
    """The facts about a GPU and its software that a tuned choice holds for."""
    import cupy

    runtime = cupy.cuda.runtime
    return {
        "gpu": runtime.getDeviceProperties(device)["name"].decode(),
        "driver": str(runtime.driverGetVersion()),  # the newest CUDA that it runs
        "nvrtc": compiler.version(),
        # The package is above this layer, so it is not imported here, but it is already loaded.
        "cupyflash": sys.modules[__name__.partition(".")[0]].__version__,
    }


def tile(device: int, key: str) -> tuple[int, ...] | None:
    """The tuned tile of this key for a GPU; None without one."""
    path = environment.current().tuning_file
    return path and _tiles(path, device).get(key)


def ignored(key: str, reason: str) -> None:
    """Warn that an entry of the file is not used."""
    path = environment.current().tuning_file
    text = f"cupyflash: {path}: the entry '{key}' is ignored: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def save(device: int, key: str, tile: tuple[int, ...] | None) -> Path:
    """Put an entry into the file, or take it out of there; returns the path.

    Entries of another machine are dropped. Processes that save at once wait for each other, and
    nobody reads half a file.

    Raises:
        As `require_writable`.
    """
    path = require_writable()
    with _alone(path):
        tiles = _read(path, device)
        tiles.pop(key, None)
        if tile is not None:
            tiles[key] = tile
        text = json.dumps({"machine": machine(device), "tiles": tiles}, indent=1)
        with _written(path, text + "\n") as temporary:
            os.replace(temporary, path)
    _tiles.cache_clear()
    return path


def require_writable() -> Path:
    """The path of the file, whose folder is created, if the file can be written.

    Raises:
        ValueError: the environment allows no file.
        OSError: it cannot be written.
    """
    path = environment.current().tuning_file
    if path is None:
        raise ValueError(
            "tune: CUPYFLASH_TUNING must be a file or unset, and there must be a home folder, "
            f"got {environment.current().tuning or 'no home folder'}"
        )
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        # A full disk may have room for an empty file.
        with _alone(path), _written(path, " " * LEAST_ROOM):
            pass
    except OSError as error:
        fact = "the tuning file must be one that you can write"
        remedy = "set CUPYFLASH_TUNING to another file"
        raise OSError(f"tune: {fact}, got {path} ({error}); {remedy}") from error
    return path


@contextlib.contextmanager
def _written(path: Path, text: str) -> Iterator[str]:
    """The name of a temporary file with this text beside ``path``, removed if it is still there."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


@functools.cache
def _tiles(path: Path, device: int) -> Tiles:
    """`_read`, once."""
    return _read(path, device)


def _read(path: Path, device: int) -> Tiles:
    """The entries of a file for a GPU; none, with a warning, where it is not for this machine."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        # In somebody else's home nothing says whether there is a file.
        if environment.current().tuning is None and not os.access(path.parent, os.X_OK):
            return {}
        return _none(path, f"it cannot be read ({error})")
    except (OSError, ValueError) as error:
        return _none(path, f"it cannot be read ({error})")
    try:
        content = json.loads(text)
        measured = dict(content["machine"])
        tiles = {key: tuple(map(_integer, numbers)) for key, numbers in content["tiles"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return _none(path, f"it is not what `python -m cupyflash tune --save` writes ({error!r})")
    for name, here in machine(device).items():
        if measured.get(name) != here:
            return _none(path, f"it is for {name} {measured.get(name)!r}, and this is {here!r}")
    return tiles


def _integer(number: object) -> int:
    if type(number) is not int:
        raise TypeError(f"{number!r} is no integer")
    return number


def _none(path: Path, reason: str) -> Tiles:
    text = f"cupyflash: the tuning file {path} is ignored: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return {}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Only one process at a time is inside. On Windows the last one wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
