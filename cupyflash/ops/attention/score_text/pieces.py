"""The text of a call that computes pieces of longer sequences, or some heads of more.

Where several GPUs divide tokens and heads, a call counts its sequences, heads, queries and keys
from 0. Its text adds where they begin, which it reads behind its own captures.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import tree
from .capture import FIRST_HEAD, HEADS, KEY, PIECES, QUERY, SEQUENCE
from .change import changed
from .text import Text
from .tree import Node
from .write import to_text


@functools.lru_cache(maxsize=256)
def of_pieces(text: Text, names: frozenset[str]) -> Text:
    """The text with other numbers in the place of some variables.

    Args:
        names: "batch", where a call has other sequences, "head", where it has some heads, "query"
            and "key", where those of a sequence do not begin at 0.
    """
    parts = [
        "" if x is None else to_text(changed(x, _Moved(names)), text.captures)
        for x in (text.score_tree, text.mask_tree)
    ]
    added = [
        x
        for x in (PIECES, FIRST_HEAD, HEADS)
        if text.drops or any(x.name in part for part in parts)
    ]
    if not added:
        return text
    return text._replace(score=parts[0], mask=parts[1], captures=(*text.captures, *added))


def values_of_pieces(
    text: Text, captures: Sequence[Any], pieces: Any, first_head: int, heads: int
) -> tuple:
    """What a text of `of_pieces` reads, in its order.

    Args:
        captures: those of the text that it was made of.
        pieces: int32 (3, sequences) in the library of the captures: for each sequence of the call
            its first query, its first key, and its number.
        first_head, heads: the number of the first head of the call, and how many there are in all.
    """
    added = {PIECES.name: pieces, FIRST_HEAD.name: first_head, HEADS.name: heads}
    return (*captures, *(added[x.name] for x in text.captures[len(captures) :]))


class _Moved:
    """The change of one tree."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.parts: dict[
            int, tuple[Node, Node]
        ] = {}  # of each sum: the variable, and what is added
        self.moves: dict[str, Callable[[Node], Node]] = {
            "batch": lambda _: _piece(SEQUENCE),
            "head": lambda x: tree.apply("+", [x, tree.read(FIRST_HEAD, [])]),
            "query": lambda x: self.add(x, _piece(QUERY)),
            "key": lambda x: self.add(x, _piece(KEY)),
        }

    def __call__(self, x: Node) -> Node:
        if x.op == "name" and x.value in self.names:
            return self.moves[x.value](x)
        return self.difference(x) if x.op == "-" else x

    def add(self, x: Node, first: Node) -> Node:
        found = tree.apply("+", [x, first])
        self.parts[id(found)] = x, first
        return found

    def difference(self, x: Node) -> Node:
        """A difference; that of query and key as their distance within the call, and what is added.

        The kernels have a shorter way to that (`write.of_distance`).
        """
        (a, first_a), (b, first_b) = (self.parts.get(id(y), (y, None)) for y in x.args)
        moved = first_a is not None or first_b is not None
        if not moved or {y.value for y in (a, b) if y.op == "name"} != {"query", "key"}:
            return x
        found = tree.apply("-", [a, b])
        if first_a is None or first_b is None:
            op, first = ("-", first_b) if first_a is None else ("+", first_a)
        else:
            op, first = "+", tree.apply("-", [first_a, first_b])
        return tree.apply(op, [found, first])


def _piece(row: int) -> Node:
    return tree.read(PIECES, [tree.literal(row), tree.name("batch")])
