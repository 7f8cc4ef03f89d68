"""The route of a call, which depends on its arrays and on what torch does around it.

| Case | Route |
|---|---|
| torch.compile traces the caller | the torch operator; without one, a break in the graph |
| arrays of another library that supports DLPack | the same call on NumPy or CuPy views of them |
| torch must see the call: dispatch modes, tensor subclasses, meta tensors | the torch operator |
| tensors under autocast, or that require a gradient | `TorchSide.called`: casts, autograd |
| everything else | ``run``: a plan on a GPU, NumPy on the CPU |

A `Plan` holds what calls of one signature share; `Plans` keeps plans by signature.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy

from ..jit import compiler
from . import driver
from .array import Array, compiling
from .loaded import untraced
from .lookup import from_foreign, library_of, refuse_tracer, to_foreign

MAX_PLANS = 4096  # a bound on memory, for lengths that change with every call

_keeping = threading.Lock()


class Carried:
    """The base class of what stands among the arrays of a call and is passed on as it is."""


class TorchSide(Protocol):
    """The functions that a topic has for torch, in a module that imports torch."""

    def traced(self, function: str, arrays: tuple, options: tuple) -> tuple:
        """Calls the operator, which torch.compile and dispatch modes see."""

    def called(self, function: str, arrays: tuple, options: tuple) -> tuple:
        """Makes the call under autocast, or records it for the backward pass."""


class Operation:
    """One public function, or several that differ only by name and options.

    Args:
        run: called with (function, library, arrays, options), computes the results from arrays of
            one library.
        torch_side: returns the `TorchSide`; None for an operation without a torch operator and
            without a gradient, whose ``run`` refuses arrays that require one.
        first: index of the array that decides the library; it must not be None.
        native: the name of that array, if it must be an array of NumPy, CuPy or torch: an operation
            that writes into its arrays takes no others, because arrays of JAX must not change.
        names: called with (function, place), returns the name of an array for errors.
        gradient: it is the gradient of another operation, so its `TorchSide` needs no ``called``:
            autocast has no say, and where a derivative is wanted, the operator raises the error.
    """

    def __init__(
        self,
        run: Callable[[str, Any, tuple, tuple], tuple],
        torch_side: Callable[[], TorchSide] | None = None,
        first: int = 0,
        native: str | None = None,
        names: Callable[[str, int], str] | None = None,
        gradient: bool = False,
    ) -> None:
        self.run, self.torch_side, self.first = run, torch_side, first
        self.side: TorchSide | None = None  # what torch_side has returned
        self.native, self.names, self.gradient = native, names, gradient

    @untraced  # unless its caller is traced, which then traces what it calls
    def __call__(
        self, function: str, arrays: tuple[Array | None, ...], options: tuple
    ) -> tuple[Array | None, ...]:
        """Makes the call and returns its results.

        Args:
            function: the name of the public function, for errors.
            arrays: the arrays, None for those that are not passed; an integer where the operation
                makes an array of it.
            options: hashable, and without arrays.
        """
        if compiling():
            from .torch_graphs import eagerly, refuse_in_graph

            if self.torch_side is None:
                return eagerly(self, function, arrays, options)
            refuse_in_graph(function, arrays)
            return self.torch_side().traced(function, arrays, options)
        library = library_of(arrays[self.first])
        if library is None:
            return self._foreign(function, arrays, options)
        if library.has_autograd and self.torch_side is not None:
            route = library.route(arrays[self.first], arrays)
            if self.gradient and route == "called":
                route = "traced" if library.wants_gradient(*arrays) else ""
            if route:
                self.side = self.side or self.torch_side()
                return getattr(self.side, route)(function, arrays, options)
        return self.run(function, library, arrays, options)

    def _foreign(
        self, function: str, arrays: Sequence[Array | None], options: tuple
    ) -> tuple[Array | None, ...]:
        """Makes the call on NumPy or CuPy views; results are in the library of the first array."""
        first, names = arrays[self.first], self.names
        if self.native:
            refuse_tracer(function, first, self.native)
            fact = f"{self.native} must be a NumPy, CuPy or torch array"
            raise TypeError(f"{function}: {fact}, got {type(first).__name__}")
        if first is None:
            name = "x" if names is None else names(function, self.first)
            raise TypeError(f"{function}: {name} must be an array, got NoneType")
        known = list(arrays)
        for place, x in enumerate(arrays):
            plain = isinstance(x, int | float | numpy.integer | Carried) and place != self.first
            if not (x is None or plain or library_of(x)):
                name = "arrays" if names is None else names(function, place)
                known[place] = from_foreign(function, x, name)
        results = self.run(function, library_of(known[self.first]), tuple(known), options)
        return tuple(None if x is None else to_foreign(x, first) for x in results)


class Plan:
    """The work of calls of one signature, prepared: configurations, launches, shapes of results.

    It runs with the device of its arrays as the current device. If a context has fewer
    multiprocessors than a cooperative launch was planned for, it makes another plan of the same
    arguments for that number.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> "Plan":
        plan = super().__new__(cls)
        arguments = tuple(dict(x) if isinstance(x, dict) else x for x in arguments)
        plan.again = functools.partial(cls, *arguments, **options)
        plan.smaller = {}
        return plan

    def __init__(self, device: int) -> None:
        compiler.nvrtc()  # raises an error with the pip command if CuPy or NVRTC is missing
        import cupy

        self.device_id, self.device = device, cupy.cuda.Device(device)
        self.current_device = cupy.cuda.runtime.getDevice

    def __call__(self, *arguments: Any) -> tuple:
        try:
            if self.current_device() == self.device_id:
                return self.run(*arguments)
            with self.device:
                return self.run(*arguments)
        except driver.GridTooLarge as error:
            plan = self._for_fewer(error.multiprocessors)
        return plan(*arguments)

    def _for_fewer(self, multiprocessors: int) -> "Plan":
        if multiprocessors not in self.smaller:
            with driver.limit_multiprocessors(multiprocessors):
                self.smaller[multiprocessors] = self.again()
        return self.smaller[multiprocessors]

    def run(self, *arguments: Any) -> tuple:
        raise NotImplementedError


