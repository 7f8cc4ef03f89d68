"""The GPUs, driver and packages of this machine, and the pip line for what is missing.

The driver is asked through ctypes, so that the answer does not depend on what is installed.
"""

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util

from . import environment, jit, packages
from .jit import compiler, messages
from .ops.attention import backends
from .ops.attention.kind import Access, Features, Kind
from .runtime.config import ITEM_SIZE
from .runtime.driver import DRIVER
from .runtime.gpu import ARCHITECTURES

OLDEST_CUPY = 14
_PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "ml_dtypes", "torch", "triton")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as the driver sees it; ``memory`` in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclasses.dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the newest CUDA it runs (None: no driver), its GPUs, and what is wrong."""

    cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    problem: str = ""


@functools.cache
def driver() -> Driver:
    """The driver of this machine."""
    try:
        cuda = ctypes.CDLL(DRIVER)
    except OSError:
        return Driver(None, (), f"no NVIDIA driver on this machine ({DRIVER} was not found)")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = (number.value // 1000, number.value % 1000 // 10)
    if status := cuda.cuInit(0):
        return Driver(version, (), f"the NVIDIA driver finds no usable GPU (cuInit: {status})")
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return Driver(version, tuple(_gpu(cuda, device) for device in range(number.value)))


def _gpu(cuda: ctypes.CDLL, device: int) -> Gpu:
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name.value.decode(), tuple(capability), memory.value)


def has(module: str) -> bool:
    """Whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def versions() -> dict[str, str]:
    """Versions of the installed packages that matter, and of NVRTC if it works."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not compiler_problem():
        found["NVRTC"] = compiler.version()
    return found


def extra() -> str:
    """The extra for this machine's driver; CUDA 13 has no compiler for GPUs older than 7.5."""
    found = driver()
    old = any(gpu.capability < (7, 5) for gpu in found.gpus)
    return "cuda13" if found.cuda and found.cuda >= (13, 0) and not old else "cuda12"


def compiler_problem() -> str:
    """Why nothing can be compiled here, or ""."""
    if not has("cupy"):
        return "CuPy is not installed"
    if problem := compiler.cupy_folder_problem():
        return problem
    try:
        compiler.nvrtc()
    except ImportError as error:
        return f"NVRTC does not work: {error.__cause__}"
    return ""


def gpu_problem() -> str:
    """Why attention cannot run on a GPU here, or ""."""
    if problem := driver().problem or compiler_problem():
        return problem
    import cupy

    if int(cupy.__version__.partition(".")[0]) < OLDEST_CUPY:
        return f"CuPy must be {OLDEST_CUPY} or newer, got {cupy.__version__}"
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            return "CuPy sees no GPU"
        capability = divmod(int(cupy.cuda.Device().compute_capability), 10)
        compiler.target_arch(capability)
    except (RuntimeError, ImportError, OSError) as error:
        return str(error)
    return "" if any(backend_dtypes(capability).values()) else f"no kernels for {capability}"


def mend() -> list[str]:
    """The steps that mend `gpu_problem`."""
    steps = ["install the NVIDIA driver, where there is an NVIDIA GPU"] if driver().problem else []
    if compiler.cupy_folder_problem():
        steps.append(compiler.CUPY_FOLDER_REMEDY)
    elif not steps or compiler_problem():
        steps.append(packages.pip_line(extra()))
    return steps


def backend_dtypes(capability: tuple[int, int]) -> dict[str, tuple[str, ...]]:
    """The dtypes that each backend computes on a GPU."""
    return {
        name: tuple(
            dtype
            for dtype in ITEM_SIZE
            if backend.supports(
                Kind(dtype, 64, Features(), capability), Access.TENSOR_MAP, backward=False
            )
        )
        for name, backend in backends.BACKENDS.items()
    }


def backend_capabilities(backend: str) -> list[tuple[int, int]]:
    """The compute capabilities on which a backend runs, the oldest first."""
    return [c for c in ARCHITECTURES if backend_dtypes(c)[backend]]


def slow_kernels() -> list[str]:
    """The fault and the cure of kernels in the cache that the NVRTC in use has made slow."""
    try:
        entries = [] if compiler_problem() else jit.entries()
    except (jit.UnsafeCacheError, OSError):  # nothing is loaded from it
        return []
    slow = [x for x in entries if x.slowness and x.nvrtc == compiler.version()]
    if not slow:
        return []
    others = f", and {len(slow) - 1} more" if len(slow) > 1 else ""
    return [messages.slow_kernel(slow[0]) + others, compiler.cure(slow[0].nvrtc)]


def cache_size() -> tuple[int, int]:
    """Number of compiled kernels in the cache, and bytes of their files."""
    entries = jit.entries()
    files = (path for entry in entries for path in entry.path.parent.iterdir())
    return len(entries), sum(path.stat().st_size for path in files)


def settings() -> dict[str, str]:
    """The settings that differ from their default, under the names of their variables."""
    current, default = environment.current(), environment.Environment()
    return {
        f"CUPYFLASH_{field.name.upper()}": _text(getattr(current, field.name))
        for field in dataclasses.fields(current)
        if field.name != "cache_dir"
        and getattr(current, field.name) != getattr(default, field.name)
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(value) if isinstance(value, tuple) else str(value)
