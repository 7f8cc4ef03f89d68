"""The writers of a tree, as its text and as the C++ of the kernels.

Both are the same expression. C++ has the casts that the text leaves out, and types of literals.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from .capture import PIECES, Capture
from .parse import PRECEDENCE
from .tree import BITWISE, COMPARISONS, Kind, Node

UNARY = {"neg": "-", "!": "!", "~": "~"}
TIGHTEST = max(PRECEDENCE.values()) + 1  # of unary operators


def to_text(tree: Node, captures: Iterable[Capture] = ()) -> str:
    """The text, which `parse` turns into an equal tree.

    Args:
        captures: those beside which it is parsed: no part has the name of one.
    """
    writer = _Writer(tree, cpp=False)
    writer.used |= {x.name for x in captures}
    result = writer.write(tree, 0)
    return " ".join([f"{name} = {text};" for name, text in writer.parts] + [result])


def to_cpp(tree: Node) -> tuple[list[tuple[str, str]], str]:
    """The named parts of the expression, in their order, and the expression itself."""
    writer = _Writer(tree, cpp=True)
    result = writer.write(tree, 0)
    return writer.parts, result


class _Writer:
    def __init__(self, tree: Node, cpp: bool) -> None:
        self.cpp, self.parts, self.names = cpp, [], {}
        self.used = {x.value.name for x in nodes(tree) if x.op == "capture"}
        uses = Counter(id(x) for node in nodes(tree) for x in node.args)
        self.shared = {x for x, count in uses.items() if count > 1}

    def write(self, x: Node, least: int) -> str:
        """The text of a node, in parentheses if it binds less tightly than this level."""
        if id(x) not in self.shared or x.op in ("literal", "name") or not x.args:
            return self.expression(x, least)
        if id(x) not in self.names:
            text = self.expression(x, 0)
            count = len(self.parts) + 1
            while f"t{count}" in self.used:
                count += 1
            self.used.add(f"t{count}")
            self.names[id(x)] = f"t{count}"
            self.parts.append((f"t{count}", text))
        return self.names[id(x)]

    def expression(self, x: Node, least: int) -> str:
        level = PRECEDENCE.get(x.op)
        if self.cpp and x.op == "/" and x.kind == Kind.FLOAT:  # C++'s own has a slow path in a call
            divide = "divide" if x.of_score else "quotient"
            return f"{divide}({self.write(x.args[0], 0)}, {self.write(x.args[1], 0)})"
        if level is not None:
            left, right = (
                self.write(side, self.side_level(x.op, side, level + i))
                for i, side in enumerate(x.args)
            )
            text = f"{left} {x.op} {right}"
            return f"({text})" if level < least else text
        if x.op in UNARY:
            text = self.write(x.args[0], TIGHTEST)
            text = f"{UNARY[x.op]}({text})" if text.startswith("-") else f"{UNARY[x.op]}{text}"
            return f"({text})" if least > TIGHTEST else text
        if x.op == "literal":
            return self.literal(x)
        if x.op == "name":
            return x.value
        if self.cpp and x.op in ("float", "as float"):
            return self.of_distance(*x.args) or f"float({self.write(*x.args, 0)})"
        if x.op == "as float":
            return self.write(*x.args, least)
        name = x.op
        if x.op == "capture":
            name = f"captures.{x.value.name}" if self.cpp else x.value.name
            if not (x.args or self.cpp):
                return name
        return f"{name}({', '.join(self.write(y, 0) for y in x.args)})"

    def of_distance(self, x: Node) -> str | None:
        """The float of an integer that depends on query - key alone, without a conversion.

        Floats have all integers up to 2**24, and these functions give one of their arguments.
        """
        moved = x.op in ("+", "-") and _is_of_piece(x.args[1])
        between = x.args[0] if moved else x
        names = [y.value for y in between.args if y.op == "name"]
        if between.op == "-" and sorted(names) == ["key", "query"]:
            places = f"distance({', '.join(names)}"
            if moved:
                places += f", {'-' * (x.op == '-')}{self.write(x.args[1], TIGHTEST)}"
            return f"{places})"
        if x.op == "literal" and abs(x.value) <= 2**24:
            return f"{float(x.value)!r}f"
        parts = [self.of_distance(y) for y in x.args]
        if x.op not in ("neg", "abs", "min", "max", "clamp") or None in parts:
            return None
        return f"-({parts[0]})" if x.op == "neg" else f"{x.op}({', '.join(parts)})"

    def side_level(self, op: str, side: Node, level: int) -> int:
        """A comparison beside a bitwise operator or another comparison stands in parentheses."""
        mixed = side.op in COMPARISONS and op in (*BITWISE, *COMPARISONS)
        return TIGHTEST if mixed else level

    def literal(self, x: Node) -> str:
        value = x.value
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int):
            wide = self.cpp and not -(2**31) < value < 2**31
            return f"int64_t({value})" if wide else str(value)
        if math.isinf(value):
            return "INF" if value > 0 else "-INF"
        if not self.cpp and value.is_integer() and abs(value) < 2**24:
            return f"{value:.1f}"
        return f"{value!r}f" if self.cpp else repr(value)


def _is_of_piece(x: Node) -> bool:
    """Whether this is a number of `PIECES`, or a difference of two: all pairs have it in common."""
    parts = x.args if x.op == "-" else (x,)
    return all(y.value == PIECES for y in parts)


def nodes(tree: Node, unconditional: bool = False) -> Iterator[Node]:
    """Each node of a tree once; if wanted only those that are computed for every score."""
    seen, waiting = set(), [tree]
    while waiting:
        x = waiting.pop()
        if id(x) not in seen:
            seen.add(id(x))
            yield x
            behind = unconditional and x.op in ("&&", "||", "where")
            waiting += x.args[:1] if behind else x.args
