"""The environment variables, and the only place that reads them.

======================  ======================  ====================================================
Variable                Value                   Effect
======================  ======================  ====================================================
CUPYFLASH_CACHE_DIR     a folder                compiled kernels live here; default
                                                $XDG_CACHE_HOME/cupyflash or ~/.cache/cupyflash
                                                (%LOCALAPPDATA%\\cupyflash on Windows)
CUPYFLASH_DEBUG         0 or 1                  print each kernel's configuration, registers, spills
                                                and seconds; check what costs a device sync
CUPYFLASH_DUMP          ptx, sass or ptx,sass   write kernel.ptx / kernel.sass beside the cubin
CUPYFLASH_BACKEND       sm90, sm80, fp16x3      use this backend of attention only; projections and
                        or simt                 attention_with_cache obey it, too (docs/options.md)
CUPYFLASH_NO_JIT        0 or 1                  raise instead of compiling
CUPYFLASH_TUNING        a file, or 0            the choices of ``cupyflash tune``, or none; default
                                                tuning.json in the folder of compiled kernels
======================  ======================  ====================================================

They are read once, at the first need. An empty value counts as unset. Anything else is a
ValueError that names the variable, what it allows and what it got; another variable of this prefix,
which may be a misspelt one, is a RuntimeWarning.
"""

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

DUMPS = ("ptx", "sass")
BACKENDS = ("sm90", "sm80", "fp16x3", "simt")


@dataclasses.dataclass(frozen=True)
class Environment:
    """The settings of this process.

    Attributes:
        cache_dir: absolute folder of compiled kernels; None where the user has no home folder.
        debug: print what each kernel is and costs.
        dump: which of ``DUMPS`` to write beside the cubin.
        backend: one of ``BACKENDS``, or None to let the GPU decide.
        no_jit: never compile.
        tuning: an absolute path, or "0" for none; None for the default.
    """

    cache_dir: Path | None = None
    debug: bool = False
    dump: tuple[str, ...] = ()
    backend: str | None = None
    no_jit: bool = False
    tuning: str | None = None

    def __post_init__(self) -> None:
        for kind in self.dump:
            if kind not in DUMPS:
                raise ValueError(f"CUPYFLASH_DUMP: must list ptx, sass or both, got {kind!r}")
        if self.backend is not None and self.backend not in BACKENDS:
            allowed = ", ".join(BACKENDS)
            raise ValueError(f"CUPYFLASH_BACKEND: must be one of {allowed}, got {self.backend!r}")

    @property
    def tuning_file(self) -> Path | None:
        """The file of tuned choices, which need not exist; None without any."""
        if self.tuning is not None:
            return None if self.tuning == "0" else Path(self.tuning)
        return self.cache_dir and self.cache_dir / "tuning.json"


_current: Environment | None = None
_lock = threading.RLock()


def current() -> Environment:
    """The settings in force, read from the environment at the first call."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = _read()
    return _current


def install(environment: Environment) -> None:
    """Make ``environment`` the settings of this process, as a worker does with its parent's."""
    global _current
    with _lock:
        _current = environment


@contextlib.contextmanager
def override(**changes: object) -> Iterator[Environment]:
    """Change fields of `Environment` within a ``with`` block, for every thread (for tests)."""
    with _lock:
        before = current()
        install(dataclasses.replace(before, **changes))
    try:
        yield current()
    finally:
        install(before)


def _read() -> Environment:
    known = [f"CUPYFLASH_{field.name.upper()}" for field in dataclasses.fields(Environment)]
    for name in sorted(os.environ):
        if name.startswith("CUPYFLASH_") and name not in known:
            text = f"{name}: no such variable, must be of {', '.join(known)}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    dump = os.environ.get("CUPYFLASH_DUMP", "")
    return Environment(
        cache_dir=_cache_dir(),
        debug=_flag("CUPYFLASH_DEBUG"),
        dump=tuple(kind.strip() for kind in dump.split(",") if kind.strip()),
        backend=os.environ.get("CUPYFLASH_BACKEND") or None,
        no_jit=_flag("CUPYFLASH_NO_JIT"),
        tuning=_tuning(),
    )


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: must be 0 or 1, got {value!r}")
    return value == "1"


def _path(name: str, kind: str) -> Path | None:
    """The absolute path in a variable; None where it is not set."""
    chosen = os.environ.get(name)
    try:
        return Path(chosen).expanduser().absolute() if chosen else None
    except RuntimeError as error:
        fact = f"must be a {kind}, and ~ must be the home of a user"
        raise ValueError(f"{name}: {fact}, got {chosen!r}") from error


def _tuning() -> str | None:
    if os.environ.get("CUPYFLASH_TUNING") == "0":
        return "0"
    path = _path("CUPYFLASH_TUNING", "file")
    return path and str(path)


def _cache_dir() -> Path | None:
    if chosen := _path("CUPYFLASH_CACHE_DIR", "folder"):
        return chosen
    try:
        if os.name == "nt":
            base = os.environ.get("LOCALAPPDATA")
        else:
            base = os.environ.get("XDG_CACHE_HOME")
        # The XDG specification tells programs to ignore a relative path.
        folder = Path(base) if base and os.path.isabs(base) else Path.home().absolute() / ".cache"
    except RuntimeError:  # no home folder: a container's nameless user
        return None
    return folder / "cupyflash"
