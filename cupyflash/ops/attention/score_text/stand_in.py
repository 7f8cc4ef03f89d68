"""The stand-ins with which a function is traced: each operation on them writes down a node.

They take Python's operators, torch's functions and methods (``__torch_function__``), and those of
NumPy and CuPy, and hand all of them to a `Recorder`.
"""

import operator
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import numpy

from ....runtime import loaded
from .tree import Capture, Kind, Node, TextError
from .write import to_text

DEVICE = re.compile(r"[a-z]+(:\d+)?")


def is_array(x: Any) -> bool:
    """Whether x is an array of any library."""
    if isinstance(x, ModuleType | type):
        return False
    return isinstance(getattr(x, "ndim", None), int) and hasattr(x, "shape") and hasattr(x, "dtype")


def is_host_number(x: Any) -> bool:
    """Whether an array without axes can be read without waiting, and has no gradient."""
    if isinstance(x, numpy.ndarray):
        return True
    torch = loaded.torch
    if torch is None or not isinstance(x, torch.Tensor):
        return False
    return x.device.type == "cpu" and not x.requires_grad and type(x) is torch.Tensor


def dtype_name(x: Any) -> str | None:
    """The name of a dtype in any form that a library takes, or of that of an array.

    None of what is none: a device, say.
    """
    if isinstance(x, str) and x.startswith("torch."):  # torch.IntTensor, torch.cuda.IntTensor
        x = operator.attrgetter(x.removeprefix("torch."))(loaded.torch)
    if x is None or (isinstance(x, str) and DEVICE.fullmatch(x) and not _is_dtype(x)):
        return None
    if not (isinstance(x, type) and issubclass(x, numpy.generic)):
        x = getattr(x, "dtype", x)
    if _is_dtype(x):
        return numpy.dtype(x).name
    name = str(x)
    return name.removeprefix("torch.") if isinstance(x, str) or "torch." in name else None


def _is_dtype(x: Any) -> bool:
    """Whether NumPy takes it for a dtype."""
    try:
        numpy.dtype(x)
    except TypeError:
        return False
    return True


class _Operations:
    """The operators and methods of stand-ins, all by `Recorder.call`."""

    recorder: Any  # the `Recorder`

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        recorder = next(x.recorder for x in _flat((*args, *(kwargs or {}).values())))
        if name == "__getitem__":
            return recorder.index(*args)
        return recorder.call(name, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.call(ufunc.__name__, args, kwargs)

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: Any) -> Any:
        return self.recorder.call(func.__name__, args, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.call(kernel.name.removeprefix("cupy_"), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.recorder.call(name, (self, *args), kwargs)

    def __bool__(self) -> NoReturn:
        fact = "a condition has no truth while a function is traced, so `if`, `and`, `or`, `not`, "
        fact += "`a < b < c`, min() and max() have no text, allowed are where(condition, a, b), &, "
        self.refuse(fact + "|, ~, minimum and maximum")

    def __index__(self) -> NoReturn:
        self.refuse("a stand-in is no Python number, which range() or a list would need")

    __int__ = __float__ = __len__ = __iter__ = __index__

    def refuse(self, fact: str) -> NoReturn:
        raise TextError(TypeError, f"{fact}, got {to_text(self.recorder.node(self))}")

    __hash__ = object.__hash__


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
ARITHMETIC += ("lshift", "rshift")


def _flat(args: tuple) -> Any:
    for x in args:
        if isinstance(x, _Operations):
            yield x
        elif isinstance(x, tuple | list):
            yield from _flat(tuple(x))


def _operator(name: str, reflected: bool) -> Callable:
    if reflected:
        return lambda a, b: a.recorder.call(name, (b, a), {})
    return lambda *args: args[0].recorder.call(name, args, {})


for _name in ARITHMETIC:
    setattr(_Operations, f"__r{_name}__", _operator(_name, True))
for _name in (*ARITHMETIC, *COMPARISONS, "neg", "invert", "abs"):
    setattr(_Operations, f"__{_name}__", _operator(_name, False))


class Fixed(int):
    """A number that is compiled in, as one that stands in the code of a function."""


class StandIn(_Operations):
    """Stands for a number of the text."""

    def __init__(self, recorder: Any, node: Node) -> None:
        self.recorder, self.node = recorder, node

    @property
    def dtype(self) -> Any:
        kind, torch = self.node.kind, loaded.torch
        names = {Kind.BOOL: "bool", Kind.INT: "int32", Kind.FLOAT: "float32"}
        return getattr(
            torch or numpy, names[kind] if torch else names[kind].replace("bool", "bool_")
        )

    @property
    def device(self) -> None:
        return None  # new tensors go where torch's default says

    shape, ndim = (), 0

    def __getitem__(self, index: Any) -> NoReturn:
        self.refuse("a stand-in is one number and has no axes to index")


class Elements(_Operations):
    """Stands for the elements of an array whose first axes are indexed: ``a[i][j]``."""

    def __init__(self, recorder: Any, capture: Capture, indices: tuple[Node, ...]) -> None:
        self.recorder, self.capture, self.indices = recorder, capture, indices

    def __getitem__(self, index: Any) -> "Elements | StandIn":
        return self.recorder.elements(self.capture, self.indices, index)


class ArrayStandIn:
    """Stands for an array of NumPy, CuPy or JAX, whose own indexing takes no stand-ins."""

    def __init__(self, recorder: Any, array: Any) -> None:
        self.recorder, self.array = recorder, array

    def __getitem__(self, index: Any) -> Any:
        if any(True for _ in _flat((index,))):
            return self.recorder.index(self.array, index)
        return self.array[index]

    def __len__(self) -> int:
        return len(self.array)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)
