"""What a text says: a tree whose nodes have a kind, as the expressions of C++ have a type.

Integers become floats where they meet one, which C++ does in the same way; ``/`` and ``%`` of
integers are those of C++. A node that is used twice is one object, so the tree is a graph.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

from .capture import Capture, Kind
from .functions import FUNCTIONS

Place = tuple[int, int] | None  # begin and end in the text


class TextError(Exception):
    """A text that means nothing. What knows the whole text makes a message of it.

    Args:
        kind: `ValueError` or `TypeError`, which the caller gets.
        fact: what is wrong, and what is allowed.
    """

    def __init__(self, kind: type[Exception], fact: str, place: Place = None) -> None:
        super().__init__(fact)
        self.kind, self.fact, self.place = kind, fact, place

    def within(self, text: str) -> str:
        """The line of the text that has the place, and carets below it."""
        begin, end = self.place or (0, len(text))
        start = text.rfind("\n", 0, begin) + 1
        stop = text.find("\n", begin)
        line = text[start:] if stop < 0 else text[start:stop]
        width = max(1, min(end, start + len(line)) - begin)
        return f"  {line}\n  {' ' * (begin - start)}{'^' * width}"


class Node:
    """One operation.

    Attributes:
        op: an operator of C++ ("neg" is the unary minus), a function of `FUNCTIONS`, "where", a
            cast ("int", "float", "bool", and "as float", which no text shows), "literal", "name" or
            "capture".
        value: of a literal its number, of a name itself, of a capture its `Capture`.
        of_score: it depends on the score.
        reads: it depends on a capture.
    """

    __slots__ = ("op", "kind", "args", "value", "place", "of_score", "reads")

    def __init__(
        self,
        op: str,
        kind: Kind,
        args: Sequence["Node"] = (),
        value: Any = None,
        place: Place = None,
    ) -> None:
        self.op, self.kind, self.args, self.value, self.place = op, kind, tuple(args), value, place
        self.of_score = value == "score" if op == "name" else any(x.of_score for x in args)
        self.reads = op == "capture" or any(x.reads for x in args)


NAMES = {"score": Kind.FLOAT} | dict.fromkeys(("batch", "head", "query", "key"), Kind.INT)
CASTS = {"int": Kind.INT, "float": Kind.FLOAT, "bool": Kind.BOOL}
CONSTANTS = {"INF": math.inf, "PI": math.pi, "true": True, "false": False}
FLOAT32_END = 2.0**128 - 2.0**103  # from here on, numbers round to infinity
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
BITWISE = ("&", "|", "^")
# The words of C++, and what the generated code uses: no capture and no part has such a name.
WORDS = """
    alignas alignof and asm auto bitand bitor break case catch char class const constexpr continue
    decltype default delete divide do double else enum explicit export extern for friend goto if
    inline long mutable namespace new noexcept not nullptr operator or private protected public
    quotient register return short signed sizeof static struct switch template this throw try
    typedef typeid typename union unsigned using virtual void volatile wchar_t while xor N
