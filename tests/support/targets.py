"""A test runs on a target: a library, a device, and on a GPU a forced backend."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy

from cupyflash import environment
from cupyflash.ops.attention import dispatch, sharing
from cupyflash.ops.attention.sm90 import boolean_bias
from cupyflash.runtime.operation import Plans
from cupyflash.testing import Inputs, cast, make_inputs, make_varlen_inputs, to_library

# Compute capabilities (10 * major + minor) on which a backend runs, and its dtypes there.
BACKEND_CAPABILITIES = {
    "sm90": (90,),
    "sm80": range(75, 1000),
    "fp16x3": range(75, 1000),
    "simt": range(0, 1000),
}
HALF = ("float16", "bfloat16")
# The backend that a run of the suite is about, as a user forces it: CUPYFLASH_BACKEND=sm80 pytest.
FORCED = os.environ.get("CUPYFLASH_BACKEND") or None
# A folder: the kernels of attention run on the CPU (support/emulator) and are compiled into it.
EMULATED = os.environ.get("EMULATED_KERNELS")


@contextlib.contextmanager
def changed_plans(module, **values):
    """Plans of attention are made with other numbers in a module that chooses what they launch."""
    plans = [x for x in vars(dispatch).values() if isinstance(x, Plans)]
    with mock.patch.multiple(module, **values):
        try:
            for x in plans:
                x.clear()
            yield
        finally:
            for x in plans:
                x.clear()


def large_tiles(wanted=True):
    """Plans of attention have the tiles for many tiles, though the problems of tests have few."""
    return changed_plans(sharing, MANY=0) if wanted else contextlib.nullcontext()


def boolean_texts():
    """A Boolean bias that all heads share is a text on Hopper, though the problems are small."""
    return changed_plans(boolean_bias, LEAST_HEADS=1, LEAST_SCORES=1)


@dataclasses.dataclass(frozen=True)
class Target:
    """One way to run the public functions.

    Attributes:
        backend: forced backend; None on the CPU, and on a GPU where the package (or
            CUPYFLASH_BACKEND) chooses.
        dtypes: what this backend computes.
        full: whether it runs the whole covering set of cases; a second library on the same
            kernels runs a part of it.
        missing: why it cannot run on this machine.
    """

    name: str
    library: str
    device: str = "cpu"
    backend: str | None = None
    dtypes: tuple[str, ...] = (*HALF, "float32")
    full: bool = True
    missing: str = ""

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def aligned_only(self) -> bool:
        """The tensor-core backends load 16 bytes at a time."""
        return self.backend in ("sm90", "sm80")

    @property
    def forced_backends(self) -> list[str | None]:
        """The values of CUPYFLASH_BACKEND that a projection runs with; None is no value."""
        return [None, "sm80", "simt"] if self.gpu else [None]

    def array(self, values: numpy.ndarray, dtype: str | None = None) -> Any:
        """An array of the target, float values in ``dtype``, others as they are."""
        if dtype is None:
            return to_library(values, self.library, self.device)
        return cast(values.astype("float32"), dtype, self.library, self.device)

    def inputs(self, dtype: str, **shape: Any) -> Inputs:
        return make_inputs(self.library, dtype, device=self.device, **shape)

    def varlen_inputs(self, dtype: str, *lengths: Any, **shape: Any) -> Inputs:
        return make_varlen_inputs(self.library, dtype, *lengths, device=self.device, **shape)

    def synchronize(self) -> None:
        if self.gpu:
            import cupy

            cupy.cuda.Device().synchronize()


def is_hopper() -> bool:
    """Whether the kernels of sm_90a alone can run, and no other backend is forced."""
    return compute_capability()[0] == 90 and FORCED in (None, "sm90")


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def compute_capability() -> tuple[int, str]:
    """10 * major + minor of GPU 0, or (0, why there is none)."""
    if not has("cupy"):
        return 0, "no GPU tests: CuPy is not installed"
    import cupy

    try:
        cupy.cuda.runtime.getDeviceCount()
        return int(cupy.cuda.Device(0).compute_capability), ""
    except Exception as error:  # CuPy raises its own type, or ImportError for a missing library
        return 0, f"no GPU tests: {error}"


def few() -> tuple[str, ...]:
    """What tells a script, or a test, to run fewer cases: no GPU, and so few cores.

    Only for cases that the run with a GPU has: it runs these tests with all of them.
    """
    return () if compute_capability()[0] else ("few",)


def parts_of_processes(parts: Iterable[str]) -> list[tuple[str, ...]]:
    """For such scripts: one process for each part, or where there is no GPU for all of them.

    Nothing is gained there by more processes than cores, each of which imports torch for 3 seconds.
    """
    return [(*parts,)] if few() else [(part,) for part in parts]


@functools.cache
def backends() -> tuple[str, ...]:
    """The backends that exist and run on this GPU, the fastest first; or the forced one."""
    capability, _ = compute_capability()
    return tuple(
        backend
        for backend in environment.BACKENDS
        if capability
        and FORCED in (None, backend)
        and capability in BACKEND_CAPABILITIES[backend]
        and has(f"cupyflash.ops.attention.{backend}")
    )


def _cpu_targets() -> list[Target]:
    numpy_dtypes = (*HALF, "float32") if has("ml_dtypes") else ("float16", "float32")
    torch_missing = "" if has("torch") else "torch is not installed"
    return [
        Target("numpy", "numpy", dtypes=numpy_dtypes),
        Target("torch-cpu", "torch", missing=torch_missing),
    ]


def _gpu_targets() -> list[Target]:
    capability, reason = compute_capability()
    if not capability:
        return [Target("gpu", "cupy", "cuda", missing=reason)]
    torch_works = False
    if has("torch"):
        import torch

        torch_works = torch.cuda.is_available()
    targets = []
    for backend in backends():
        dtypes = _dtypes(backend, HALF if capability >= 80 else ("float16",))
        if torch_works:
            targets.append(Target(f"torch-{backend}", "torch", "cuda", backend, dtypes))
        if "bfloat16" in dtypes and not has("ml_dtypes"):
            dtypes = tuple(dtype for dtype in dtypes if dtype != "bfloat16")
        full = not torch_works
        targets.append(Target(f"cupy-{backend}", "cupy", "cuda", backend, dtypes, full))
    return targets


def _emulated_targets() -> list[Target]:
    """Hopper's kernels, and those of other GPUs."""
    return [
        Target(f"emulated-{backend}", "torch", backend=backend, dtypes=_dtypes(backend, HALF))
        for backend in environment.BACKENDS
        if FORCED in (None, backend)
    ]


def _dtypes(backend: str, half: tuple[str, ...]) -> tuple[str, ...]:
    """Those that a backend computes, on a GPU whose tensor cores have these of 16 bits."""
    of_backend = {"sm90": half, "sm80": half, "fp16x3": ("float32",)}
    return of_backend.get(backend, (*HALF, "float32"))


CPU_TARGETS = _cpu_targets()
GPU_TARGETS = _emulated_targets() if EMULATED else _gpu_targets()
TARGETS = GPU_TARGETS if EMULATED else CPU_TARGETS + GPU_TARGETS
