"""Where a test runs: a library, a device, and on a GPU a forced kernel family."""

import dataclasses
import functools
import importlib.util
import os
from typing import Any

import numpy

from cupyflash import environment
from cupyflash.testing import Inputs, cast, make_inputs, make_varlen_inputs, to_library

# Compute capabilities (10 * major + minor) on which a family runs, and its dtypes there.
FAMILY_CAPABILITIES = {"sm90": (90,), "sm80": range(75, 1000), "simt": range(0, 1000)}
HALF = ("float16", "bfloat16")
# The family that a run of the suite is about, as a user forces it: CUPYFLASH_FAMILY=sm80 pytest.
FORCED = os.environ.get("CUPYFLASH_FAMILY") or None


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run the public functions.

    Attributes:
        family: forced kernel family; None on the CPU, and on a GPU where the package (or
            CUPYFLASH_FAMILY) chooses.
        dtypes: what this family computes.
        full: whether it runs the whole covering set of cases; a second library on the same
            kernels runs a part of it.
        missing: why it cannot run on this machine.
    """

    name: str
    library: str
    device: str = "cpu"
    family: str | None = None
    dtypes: tuple[str, ...] = (*HALF, "float32")
    full: bool = True
    missing: str = ""

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def aligned_only(self) -> bool:
        """The tensor-core families load 16 bytes at a time."""
        return self.family in ("sm90", "sm80")

    def array(self, values: numpy.ndarray, dtype: str | None = None) -> Any:
        """An array of the backend, float values in ``dtype``, others as they are."""
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
    """Whether the kernels of sm_90a alone can run, and no other family is forced."""
    return compute_capability()[0] == 90 and FORCED in (None, "sm90")


def has_tensor_cores() -> bool:
    """Whether kernels on tensor cores can run, and a forced family does not forbid them."""
    return compute_capability()[0] >= 75 and FORCED != "simt"


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


@functools.cache
def families() -> tuple[str, ...]:
    """The families that exist and run on this GPU, the fastest first; or the forced one."""
    capability, _ = compute_capability()
    return tuple(
        family
        for family in environment.FAMILIES
        if capability
        and FORCED in (None, family)
        and capability in FAMILY_CAPABILITIES[family]
        and has(f"cupyflash.attention.families.{family}")
    )


def _cpu_backends() -> list[Backend]:
    numpy_dtypes = (*HALF, "float32") if has("ml_dtypes") else ("float16", "float32")
    torch_missing = "" if has("torch") else "torch is not installed"
    return [
        Backend("numpy", "numpy", dtypes=numpy_dtypes),
        Backend("torch-cpu", "torch", missing=torch_missing),
    ]


def _gpu_backends() -> list[Backend]:
    capability, reason = compute_capability()
    if not capability:
        return [Backend("gpu", "cupy", "cuda", missing=reason)]
    torch_works = False
    if has("torch"):
        import torch

        torch_works = torch.cuda.is_available()
    backends = []
    for family in families():
        half = HALF if capability >= 80 else ("float16",)
        dtypes = half if family in ("sm90", "sm80") else (*HALF, "float32")
        if torch_works:
            backends.append(Backend(f"torch-{family}", "torch", "cuda", family, dtypes))
        if "bfloat16" in dtypes and not has("ml_dtypes"):
            dtypes = tuple(dtype for dtype in dtypes if dtype != "bfloat16")
        full = not torch_works
        backends.append(Backend(f"cupy-{family}", "cupy", "cuda", family, dtypes, full))
    return backends


CPU_BACKENDS = _cpu_backends()
GPU_BACKENDS = _gpu_backends()
BACKENDS = CPU_BACKENDS + GPU_BACKENDS
