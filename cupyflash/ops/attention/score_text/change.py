"""A copy of a tree in which some nodes are others."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .tree import Node


def changed(
    tree: Node,
    change: Callable[[Node], Node] = lambda x: x,
    others: Mapping[int, Node] = MappingProxyType({}),
) -> Node:
    """The tree with each node, whose arguments have been changed before, as the function has it.

    Args:
        others: nodes that take the place of those with these ids.
    """
    copies = dict(others)

    def copy(x: Node) -> Node:
        if id(x) not in copies:
            copies[id(x)] = change(Node(x.op, x.kind, [copy(y) for y in x.args], x.value))
        return copies[id(x)]

    return copy(tree)
