"""The packages that parts of the library need, and the pip line that brings those that are missing.

A line names the packages themselves. It never names cupyflash and an extra, because cupyflash is
not on the index, where anybody could put something under its name.
"""

import contextlib
import re
import shlex
from collections.abc import Iterator

# These are the requirements of the extras in pyproject.toml.
EXTRAS = {
    "cuda12": (
        "cupy-cuda12x>=14",
        "ml_dtypes",
        "nvidia-cuda-nvrtc-cu12>=12.8",
        "nvidia-cuda-runtime-cu12",
    ),
    "cuda13": (
        "cupy-cuda13x>=14",
        "ml_dtypes",
        "nvidia-cuda-nvrtc>=13,<14",
        "nvidia-cuda-runtime>=13,<14",
    ),
    "torch": ("torch>=2.7",),
    "cli": ("rich",),
    "gpt2": ("safetensors", "tokenizers"),
}
_CUPY = {"cuda12": "cupy-cuda12x", "cuda13": "cupy-cuda13x"}


def pip_line(extra: str) -> str:
    """The command that brings what is missing of an extra, or all of it anew if nothing is.

    Packages of CuPy for two versions of CUDA replace each other's files: the other one goes first.
    """
    missing = [x for x in EXTRAS[extra] if not _satisfied(x)]
    upgrade = "" if missing else "--upgrade "
    line = f"pip install {upgrade}{shlex.join(missing or EXTRAS[extra])}"
    others = [name for x, name in _CUPY.items() if extra in _CUPY and x != extra and _version(name)]
    return " && ".join([*(f"pip uninstall {name}" for name in others), line])


def cuda_line() -> str:
    """The `pip_line` for CuPy, NVRTC and the CUDA runtime, which no driver or GPU is asked for."""
    for extra, name in _CUPY.items():
        if _version(name):
            return pip_line(extra)
    return f"{pip_line('cuda12')}, or with a CUDA 13 driver {pip_line('cuda13')}"


@contextlib.contextmanager
def importing(user: str, requirement: str) -> Iterator[None]:
    """A block that imports a package: where it is not installed, the error names the pip line.

    Args:
        user: what needs it.
        requirement: its name, and the oldest version that will do.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = re.split("[<>=]", requirement)[0]
        if (error.name or "").partition(".")[0] != name:
            raise
        line = f"pip install {shlex.quote(requirement)}"
        raise ImportError(f"{user}: needs {name}, which is not installed; {line}") from None


def _satisfied(requirement: str) -> bool:
    name, _, least = requirement.partition(">=")
    found = _version(name) or (name in _CUPY.values() and _version("cupy"))  # conda's, say
    return bool(found) and _numbers(found) >= _numbers(least.partition(",")[0])


def _version(package: str) -> str:
    """The version of an installed package, or ""."""
    import importlib.metadata  # slow, and only errors need it

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version)[:2]]