class Plans(dict):
    """The plans of one operation, by the signatures of its arrays and by its options.

    A repeated call costs one look-up: shapes, strides, dtypes and devices of the arrays are in the
    key, and everything that follows from them, checks included, has been done for the plan. So a
    call reads

        key, pointers = plans.key(library, arrays, options)
        plan = plans.get(key)
        if plan is None:
            plan = plans.add(key, make(check(arrays), key[-1]))

    Args:
        wide: the number of leading arrays that are read 16 bytes at a time if all are aligned.
        most: the number of plans that are kept; beyond it the oldest is dropped.
    """

    def __init__(self, wide: int = 0, most: int = MAX_PLANS) -> None:
        super().__init__()
        self.wide, self.most = wide, most

    def key(
        self, library: Any, arrays: Sequence[Any], options: Hashable
    ) -> tuple[tuple | None, list[int]]:
        """The key of a call and the pointers of its arrays, 0 for None.

        The last entry of the key says whether the ``wide`` leading arrays are aligned to 16 bytes.
        Without a signature of each array there is no key but None, and no plan: the checks of the
        call, which come next, say which array is not of the library.

        Args:
            library: the adapter of the library of the first array.
        """
        try:
            signatures, pointers = library.read(arrays)
        except (AttributeError, TypeError):
            return None, []
        bits = 0
        for address in pointers[: self.wide]:
            bits |= address
        return (*signatures, options, bits % 16 == 0), pointers

    def add(self, key: tuple | None, plan: Any) -> Any:
        """Keeps a plan and returns it; if there are too many, the oldest is dropped."""
        if key is None:
            raise TypeError("an array without a signature has passed the checks of its call")
        with _keeping:
            while len(self) >= self.most:
                del self[next(iter(self))]
            self[key] = plan
        return plan


def is_followed(library: Any, arrays: Sequence[Any]) -> bool:
    """Whether torch may track what is done to these arrays, or cannot tell.

    An operation without a torch operator checks such a call each time, and the checks refuse it.
    """
    given = [x for x in arrays if x is not None]
    try:
        return library.followed(*given) and bool(library.what_follows(*given))
    except AttributeError:  # an array of another library
        return True
