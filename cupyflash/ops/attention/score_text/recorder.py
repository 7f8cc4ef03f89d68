"""`Recorder`: writes down operations on stand-ins, by their names in Python, torch and NumPy."""

import inspect
import math
import numbers
import re
from collections.abc import Callable
from typing import Any

import numpy

from . import tree
from .stand_in import ArrayStandIn, Elements, Fixed, StandIn, dtype_name, is_array, is_host_number
from .tree import Capture, Kind, Node, TextError

NAME = re.compile(r"[A-Za-z](?:_?[A-Za-z0-9])*")  # no two underscores, which C++ reserves
OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
# Other names of the operators and functions.
SAME = {
    "subtract": "sub", "multiply": "mul", "true_divide": "truediv", "divide": "truediv",
    "div": "truediv", "floor_divide": "floordiv", "remainder": "mod",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq",
    "not_equal": "ne", "negative": "neg", "power": "pow", "absolute": "abs",
    "maximum": "max", "minimum": "min", "clip": "clamp",
    "left_shift": "lshift", "right_shift": "rshift", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "bitwise_not": "invert", "invert": "invert",
}  # fmt: skip
EXTREMES = {"min": "&&", "max": "||", "fmin": "&&", "fmax": "||"}  # of conditions
OF_NUMBERS = {"fmax": ">=", "fmin": "<="}
BITWISE = {"and": ("&", "&&"), "or": ("|", "||"), "xor": ("^", "^")}
ONE = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf", "sqrt", "rsqrt", "sin", "cos")
ONE += ("floor", "relu", "abs")
CASTS = {"float": "float", "double": "float", "int": "int", "long": "int", "bool": "bool"}
# The dtypes of a score's numbers, and wider ones, each with its cast.
EXACT = {"float32": "float", "float64": "float", "int32": "int", "int64": "int", "bool": "bool"}


