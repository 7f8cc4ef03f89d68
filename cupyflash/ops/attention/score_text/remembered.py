"""Texts of functions that were traced, for calls with another function that has the same text.

A model hands over its function at every call, often one that it has just made. Its text follows
from its code, the dtypes and ranks of the arrays that it names, and the numbers that it names, if
the code has no branch, and calls nothing but the operations of a score: then the text cannot depend
on what the arrays hold. Any other function is traced at each call, and so is one that may make a
number of an element: of a NumPy array, or by a function of math or NumPy.
"""

import dis
import functools
import math
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy

from .recorder import CASTS, EXTREMES, ONE, OPERATORS, SAME, Recorder
from .stand_in import is_array, is_host_number

MOST = 512  # texts
DEPTH = 8  # functions that call each other
BUILTINS = {"abs": abs, "pow": pow}
LIBRARIES = ("torch", "numpy", "cupy", "math", "jax")
OPERATIONS = {*ONE, *OPERATORS, *EXTREMES, *SAME, *CASTS, "neg", "logical_and", "logical_or"}
OPERATIONS |= {x.removeprefix("call_") for x in dir(Recorder) if x.startswith("call_")}
# A function also looks up these modules, numbers and dtypes in a library.
CONSTANTS = ("nn", "functional", "special", "pi", "inf", "float32", "int32", "int64")
# An instruction whose name contains one of these is no part of a plain expression.
OTHERS = ("JUMP", "ITER", "IMPORT", "STORE_", "DELETE_", "RAISE", "YIELD", "MAKE_", "LOAD_NAME")
PLAIN = "STORE_FAST"
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
LITERALS = ("LOAD_CONST", "LOAD_SMALL_INT")

_texts: dict[tuple, tuple[Any, tuple[int | None, ...]]] = {}


def remembered(kind: type, function: Any) -> Any:
    """``kind(function)``, a `Score` or a `Mask`; the function is not traced if its text is known.

    Raises:
        As the class.
    """
    arrays: list[Any] = []
    key = names_of(function, arrays)
    if key is None:
        return kind(function)
    key = (kind, *key)
    if key in _texts:
        text, places = _texts[key]
        made = kind.__new__(kind)
        made.__dict__.update(text.__dict__)
        made.given = tuple(
            x if place is None else arrays[place] for x, place in zip(text.given, places)
        )
        return made
    made = kind(function)
    places = tuple(_place(x, arrays) for x in made.given)
    if -1 not in places:
        if len(_texts) >= MOST:
            _texts.clear()
        text = kind.__new__(kind)
        text.__dict__.update(made.__dict__)
        text.given = tuple(x if place is None else None for x, place in zip(made.given, places))
        _texts[key] = text, places
    return made


def names_of(function: Any, arrays: list[Any]) -> tuple | None:
    """The code of a function and what it names, to compare; None where the text may need more.

    Args:
        arrays: gets those that the function names, whose dtypes and ranks alone are in the result.
    """
    if type(function) is not FunctionType:
        return None
    hosts: list[Any] = []
    names = _signature(function, arrays, hosts, DEPTH)
    return None if _makes_numbers(arrays, hosts) else names


def _place(x: Any, arrays: list[Any]) -> int | None:
    """The index of an array in the list, -1 if it is not there; None for a number."""
    if not is_array(x):
        return None
    return next((i for i, y in enumerate(arrays) if x is y), -1)


def _makes_numbers(arrays: list[Any], hosts: list[Any]) -> bool:
    """Whether these modules may make numbers of these arrays; NumPy makes none of one of CuPy."""
    if not (arrays and hosts):
        return False
    foreign = any(not type(x).__module__.startswith("cupy") for x in arrays)
    return math in hosts or (numpy in hosts and foreign)


def _signature(
    function: FunctionType, arrays: list[Any], hosts: list[Any], depth: int
) -> tuple | None:
    """All that the text of a function follows from, None if that may be more.

    Args:
        arrays: gets those that the function names.
        hosts: gets math and numpy if the function calls them with more than a literal.
    """
    code, names = function.__code__, _names(function.__code__)
    if names is None or function.__kwdefaults__ or not depth:
        return None
    known, parts = function.__globals__, [code]
    values = [known.get(name, BUILTINS.get(name)) for name in names]
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable without a value
        return None
    for i, name in enumerate(names):
        if values[i] is math and _calls_with_literals(code, name):
            values[i] = math.pi  # as any number
    for x in (*values, *(function.__defaults__ or ())):
        part = _part(x, arrays, hosts, depth)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts)


def _part(x: Any, arrays: list[Any], hosts: list[Any], depth: int) -> Any:
    kind = type(x)
    if kind in (int, float, bool):
        return kind, repr(x)  # 0.0 and -0.0 are not the same
    if kind is FunctionType:
        return _signature(x, arrays, hosts, depth - 1)
    if kind is ModuleType:
        library = x.__name__.partition(".")[0]
        hosts += [of for of in (math, numpy) if of.__name__ == library]
        return x if library in LIBRARIES else None
    if kind in (BuiltinFunctionType, numpy.ufunc):
        hosts += [numpy] * (kind is numpy.ufunc) + [math] * (x.__module__ == "math")
        return x if x.__name__ in (*OPERATIONS, *BUILTINS) else None
    if isinstance(x, numpy.generic):
        return kind, repr(x)
    if not is_array(x) or isinstance(x, numpy.ndarray):
        return None  # NumPy makes a number of an element, and of what has no axes
    place = _place(x, arrays)
    arrays.append(x)
    return kind, x.dtype, x.ndim, place, not x.ndim and is_host_number(x)


@functools.lru_cache(maxsize=1024)
def _calls_with_literals(code: CodeType, name: str) -> bool:
    """Whether the functions of a module of this name get one literal each: ``math.log(16)``."""
    found = [x for x in dis.get_instructions(code) if x.opname not in ("PUSH_NULL", "PRECALL")]
    for of, attribute, argument, call in zip(found, found[1:], found[2:], found[3:]):
        literal = argument.opname in LITERALS and "CALL" in call.opname
        if of.argval == name and attribute.argval not in CONSTANTS and not literal:
            return False
    return True


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...] | None:
    """The names that the code looks up in its module, None if it is no plain expression."""
    names = {}
    for x in dis.get_instructions(code):
        if not x.opname.startswith(PLAIN) and any(other in x.opname for other in OTHERS):
            return None
        if x.opname == "LOAD_GLOBAL":
            names[x.argval] = None
        elif x.opname in ATTRIBUTES and x.argval not in (*OPERATIONS, *CONSTANTS):
            return None
    return tuple(names)
