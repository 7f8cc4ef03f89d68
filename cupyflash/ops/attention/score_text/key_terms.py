"""Texts with a term of the key, which the forward of Hopper adds in the product of Q and K."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .tree import Kind, Node, apply, as_float, literal


class KeyTerms(NamedTuple):
    """A text of the form ``score * factor(query) + shift(query) + term(key)``."""

    factor: Node
    shift: Node
    term: Node


def key_terms(tree: Node, depends: Callable[[Node], frozenset[str]]) -> KeyTerms | None:
    """The text in that form, or None if it has another one.

    Args:
        tree: of the text.
        depends: of a node, on which of "distance", "query" and "key" it depends.
    """
    factor = None
    sums: dict[str, Node | None] = {"query": None, "key": None}
    for op, x in _terms(tree, "+"):
        of = depends(x)
        if x.of_score:
            factor = _factor(x, depends) if op == "+" and factor is None else None
            if factor is None:
                return None
        elif of <= {"query"} or of == {"key"}:
            name = "key" if of == {"key"} else "query"
            sums[name] = _plus(sums[name], op, as_float(x))
        else:
            return None
    if factor is None or sums["key"] is None:
        return None
    return KeyTerms(factor, sums["query"] or literal(0.0), sums["key"])


def _terms(x: Node, op: str) -> Iterator[tuple[str, Node]]:
    """The terms of a sum of floats, each with "+" or "-"."""
    other = {"+": "-", "-": "+"}[op]
    if x.kind == Kind.FLOAT and x.op in ("+", "-"):
        yield from _terms(x.args[0], op)
        yield from _terms(x.args[1], op if x.op == "+" else other)
    elif x.op == "neg":
        yield from _terms(x.args[0], other)
    else:
        yield op, x


def _plus(total: Node | None, op: str, x: Node) -> Node:
    if total is None:
        return x if op == "+" else apply("neg", [x])
    return apply(op, [total, x])


def _factor(x: Node, depends: Callable[[Node], frozenset[str]]) -> Node | None:
    """What a product multiplies the score by, if that depends on the query at most."""
    if x.op == "name":
        return literal(1.0)
    if x.op not in ("*", "/"):
        return None
    first, second = x.args if x.args[0].of_score else reversed(x.args)
    if second.of_score or not depends(second) <= {"query"} or (x.op == "/" and first is x.args[1]):
        return None
    factor = _factor(first, depends)
    return factor and apply(x.op, [factor, as_float(second)])