class Recorder:
    """What a function reads while it is traced.

    Args:
        names: of arrays and numbers by their ids.
        literal: whether a Python number stands in the code itself, and not in a variable.
    """

    def __init__(self, names: dict[int, str], literal: Callable[[Any], bool]) -> None:
        self.names, self.literal = names, literal
        self.captures: dict[str, tuple[Capture, Any]] = {}
        self.by_id: dict[int, Capture] = {}

    def capture(self, x: Any) -> Capture:
        """The capture of an array, which has one however often it is read."""
        if id(x) not in self.by_id:
            dtype = str(x.dtype).removeprefix("torch.")
            self.by_id[id(x)] = self.add(self.names.get(id(x), ""), dtype, x.ndim, x)
        return self.by_id[id(x)]

    def number(self, x: int | float) -> Node:
        """A number: one that stands in the code is a part of the text, any other an argument."""
        if (isinstance(x, float) and not math.isfinite(x)) or self.literal(x):
            return tree.literal(x)
        if isinstance(x, int) and not -(2**31) <= x < 2**31:
            return tree.literal(x)
        return tree.read(self.add("n1", type(x).__name__, 0, x), [])

    def host_number(self, x: Any) -> Node:
        """An array without axes in the host's memory: an argument, which each call reads anew."""
        if id(x) not in self.by_id:
            dtype = "float" if "float" in str(x.dtype) else "int"
            self.by_id[id(x)] = self.add(self.names.get(id(x), "n1"), dtype, 0, x)
        node = tree.read(self.by_id[id(x)], [])
        return tree.apply("bool", [node]) if "bool" in str(x.dtype) else node

    def add(self, name: str, dtype: str, rank: int, x: Any) -> Capture:
        base = name.strip("_") if NAME.fullmatch(name.strip("_")) else "c1"
        count = 1
        name = base
        while name in tree.RESERVED or name in self.captures:
            count += 1
            name = f"{base.rstrip('0123456789')}{count}"
        capture = Capture(name, dtype, rank)
        self.captures[name] = (capture, x)
        return capture

    def node(self, x: Any) -> Node:
        """The node of a stand-in, a number or an array without axes."""
        if isinstance(x, StandIn):
            return x.node
        if isinstance(x, Elements):
            return tree.read(x.capture, x.indices)
        if isinstance(x, numpy.generic):
            x = x.item()
        if isinstance(x, bool):
            return tree.literal(x)
        if isinstance(x, Fixed):
            return tree.literal(int(x))
        if isinstance(x, numbers.Integral):
            return self.number(int(x))
        if isinstance(x, numbers.Real):
            return self.number(float(x))
        if isinstance(x, ArrayStandIn):
            x = x.array
        if is_array(x):
            if x.ndim == 0 and is_host_number(x):
                return self.host_number(x)
            return tree.read(self.capture(x), [])
        fact = "a score is made of numbers, stand-ins and elements of arrays"
        raise TextError(TypeError, f"{fact}, got a {type(x).__name__}")

    def index(self, array: Any, indices: Any) -> "Elements | StandIn":
        """An element of an array, or those of the axes that are not indexed yet."""
        capture, before = self.capture(array), ()
        return self.elements(capture, before, indices)

    def elements(
        self, capture: Capture, before: tuple[Node, ...], indices: Any
    ) -> "Elements | StandIn":
        indices = indices if isinstance(indices, tuple) else (indices,)
        for x in indices:
            if isinstance(x, numbers.Integral) and x < 0:
                fact = "an index counts from 0, and a negative one is outside of the array"
                raise TextError(ValueError, f"{fact} {capture.name}, got {x}")
        nodes = (*before, *(self.node(x) for x in indices))
        if len(nodes) < capture.rank:
            return Elements(self, capture, nodes)
        return StandIn(self, tree.read(capture, nodes))

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> "StandIn":
        """The stand-in for the result of an operation, by its name in Python, torch or NumPy."""
        if name.endswith("_") and not name.startswith("_"):
            fact = f"a score changes nothing in place, allowed is {name[:-1]}"
            raise TextError(NotImplementedError, f"{fact}, got {name}")
        name = SAME.get(name.strip("_"), name.strip("_"))
        special = getattr(self, f"call_{name}", None)
        if special is not None:
            try:
                inspect.signature(special).bind(*args, **kwargs)
            except TypeError as error:
                raise TextError(TypeError, f"{name} in a score: {error}") from None
            return StandIn(self, special(*args, **kwargs))
        if kwargs.keys() - {"out"} or kwargs.get("out") is not None:
            raise TextError(TypeError, f"{name} takes no {', '.join(kwargs)} in a score")
        nodes = [self.node(x) for x in args]
        if name in (*OPERATORS, *BITWISE, *OF_NUMBERS) and len(nodes) != 2:
            raise TextError(TypeError, f"{name} takes 2 arguments in a score, got {len(nodes)}")
        if name in OPERATORS:
            if name in ("add", "mul") and all(x.kind == Kind.BOOL for x in nodes):
                name = "or" if name == "add" else "and"  # as torch and NumPy have it
            else:
                return StandIn(self, tree.apply(OPERATORS[name], nodes))
        if name in BITWISE:
            conditions = all(x.kind == Kind.BOOL for x in nodes)
            return StandIn(self, tree.apply(BITWISE[name][conditions], nodes))
        if name.startswith("logical_"):
            op = {"and": "&&", "or": "||", "not": "!", "xor": "!="}[name.removeprefix("logical_")]
            nodes = [tree.apply("bool", [x]) if x.kind != Kind.BOOL else x for x in nodes]
            return StandIn(self, tree.apply(op, nodes))
        if name in EXTREMES and all(x.kind == Kind.BOOL for x in nodes):
            return StandIn(self, tree.apply(EXTREMES[name], nodes))
        if name in OF_NUMBERS:
            return StandIn(self, tree.number_of(OF_NUMBERS[name], *nodes))
        if name in (*CASTS, *ONE, *EXTREMES, "neg"):
            return StandIn(self, tree.apply(CASTS.get(name, name), nodes))
        fact = f"{name} is no function of scores"
        raise TextError(NotImplementedError, f"{fact}, allowed are {', '.join(ONE)} and their kin")

    def call_truediv(self, a: Any, b: Any, rounding_mode: str | None = None) -> Node:
        if rounding_mode == "floor":
            return self.call_floordiv(a, b)
        a, b = self.node(a), self.node(b)
        if rounding_mode == "trunc" and max(a.kind, b.kind) < Kind.FLOAT:
            return tree.apply("/", [a, b])
        if rounding_mode is not None:
            raise TextError(NotImplementedError, "rounding_mode is for integers in a score")
        if max(a.kind, b.kind) < Kind.FLOAT and "literal" not in (a.op, b.op):
            a = tree.apply("float", [a])  # a text divides integers as C++ does
        return tree.apply("/", [tree.as_float(a), b])

    def call_floordiv(self, a: Any, b: Any) -> Node:
        return tree.apply("floor_div", [self.node(a), self.node(b)])

    def call_mod(self, a: Any, b: Any) -> Node:
        return tree.apply("mod", [self.node(a), self.node(b)])

    def call_invert(self, x: Any) -> Node:
        x = self.node(x)
        return tree.apply("!" if x.kind == Kind.BOOL else "~", [x])

    def call_fmod(self, a: Any, b: Any) -> Node:
        return tree.apply("%", [self.node(a), self.node(b)])

    def call_pow(self, x: Any, exponent: Any) -> Node:
        return tree.apply("pow", [self.node(x), self.node(exponent)])

    def call_square(self, x: Any) -> Node:
        x = self.node(x)
        return tree.apply("*", [x, x])

    def call_where(self, condition: Any, x: Any, y: Any) -> Node:
        return tree.apply("where", [self.node(x) for x in (condition, x, y)])

    def call_masked_fill(self, x: Any, mask: Any, value: Any) -> Node:
        return self.call_where(mask, value, x)

    def call_clamp(
        self, x: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None
    ) -> Node:
        x, low, high = self.node(x), a_min if min is None else min, a_max if max is None else max
        if low is not None and high is not None:
            return tree.apply("clamp", [x, self.node(low), self.node(high)])
        if low is not None:
            return tree.apply("max", [x, self.node(low)])
        if high is None:
            raise TextError(TypeError, "clamp takes min, max or both in a score, got neither")
        return tree.apply("min", [x, self.node(high)])

    def call_fabs(self, x: Any) -> Node:
        return tree.apply("abs", [tree.apply("float", [self.node(x)])])

    def call_gelu(self, x: Any, approximate: str = "none") -> Node:
        if approximate not in ("none", "tanh"):
            fact = "approximate of gelu must be 'none' or 'tanh'"
            raise TextError(ValueError, f"{fact}, got {approximate!r}")
        x = self.node(x)
        half = tree.apply("*", [tree.literal(0.5), x])
        if approximate == "tanh":
            cube = tree.apply("pow", [x, tree.literal(3)])
            inner = tree.apply("+", [x, tree.apply("*", [tree.literal(0.044715), cube])])
            inner = tree.apply("*", [tree.literal(math.sqrt(2 / math.pi)), inner])
            part = tree.apply("tanh", [inner])
        else:
            part = tree.apply("erf", [tree.apply("*", [x, tree.literal(math.sqrt(0.5))])])
        return tree.apply("*", [half, tree.apply("+", [tree.literal(1.0), part])])

    def call_relu(self, x: Any, inplace: bool = False) -> Node:
        return tree.apply("relu", [self.node(x)])

    def call_silu(self, x: Any, inplace: bool = False) -> Node:
        return tree.apply("*", [x := self.node(x), tree.apply("sigmoid", [x])])

    def call_reciprocal(self, x: Any) -> Node:
        return tree.apply("/", [tree.literal(1.0), self.node(x)])

    def call_to(self, x: Any, *given: Any, dtype: Any = None, other: Any = None, **_: Any) -> Node:
        """The value as the dtype that is among the arguments, of which others are ignored."""
        names = [dtype_name(y) for y in (*given, dtype, other)]
        return self.cast(x, next((name for name in names if name), None))

    def call_astype(self, x: Any, dtype: Any, *_: Any, **__: Any) -> Node:
        return self.cast(x, dtype_name(dtype))

    def cast(self, x: Any, name: str | None) -> Node:
        """The value as the dtype of this name.

        A score has float32 and integers of 32 bits, in which no number is rounded or wraps as in
        others. So these are of conditions, or of elements that have them.
        """
        x = self.node(x)
        if name is None:
            return x
        same = x.op == "capture" and x.value.dtype == name
        same = same or x.kind == Kind.BOOL or (x.op == "literal" and x.value in (0, 1))
        if not (same or name in EXACT):
            if "int" in name:
                raise TextError(TypeError, f"a score has integers of 32 bits, got {name}")
            fact = "a score is computed in float32, and no part of it is rounded to another "
            fact += f"dtype, allowed are float32 and float64, got {name}"
            raise TextError(NotImplementedError, fact)
        return tree.apply(EXACT.get(name, "int" if "int" in name else "float"), [x])

    call_type, call_type_as = call_to, call_astype

    def call_short(self, x: Any) -> Node:
        return self.call_to(x, "int16")

    def call_half(self, x: Any) -> Node:
        return self.call_to(x, "float16")

    def call_bfloat16(self, x: Any) -> Node:
        return self.call_to(x, "bfloat16")

    def call_new_zeros(self, x: Any, *_: Any, dtype: Any = None, **__: Any) -> Node:
        return self.filled(x, 0, dtype)

    def call_new_ones(self, x: Any, *_: Any, dtype: Any = None, **__: Any) -> Node:
        return self.filled(x, 1, dtype)

    call_zeros_like, call_ones_like = call_new_zeros, call_new_ones

    def call_full_like(self, x: Any, value: Any, dtype: Any = None, **_: Any) -> Node:
        return self.filled(x, value, dtype)

    def filled(self, like: Any, value: Any, dtype: Any) -> Node:
        x = tree.literal(value) if isinstance(value, int | float) else self.node(value)
        kind = self.node(like).kind.name.lower()
        return self.cast(StandIn(self, x), dtype_name(dtype) or dtype_name(kind))
