"""Parts of a text without the score that many scores of a tile have in common.

The kernels of Hopper compute them once for a tile (``text/parts.cuh``).
"""

from typing import NamedTuple

from .change import changed
from .functions import FUNCTIONS
from .tree import Kind, Node, only_adds
from .write import nodes

# A part depends on one of these, and perhaps on the head. The forward reads a part of the key as
# fast from global memory, where most of its lanes have keys of their own.
VARIABLES = {"fwd": ("distance", "query"), "bwd": ("distance", "query", "key")}
CHEAP = ("abs", "min", "max", "clamp", "relu")  # these take no longer than a load
# Only a part with one of these can have one value at all distances that are far from the diagonal.
CONSTANT_SOMEWHERE = ("min", "max", "clamp", "relu", "where", "capture")


class Parts(NamedTuple):
    """A text in parts.

    Attributes:
        by_variable: for a name of `VARIABLES` the part that depends on it alone, if there is one.
        rest: the tree with ``parts.distance`` and so on in their place.
        shifts: the rest is the score plus the part of the distance, and what a head has.
        is_linear: the derivative of the rest by the score does not depend on the score.
    """

    by_variable: dict[str, Node]
    rest: Node
    shifts: bool
    is_linear: bool


def taken_out(tree: Node, pass_: str) -> Parts | None:
    """The parts of the text of a score, or None if there are none worth it.

    Only what is computed for every score counts: a condition may keep a text from reading what lies
    outside of an array. Of several parts of one variable the longest one is taken.
    """
    depends = _Depends()
    found: dict[str, Node] = {}
    for x in _candidates(tree, depends):
        (variable,) = depends(x)
        if variable not in VARIABLES[pass_]:
            continue
        if variable not in found or _size(x) > _size(found[variable]):
            found[variable] = x
    if not found:
        return None
    names = {}
    for variable, x in found.items():
        names[id(x)] = Node("name", Kind.FLOAT, value=f"parts.{variable}")
    rest = changed(tree, others=names)
    shifts = list(found) == ["distance"] and only_adds(tree) and not depends(rest)
    shifts = shifts and _may_be_constant(found["distance"], depends)
    return Parts(found, rest, shifts, _is_linear(rest))


class _Depends:
    """Finds the variables of `VARIABLES` on which a node depends, and remembers them."""

    def __init__(self) -> None:
        self.found: dict[int, frozenset[str]] = {}

    def __call__(self, x: Node) -> frozenset[str]:
        if id(x) not in self.found:
            names = sorted(y.value for y in x.args if y.op == "name")
            if x.op == "-" and names == ["key", "query"]:
                of = frozenset(["distance"])
            elif x.op == "name":
                of = frozenset([x.value]) & {"query", "key"}
            else:
                of = frozenset().union(*map(self, x.args))
            self.found[id(x)] = of
        return self.found[id(x)]


def _candidates(tree: Node, depends: _Depends) -> list[Node]:
    """The outermost nodes that may be parts."""
    found, seen, waiting = [], set(), [tree]
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        may_be = x.kind == Kind.FLOAT and not x.of_score and len(depends(x)) == 1
        if may_be and _is_worth(x, depends):
            found.append(x)
        else:
            waiting += x.args[:1] if x.op in ("&&", "||", "where") else x.args
    return found


def _is_worth(tree: Node, depends: _Depends) -> bool:
    """Whether a part takes longer than reading its result: it reads an array, or has a function."""
    return any(
        depends(x) and (x.op == "capture" or (x.op in FUNCTIONS and x.op not in CHEAP))
        for x in nodes(tree)
    )


def _may_be_constant(part: Node, depends: _Depends) -> bool:
    """Whether all distances of a tile that is far from the diagonal may have the same part."""
    return any(depends(x) and x.op in CONSTANT_SOMEWHERE for x in nodes(part))


def _is_linear(x: Node) -> bool:
    """Whether a tree is a multiple of the score plus a term, neither of which depends on it."""
    if not x.of_score or x.op == "name":
        return True
    if x.op == "where":
        return not x.args[0].of_score and all(map(_is_linear, x.args[1:]))
    if x.op == "*":
        return sum(y.of_score for y in x.args) == 1 and all(map(_is_linear, x.args))
    if x.op == "/":
        return not x.args[1].of_score and _is_linear(x.args[0])
    return x.op in ("+", "-", "neg") and all(map(_is_linear, x.args))


def _size(tree: Node) -> int:
    return sum(1 for _ in nodes(tree))
