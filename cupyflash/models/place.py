"""The place of a model's arrays: a library and a device, and how arrays are made there."""

from collections.abc import Sequence
from typing import Any

import numpy

from cupyflash import machine, packages

from ..runtime.array import Array

LIBRARIES = ("numpy", "cupy", "torch")
DTYPES = ("float16", "bfloat16", "float32")


class Place:
    """Makes arrays of one library on one device.

    Args:
        library: "numpy", "cupy" or "torch".
        device: of torch, "cpu" or "cuda" with or without an index; the others have one each.
    """

    def __init__(self, library: str, device: str = "cpu") -> None:
        self.name, self.device = library, device
        if library == "numpy":
            self.module: Any = numpy
        elif library == "cupy":
            import cupy

            self.module, self.device = cupy, "cuda"
        else:
            with packages.importing("cupyflash", "torch>=2.7"):
                import torch
            self.module = torch

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run, instead of NumPy."""
        return self.device != "cpu"

    def dtype(self, name: str) -> Any:
        """The dtype of this name, such as "int32", in the library.

        Raises:
            ImportError: bfloat16 of NumPy or CuPy without ml_dtypes.
        """
        return getattr(self.module, name) if self.name == "torch" else numpy_dtype(name)

    def zeros(self, shape: int | Sequence[int], dtype: str) -> Array:
        """An array of zeros; ``dtype`` is a name, such as "int32"."""
        if self.name == "torch":
            # Inference tensors could be written in inference mode only.
            with self.module.inference_mode(False):
                return self.module.zeros(shape, dtype=self.dtype(dtype), device=self.device)
        return self.module.zeros(shape, self.dtype(dtype))

    def put(self, values: numpy.ndarray) -> Array:
        """An array with these values in their dtype; bfloat16 is that of ml_dtypes.

        It may share memory with ``values`` on the CPU.
        """
        if self.name != "torch":
            return self.module.asarray(values)
        if not values.flags.writeable:
            values = values.copy()
        if values.dtype.name != "bfloat16":
            return self.module.from_numpy(values).to(self.device)
        tensor = self.module.from_numpy(values.view("int16"))
        return tensor.view(self.module.bfloat16).to(self.device)


def choose_place(
    function: str, library: str | None, device: str | None, dtype: str | None
) -> tuple[Place, str | None]:
    """The place of a new model, and its dtype: float32 on the CPU unless another is asked for.

    Args:
        function: who asks, for errors.
        library: one of `LIBRARIES`; None is CuPy on a GPU, and NumPy on the CPU.
        device: "gpu" or "cpu"; None is the GPU if there is one.
        dtype: one of `DTYPES`; None on a GPU is returned, as the checkpoint knows better.

    Raises:
        ValueError: one of them is none of these, or they exclude each other.
        RuntimeError: no GPU.
        ImportError: no torch; bfloat16 of NumPy or CuPy without ml_dtypes.
    """
    for name, given, allowed in (
        ("library", library, LIBRARIES),
        ("device", device, ("gpu", "cpu")),
        ("dtype", dtype, DTYPES),
    ):
        if given is not None and given not in allowed:
            choice = " or ".join(map(repr, allowed))
            raise ValueError(f"{function}: {name} must be {choice}, got {given!r}")
    if library == "numpy" and device == "gpu" or library == "cupy" and device == "cpu":
        fact = "NumPy arrays are on the CPU, and CuPy arrays on a GPU"
        raise ValueError(f"{function}: {fact}, got library={library!r} and device={device!r}")
    wanted = "gpu" if library == "cupy" else "cpu" if library == "numpy" else device
    problem = _gpu_problem(function, library) if wanted != "cpu" else ""
    if wanted == "gpu" and problem:
        raise RuntimeError(f"{function}: a GPU cannot be used: {problem}")
    on_gpu = wanted != "cpu" and not problem
    place = Place(library or ("cupy" if on_gpu else "numpy"), "cuda" if on_gpu else "cpu")
    dtype = dtype if on_gpu else dtype or "float32"
    place.dtype(dtype or "float32")  # raises the error of a missing ml_dtypes
    return place, dtype


def _gpu_problem(function: str, library: str | None) -> str:
    """Why a library cannot use a GPU, or ""."""
    problem = machine.gpu_problem()
    if library == "torch" and not problem:
        with packages.importing(function, "torch>=2.7"):
            import torch
        if not torch.cuda.is_available():
            return "torch sees none, or was built for the CPU"
    return problem


def numpy_dtype(name: str, function: str = "cupyflash") -> Any:
    """The NumPy dtype of a name; ``function`` asks, for errors.

    Raises:
        ImportError: bfloat16 without ml_dtypes.
    """
    if name != "bfloat16":
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"{function}: bfloat16 needs ml_dtypes; pip install ml_dtypes") from None
    return numpy.dtype(ml_dtypes.bfloat16)
