"""The tanh of a text, which the kernels of Hopper compute for four scores at a time."""

from .change import changed
from .tree import Kind, Node
from .write import nodes

KEEP_NAN = ("+", "-", "*", "/", "neg")


def taken_out(tree: Node) -> tuple[Node, Node] | None:
    """The argument of the only tanh of the score, and the tree with the name ``bounded`` for it.

    None where there is another number of them, or where the score might not be NaN although the
    tanh is: the kernels may let a NaN spread, and find it in the scores.
    """
    found = [x for x in nodes(tree) if _is_wanted(x)]
    if len(found) != 1 or not _keeps_nan(tree):
        return None
    bounded = Node("name", Kind.FLOAT, value="bounded")
    bounded.of_score = True
    return found[0].args[0], changed(tree, lambda x: bounded if _is_wanted(x) else x)


def _is_wanted(x: Node) -> bool:
    return x.op == "tanh" and x.of_score


def _keeps_nan(tree: Node) -> bool:
    """Whether what lies between the root and each tanh is NaN where the tanh is, or ignores it."""
    if _is_wanted(tree):
        return True
    parts = [x for x in tree.args if any(_is_wanted(y) for y in nodes(x))]
    if tree.op == "where":
        return tree.args[0] not in parts and all(map(_keeps_nan, parts))
    return not parts or (tree.op in KEEP_NAN and all(map(_keeps_nan, parts)))
