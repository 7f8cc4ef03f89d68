"""Where a number that depends on the distance of query and key becomes a line of the distance.

Most tiles of keys are far from the diagonal. There ``abs(query - key)`` has one sign, and a clamped
distance is a constant, so that the kernels need not compute a term of the score one by one.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .tree import COMPARISONS, Kind, Node, apply, as_float, literal, name

# Nearer tiles have a slower way, so they must be few, as far as the text alone says.
MOST = 512


class Sum(NamedTuple):
    """An integer: a constant plus integers of the call, each times a factor."""

    constant: int = 0
    numbers: tuple[tuple[str, int], ...] = ()

    def plus(self, other: "Sum", factor: int = 1) -> "Sum":
        numbers = Counter(dict(self.numbers))
        for key, value in other.numbers:
            numbers[key] += factor * value
        left = sorted((key, value) for key, value in numbers.items() if value)
        return Sum(self.constant + factor * other.constant, tuple(left))


class Bound(NamedTuple):
    """The least integer above ``total / divisor``."""

    total: Sum
    divisor: int

    def to_cpp(self) -> str:
        terms = [f"int64_t(captures.{key}()) * {value}" for key, value in self.total.numbers]
        return f"({' + '.join([*terms, str(self.total.constant)])}) / {self.divisor} + 1"


Bounds = frozenset[Bound]  # all of them hold


class Integer(NamedTuple):
    """An integer of which the value is known far away: slope * (query - key) + shift."""

    slope: int
    shift: Sum = Sum()

    def plus(self, other: "Integer", factor: int = 1) -> "Integer":
        return Integer(self.slope + factor * other.slope, self.shift.plus(other.shift, factor))


# Where the result of an operation is this integer, or None for a constant that is not known.
Found = tuple[Bounds, Integer | None]


class Line(NamedTuple):
    """A node on one side of the diagonal, where the distance is within bounds: a line of it.

    The distance is query - key, or key - query on the other side, and not negative.

    Attributes:
        slope: the derivative by query - key, None for 0.
        integer: its value, if that is known.
    """

    bounds: Bounds = frozenset()
    slope: Node | None = None
    integer: Integer | None = None


class Far(NamedTuple):
    """A number that is linear in query - key on one side of the diagonal or on both.

    Attributes:
        behind: the bounds of query - key, where the keys are behind; None if it is no line there.
        ahead: those of key - query.
        slope: the derivative by query - key, None for 0.
    """

    behind: Bounds | None
    ahead: Bounds | None
    slope: Node | None


def far_from_diagonal(x: Node) -> Far | None:
    """Where a number that depends on the distance alone is linear; None if nowhere, or far off."""
    sides = [_Side(sign)(x) for sign in (1, -1)]
    behind, ahead = (None if y is None or _is_distant(y.bounds) else y for y in sides)
    slopes = [y.slope for y in (behind, ahead) if y is not None]
    if not slopes:
        return None
    slope = slopes[0]
    if len(slopes) == 2 and any(slopes):
        both = [x or literal(0.0) for x in slopes]
        slope = apply("where", [apply(">=", [name("query"), name("key")]), *both])
    return Far(behind and behind.bounds, ahead and ahead.bounds, slope)


def _is_distant(bounds: Bounds) -> bool:
    return any(not x.total.numbers and x.total.constant >= MOST * x.divisor for x in bounds)


class _Side:
    """Finds the lines of nodes on one side of the diagonal, where sign * (query - key) is large."""

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.found: dict[int, Line | None] = {}

    def __call__(self, x: Node) -> Line | None:
        if id(x) not in self.found:
            self.found[id(x)] = self.line(x)
        return self.found[id(x)]

    def line(self, x: Node) -> Line | None:
        names = sorted(y.value for y in x.args if y.op == "name")
        if x.op == "-" and names == ["key", "query"]:
            return _line(Integer(1 if x.args[0].value == "query" else -1))
        if x.op == "name" and x.value in ("query", "key"):
            return None
        if x.op == "literal":
            return _line(Integer(0, Sum(int(x.value)))) if _is_whole(x.value) else Line()
        if x.op == "capture" and x.value.is_number and x.kind == Kind.INT:
            return _line(Integer(0, Sum(0, ((x.value.name, 1),))))
        if x.op == "where":
            return self.where(*x.args)
        parts = [self(y) for y in x.args]
        if not parts:  # a number, or the only element of an array
            return Line()
        if None in parts:
            return None
        bounds = frozenset().union(*(y.bounds for y in parts))
        integers = [y.integer for y in parts]
        found = None if None in integers else self.of_integers(x.op, integers)
        if found is not None:
            bounds |= found[0]
            return Line(bounds) if found[1] is None else _line(found[1], bounds)
        if all(y.slope is None for y in parts):
            return Line(bounds)
        slope = _slope(x, [y.slope for y in parts])
        return None if slope is None else Line(bounds, slope)

    def where(self, condition: Node, first: Node, second: Node) -> Line | None:
        """One of two numbers where the condition is the same far away, else two constants."""
        chosen = self(condition)
        if chosen is None:
            return None
        if chosen.integer is not None and not chosen.integer.shift.numbers:
            line = self(first if chosen.integer.shift.constant else second)
            return line and line._replace(bounds=line.bounds | chosen.bounds)
        parts = [self(first), self(second)]
        if None in parts or any(y.slope for y in parts):
            return None
        return Line(chosen.bounds.union(*(y.bounds for y in parts)))

    def of_integers(self, op: str, args: Sequence[Integer]) -> Found | None:
        """The result of an operation on integers, and where it is that."""
        first, *others = args
        if op in ("as float", "float"):
            return frozenset(), first
        if op in ("+", "-"):
            return frozenset(), first.plus(*others, 1 if op == "+" else -1)
        if op == "neg":
            return frozenset(), Integer(0).plus(first, -1)
        if op == "*":
            return _product(first, *others)
        if op in COMPARISONS:
            return self.compared(op, first, *others)
        if op == "clamp":
            low, high = others
            raised = self.one_of(first, low, larger=True)
            found = raised and self.one_of(raised[1], high, larger=False)
            return found and (raised[0] | found[0], found[1])
        if op == "abs":
            return self.one_of(first, Integer(0).plus(first, -1), larger=True)
        if op == "relu":
            return self.one_of(first, Integer(0), larger=True)
        if op in ("min", "max"):
            return self.one_of(first, *others, larger=op == "max")
        return None

    def order(self, a: Integer, b: Integer) -> tuple[Bounds, int] | None:
        """The sign of a - b far away, and from where on; None if the call's numbers decide."""
        slope, shift = (a.slope - b.slope) * self.sign, a.shift.plus(b.shift, -1)
        if slope:
            up = 1 if slope > 0 else -1
            return frozenset([Bound(Sum().plus(shift, -up), abs(slope))]), up
        if shift.numbers:
            return None
        return frozenset(), (shift.constant > 0) - (shift.constant < 0)

    def one_of(self, a: Integer | None, b: Integer, larger: bool) -> Found | None:
        constant = not (b.slope or (a and a.slope))
        found = a and self.order(a, b)
        if found is None:
            return (frozenset(), None) if constant else None
        return found[0], a if (found[1] > 0) == larger else b

    def compared(self, op: str, a: Integer, b: Integer) -> Found:
        found = self.order(a, b)
        if found is None:
            return frozenset(), None
        signs = {"==": (0,), "!=": (-1, 1), "<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}
        return found[0], Integer(0, Sum(int(found[1] in signs[op])))


def _is_whole(x: float) -> bool:
    return abs(x) < 2**24 and x == int(x)  # all of which floats have


def _line(integer: Integer, bounds: Bounds = frozenset()) -> Line:
    return Line(bounds, literal(float(integer.slope)) if integer.slope else None, integer)


def _product(a: Integer, b: Integer) -> Found | None:
    """The product of two integers, if one of them is a literal."""
    for x, y in ((a, b), (b, a)):
        if not (y.slope or y.shift.numbers):
            return frozenset(), Integer(0).plus(x, y.shift.constant)
    return None


def _slope(x: Node, slopes: Sequence[Node | None]) -> Node | None:
    """The derivative of an operation of floats by the distance, or None if it is no line."""
    if x.op in ("as float", "float"):
        return slopes[0]
    if x.op == "neg":
        return apply("neg", slopes)
    if x.op in ("+", "-"):
        zero = literal(0.0)
        return apply(x.op, [y or zero for y in slopes])
    if x.op == "*" and None in slopes:
        return apply("*", [slope or as_float(y) for slope, y in zip(slopes, x.args)])
    if x.op == "/" and x.kind == Kind.FLOAT and slopes[1] is None:
        return apply("/", [slopes[0], x.args[1]])
    return None
