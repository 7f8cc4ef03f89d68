"""Which way the call of an operation goes: by its arrays, and by what torch does around it.

| what comes | where it goes |
|---|---|
| torch.compile traces the caller | the torch operator, or out of the graph where there is none |
| arrays of a library that speaks DLPack | the same call on NumPy or CuPy views of them |
| torch has to see the call: dispatch modes, tensor subclasses, meta tensors | the torch operator |
| tensors under autocast, or that require a gradient | torch's side: casts, autograd |
| everything else | ``run``: a plan on a GPU, NumPy on the CPU |
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .array import Array, compiling, from_foreign, library_of, to_foreign


class TorchSide(Protocol):
    """What a topic has for torch, in a module that imports it."""

    def traced(self, function: str, arrays: tuple, options: tuple) -> tuple:
        """The operator, which torch.compile and dispatch modes see."""

    def called(self, function: str, arrays: tuple, options: tuple) -> tuple:
        """The call under autocast, or recorded for the backward pass."""


class Operation:
    """One function, or several that differ by name and options alone.

    Args:
        run: of (function, library, arrays, options): computes with arrays of one library.
        torch_side: returns the `TorchSide`; None for an operation without operator and gradient,
            whose ``run`` refuses arrays that require one.
        first: which of the arrays decides the library, and must not be None.
    """

    def __init__(
        self,
        run: Callable[[str, Any, tuple, tuple], tuple],
        torch_side: Callable[[], TorchSide] | None = None,
        first: int = 0,
    ) -> None:
        self.run, self.torch_side, self.first = run, torch_side, first

    def __call__(
        self, function: str, arrays: tuple[Array | None, ...], options: tuple
    ) -> tuple[Array | None, ...]:
        """The results.

        Args:
            function: the name of the public function, for errors.
            arrays: None for what is not there.
            options: hashable, without arrays.
        """
        if compiling():
            if self.torch_side is not None:
                return self.torch_side().traced(function, arrays, options)
            from .torch_eager import eagerly

            return eagerly(self, function, arrays, options)
        library = library_of(arrays[self.first])
        if library is None:
            return self._foreign(function, arrays, options)
        if library.has_autograd and self.torch_side is not None:
            if library.traced(arrays[self.first], *arrays):
                return self.torch_side().traced(function, arrays, options)
            if library.is_autocast() or library.wants_gradient(*arrays):
                return self.torch_side().called(function, arrays, options)
        return self.run(function, library, arrays, options)

    def _foreign(
        self, function: str, arrays: Sequence[Array | None], options: tuple
    ) -> tuple[Array | None, ...]:
        """On views by NumPy or CuPy; the results are in the library of the first array."""
        first = arrays[self.first]
        if first is None:
            raise TypeError(f"{function}: x must be an array, got None")
        known = tuple(
            x if x is None or library_of(x) else from_foreign(function, x) for x in arrays
        )
        results = self.run(function, library_of(known[self.first]), known, options)
        return tuple(None if x is None else to_foreign(x, first) for x in results)
