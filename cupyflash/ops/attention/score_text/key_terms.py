"""Texts with a term of the key, which the forward of Hopper adds in the product of Q and K."""

from collections.abc import Callable
from typing import NamedTuple

from .tree import Kind, Node, apply, as_float, literal

MOST_TERMS = 32


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
    for op, x in _terms(tree) or ():
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


def _terms(tree: Node) -> list[tuple[str, Node]] | None:
    """The terms of a sum of floats, each with "+" or "-"; None if they are many."""
    other = {"+": "-", "-": "+"}
    found: list[tuple[str, Node]] = []
    waiting = [("+", tree)]
    while waiting:
        op, x = waiting.pop()
        if x.kind == Kind.FLOAT and x.op in other:
            first, second = x.args
            waiting += [(op if x.op == "+" else other[op], second), (op, first)]
        elif x.op == "neg":
            waiting.append((other[op], x.args[0]))
        elif len(found) == MOST_TERMS:  # a sum that is used twice has its terms twice
            return None
        else:
            found.append((op, x))
    return found


def _plus(total: Node | None, op: str, x: Node) -> Node:
    if total is None:
        return x if op == "+" else apply("neg", [x])
    return apply(op, [total, x])


def _factor(x: Node, depends: Callable[[Node], frozenset[str]]) -> Node | None:
    """The factor of the score in a product; None if the factor depends on more than the query."""
    if x.op == "name":
        return literal(1.0)
    if x.op not in ("*", "/"):
        return None
    first, second = x.args if x.args[0].of_score else reversed(x.args)
    if second.of_score or not depends(second) <= {"query"} or (x.op == "/" and first is x.args[1]):
        return None
    factor = _factor(first, depends)
    return factor and apply(x.op, [factor, as_float(second)])
