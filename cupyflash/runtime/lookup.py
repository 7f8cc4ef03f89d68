"""The look-up of an array's library; arrays are never copied to another one on a GPU.

The kernels need a pointer, a shape, strides and a dtype. `library_of` finds the adapter that reads
them (libraries.py, torch_library.py). Arrays of other libraries are imported by DLPack.
"""

import contextlib
from typing import Any

import numpy

from . import libraries, loaded
from .array import Array

_libraries: dict[type, Any] = {}


def library_of(x: Array) -> Any:
    """The adapter of an array's library, or None if there is no adapter for it."""
    kind = type(x)
    library = _libraries.get(kind)
    if library is None:
        library = _find(x)
        if library is not None:
            _libraries[kind] = library
    return library


def _find(x: Array) -> Any:
    """The adapter for a type that is not known yet, or None.

    Subclasses of NumPy's and CuPy's arrays have none, because whatever they add to the numbers, a
    mask for example, would be lost.
    """
    for module, names, adapter in (
        (numpy, ("ndarray", "memmap"), libraries.NumpyLibrary),
        (loaded.cupy, ("ndarray",), libraries.CupyLibrary),
    ):
        kinds = [getattr(module, name, None) for name in names]
        if type(x) in kinds:
            return _libraries.setdefault(kinds[0], adapter())
    tensor = getattr(loaded.torch, "Tensor", None)
    if tensor is not None and isinstance(x, tensor):
        from .torch_library import TorchLibrary

        return _libraries.setdefault(tensor, TorchLibrary())  # its subclasses have the same adapter
    return None


def from_foreign(function: str, x: Array, name: str = "arrays") -> Array:
    """An array of another library as a NumPy or CuPy array on the same memory.

    Raises:
        TypeError: it is None, a subclass of NumPy's or CuPy's arrays, or speaks neither DLPack nor
            ``__cuda_array_interface__``.
        NotImplementedError: its library would record a gradient, or traces the call.
    """
    refuse_tracer(function, x, name)
    kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}".removeprefix("builtins.")
    for base in (numpy.ndarray, getattr(loaded.cupy, "ndarray", numpy.ndarray)):
        if isinstance(x, base):
            fact = f"{name} must be plain arrays, as masks, units and the like would be lost"
            raise TypeError(f"{function}: {fact}, got {kind}")
    if getattr(x, "requires_grad", False) is True or getattr(x, "stop_gradient", True) is False:
        fact = f"{name} of libraries other than torch have no gradients"
        raise NotImplementedError(f"{function}: {fact}, got a {kind} that requires one")
    if isinstance(x, type):  # a class has the attributes that its arrays have
        kind = f"the class {x.__name__}"
    elif hasattr(x, "__dlpack_device__") and hasattr(x, "__dlpack__"):
        if int(x.__dlpack_device__()[0]) == 1:  # kDLCPU
            try:
                return numpy.from_dlpack(x)
            except RuntimeError:  # NumPy itself does not have the dtype, as with bfloat16
                return numpy.asarray(x)
        import cupy

        return cupy.from_dlpack(x)
    elif hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(x)
    hint = " (write numpy.asarray, cupy.asarray or torch.tensor)" * isinstance(x, list | tuple)
    raise TypeError(
        f"{function}: {name} must be NumPy, CuPy or torch arrays, or speak DLPack or "
        f"__cuda_array_interface__, got {kind}{hint}"
    )


def refuse_tracer(function: str, x: Array, name: str) -> None:
    """Raises NotImplementedError for what stands for an array within jax.jit, grad and the like."""
    tracer = getattr(getattr(loaded.jax, "core", None), "Tracer", None)
    if tracer is not None and isinstance(x, tracer):
        fact = "a call within jax.jit, grad, vmap and the like is not built, allowed is one outside"
        gradients = "of them (gradients: attention_backward, layer_norm_backward and their kin)"
        raise NotImplementedError(f"{function}: {fact} {gradients}, got {name} as a tracer of JAX")


def to_foreign(result: Array, like: Array) -> Array:
    """A result in the library of a foreign array, if that library can import it."""
    with contextlib.suppress(AttributeError):
        namespace = like.__array_namespace__()
        try:
            return namespace.from_dlpack(result)
        except BufferError:  # the library cannot import this dtype by DLPack
            return namespace.asarray(result)
    return result