"""
RESERVED = {*NAMES, *CASTS, *CONSTANTS, *FUNCTIONS, "where", "captures", *WORDS.split()}


def literal(value: bool | int | float, place: Place = None) -> Node:
    kind = {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT}[type(value)]
    if kind == Kind.INT and not -(2**63) <= value < 2**63:
        raise TextError(ValueError, "integers must fit 64 bits", place)
    if kind == Kind.FLOAT and math.isnan(value):
        raise TextError(ValueError, "a score cannot be NaN", place)
    value = in_float32(value) if kind == Kind.FLOAT else value
    return Node("literal", kind, value=value, place=place)


def in_float32(x: float) -> float:
    """x, or infinity where a float32 is infinite."""
    return math.copysign(math.inf, x) if abs(x) >= FLOAT32_END else x


def name(value: str, place: Place = None) -> Node:
    return Node("name", NAMES[value], value=value, place=place)


def read(capture: Capture, indices: Sequence[Node], place: Place = None) -> Node:
    """An element of a capture.

    Raises:
        TextError: another number of indices than its rank, or an index that is no integer.
    """
    if len(indices) != capture.rank:
        fact = f"{capture.name} has {capture.rank} axes and needs as many indices"
        raise TextError(ValueError, f"{fact}, got {len(indices)}", place)
    for index in indices:
        if index.kind != Kind.INT:
            fact = f"an index of {capture.name} must be an integer, as int(x) makes one"
            raise TextError(TypeError, f"{fact}, got a {index.kind.name.lower()}", index.place)
    return Node("capture", capture.kind, indices, capture, place)


def as_float(x: Node) -> Node:
    """x where a float is needed."""
    if x.kind == Kind.FLOAT:
        return x
    if x.op == "literal":
        return Node("literal", Kind.FLOAT, value=float(x.value), place=x.place)
    return Node("as float", Kind.FLOAT, (x,), place=x.place)


def apply(op: str, args: Sequence[Node], place: Place = None) -> Node:
    """The node of an operator, a function or a cast.

    Raises:
        TextError: arguments that it does not take.
    """
    if op in CASTS:
        return _cast(op, args, place)
    if op == "where":
        return _where(args, place)
    if op in FUNCTIONS:
        return _call(op, args, place)
    kinds = [x.kind for x in args]
    most = max(kinds)
    if op in COMPARISONS:
        args = [as_float(x) for x in args] if most == Kind.FLOAT else args
        return Node(op, Kind.BOOL, args, place=place)
    if op in ("&&", "||", "!"):
        _refuse_floats(op, args, "conditions (a comparison, say)")
        return Node(op, Kind.BOOL, args, place=place)
    if op in BITWISE:
        _refuse_floats(op, args, "integers or conditions")
        return Node(op, most, args, place=place)
    if op in ("<<", ">>", "%", "~"):
        hint = {"%": "integers (mod(a, b) takes floats)", "~": "integers"}.get(op, "integers")
        _refuse_floats(op, args, hint)
        if op == "~" and most == Kind.BOOL:
            raise TextError(TypeError, "~ takes integers, and ! a condition", place)
        return Node(op, Kind.INT, args, place=place)
    if most == Kind.FLOAT:
        args = [as_float(x) for x in args]
        if op == "neg" and args[0].op == "literal":
            return Node("literal", Kind.FLOAT, value=-args[0].value, place=place)
    elif op == "neg" and args[0].op == "literal":
        return literal(-int(args[0].value), place)
    return Node(op, max(Kind.INT, most), args, place=place)


def _refuse_floats(op: str, args: Sequence[Node], allowed: str) -> None:
    for x in args:
        if x.kind == Kind.FLOAT:
            raise TextError(TypeError, f"{op} takes {allowed}, got a float", x.place)


def _cast(op: str, args: Sequence[Node], place: Place) -> Node:
    (x,) = _arguments(op, 1, args, place)
    kind = CASTS[op]
    if x.kind == kind:
        return x
    if x.op == "literal" and not math.isinf(x.value):
        return literal({"int": int, "float": float, "bool": bool}[op](x.value), place)
    if x.of_score and x.kind == Kind.FLOAT:
        fact = f"{op}() of what depends on the score has no derivative, allowed are floor and where"
        raise TextError(TypeError, fact, place)
    return Node(op, kind, (x,), place=place)


def _where(args: Sequence[Node], place: Place) -> Node:
    condition, *branches = _arguments("where", 3, args, place)
    _refuse_floats("where", (condition,), "a condition first")
    kind = max(x.kind for x in branches)
    branches = [as_float(x) for x in branches] if kind == Kind.FLOAT else branches
    return Node("where", kind, (condition, *branches), place=place)


def _call(op: str, args: Sequence[Node], place: Place) -> Node:
    function = FUNCTIONS[op]
    args = _arguments(op, function.arity, args, place)
    kind = Kind.FLOAT
    if function.keeps_integers:
        kind = max(Kind.INT, *(x.kind for x in args))
    if kind == Kind.INT:
        return Node(op, kind, args, place=place)
    if op == "pow" and args[1].op == "literal" and args[1].kind == Kind.INT:
        return Node(op, kind, (as_float(args[0]), args[1]), place=place)  # products, not logarithms
    args = [as_float(x) for x in args]
    if op == "floor_div":
        return apply("floor", [apply("/", args, place)], place)
    if op == "mod":
        whole = apply("*", [apply("floor_div", args, place), args[1]], place)
        return apply("-", [args[0], whole], place)
    return Node(op, kind, args, place=place)


def _arguments(op: str, arity: int, args: Sequence[Node], place: Place) -> Sequence[Node]:
    if len(args) != arity:
        fact = f"{op} takes {arity} argument{'s' * (arity > 1)}, got {len(args)}"
        raise TextError(ValueError, fact, place)
    return args


@functools.cache
def allowed_names(mask: bool) -> str:
    """The names that every text has, in words."""
    return ", ".join(x for x in NAMES if not (mask and x == "score"))


def number_of(comparison: str, a: Node, b: Node) -> Node:
    """The one of two for which the comparison holds; unlike max and min it ignores a NaN."""
    first = [apply(comparison, [a, b]), apply("!=", [b, b])]
    return apply("where", [apply("||", first), a, b])


def added_terms(score: Node) -> list[tuple[str, Node]] | None:
    """The terms that a tree adds to the score ("+") or takes away ("-"); None if it does more."""
    terms = []
    while score.op in ("+", "-"):
        first, second = score.args
        if score.op == "+" and second.of_score:
            first, second = second, first
        if second.of_score:
            return None
        terms.append((score.op, second))
        score = first
    return terms if score.op == "name" and score.value == "score" else None


def only_adds(score: Node) -> bool:
    """Whether a tree is the score plus terms without it."""
    return added_terms(score) is not None
