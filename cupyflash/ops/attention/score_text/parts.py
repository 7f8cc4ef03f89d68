"""Parts of a text without the score that many scores of a tile have in common.

The kernels of Hopper compute them once for a tile (``text/parts.cuh``).
"""

from collections.abc import Mapping
from typing import NamedTuple

from .change import changed
from .far import Far, far_from_diagonal
from .functions import FUNCTIONS
from .key_terms import KeyTerms, key_terms
from .tree import Kind, Node, added_terms, apply, as_float, only_adds
from .write import nodes

# A part depends on one of these, and perhaps on the head.
VARIABLES = ("distance", "query", "key")
CHEAP = ("abs", "min", "max", "clamp", "relu")  # these take no longer than a load
# Only a part with one of these can have one value at all distances that are far from the diagonal.
CONSTANT_SOMEWHERE = ("min", "max", "clamp", "relu", "where", "capture")


class Parts(NamedTuple):
    """A text in parts.

    Attributes:
        by_variable: for a name of `VARIABLES` the part that depends on it alone, if there is one.
        rest: the tree with ``parts.distance`` and so on in their place.
        shifts: the rest is the score plus the part of the distance, and what a head has. Perhaps
            all distances of a tile have one part.
        is_linear: the derivative of the rest by the score does not depend on the score.
        far: where such a part is linear. Its slope is that of the rest.
        is_cheap: the part takes no longer than reading it.
        key_terms: the text in the form that lets the forward add the part of the key in a product.
    """

    by_variable: dict[str, Node]
    rest: Node
    shifts: bool
    is_linear: bool
    far: Far | None = None
    is_cheap: bool = False
    key_terms: KeyTerms | None = None


def taken_out(tree: Node, pass_: str) -> Parts | None:
    """The parts of the text of a score, or None if there are none worth it.

    Only what is computed for every score counts: a condition may keep a text from reading what lies
    outside of an array. Of several parts of one variable the longest one is taken.
    """
    depends = _Depends()
    line = _linear(tree, depends)
    if line and (pass_ == "fwd" or not (line.far.slope or line.is_cheap)):
        return line
    found: dict[str, Node] = {}
    for x in _candidates(tree, depends):
        (variable,) = depends(x)
        if variable not in found or _size(x) > _size(found[variable]):
            found[variable] = x
    if not found:
        return None
    rest = _rest(tree, found)
    shifts = list(found) == ["distance"] and only_adds(tree) and not depends(rest)
    shifts = shifts and _may_be_constant(found["distance"], depends)
    terms = key_terms(tree, depends) if pass_ == "fwd" and "key" in found else None
    return Parts(found, rest, shifts, _is_linear(rest), key_terms=terms)


def _linear(tree: Node, depends: "_Depends") -> Parts | None:
    """A score plus one number of the distance that is linear far from the diagonal."""
    terms = [(op, term) for op, term in added_terms(tree) or () if depends(term)]
    if len(terms) != 1 or depends(terms[0][1]) != {"distance"}:
        return None
    ((op, term),) = terms
    far = far_from_diagonal(term)
    if far is None:
        return None
    if op == "-" and far.slope is not None:
        far = far._replace(slope=apply("neg", [far.slope]))
    part = as_float(term)
    parts = {"distance": part}
    return Parts(
        parts, _rest(tree, {"distance": term}), True, True, far, not _is_worth(part, depends)
    )


def _rest(tree: Node, parts: Mapping[str, Node]) -> Node:
    """The tree with names in the place of the parts of these variables."""
    names = {id(x): Node("name", Kind.FLOAT, value=f"parts.{y}") for y, x in parts.items()}
    return changed(tree, others=names)


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
