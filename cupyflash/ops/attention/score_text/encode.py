"""A text as one string, as a torch operator takes it."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from . import tree
from .change import changed
from .text import Text
from .tree import Capture, Node
from .write import to_text

WORD = re.compile(r"\w+")
SEPARATOR = "\n"  # between a score and a mask that are encoded apart; JSON has none


@functools.lru_cache(maxsize=1024)
def encode_text(text: Text) -> str:
    return json.dumps(text)


@functools.lru_cache(maxsize=1024)
def decode_text(string: str) -> Text:
    """The text, of both parts if the string is of a score and a mask."""
    score, *mask = map(_part, string.split(SEPARATOR))
    return joined(score, mask[0])[0] if mask else score


def _part(string: str) -> Text:
    score, mask, captures, *drops = json.loads(string)  # older ones, in kept graphs, have none
    return Text(score, mask, tuple(Capture(*x) for x in captures), *drops)


def joined(score: Text, mask: Text, shared: Sequence[str] = ()) -> tuple[Text, list[bool]]:
    """Both texts as one, and for each capture of the mask whether it is a capture of its own.

    Args:
        shared: names of captures of the mask that are those of the same name of the score.
    """
    taken, names = {x.name for x in score.captures}, {}
    captures, own = list(score.captures), []
    for capture in mask.captures:
        own.append(capture.name not in shared)
        if not own[-1]:
            continue
        name, count = capture.name, 1
        while name in taken:
            count += 1
            name = f"{capture.name.rstrip('0123456789')}{count}"
        taken.add(name)
        if name != capture.name:
            names[capture.name] = name
        captures.append(capture._replace(name=name))

    def rename(x: Node) -> Node:
        value = x.value
        if x.op == "capture":
            value = value._replace(name=names.get(value.name, value.name))
        return Node(x.op, x.kind, x.args, value)

    texts = [score.score, mask.mask]
    if _names_a_part(score, captures):
        texts[0] = to_text(score.score_tree, captures)
    if names or _names_a_part(mask, captures):
        texts[1] = to_text(changed(mask.mask_tree, rename), captures)
    return Text(*texts, tuple(captures)), own


def _names_a_part(text: Text, captures: Sequence[Capture]) -> bool:
    """Whether one of these captures has the name of a part of a text that does not read it."""
    others = {x.name for x in captures} - {x.name for x in text.captures}
    return not others.isdisjoint(WORD.findall(text.score + text.mask))


def values_of(text: Text, tensors: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
    """The captures of a text in its order."""
    arrays, plain = iter(tensors), iter(numbers)
    return [
        (int if x.dtype == "int" else float)(next(plain)) if x.is_number else next(arrays)
        for x in text.captures
    ]


def folded(string: str, numbers: Sequence[float], batch: int) -> tuple[str, list[float]]:
    """A text for a batch into which several of this size are folded, and its numbers."""
    text = decode_text(string)
    name = "batches"
    while name in {x.name for x in text.captures}:
        name += "1"
    capture = Capture(name, "int", 0)

    def of_one(x: Node) -> Node:
        if x.op == "name" and x.value == "batch":
            return tree.apply("mod", [tree.name("batch"), tree.read(capture, [])])
        return x

    parts = [
        to_text(changed(x, of_one), text.captures) if x is not None else ""
        for x in (text.score_tree, text.mask_tree)
    ]
    if name not in "".join(parts):
        return string, list(numbers)
    text = text._replace(score=parts[0], mask=parts[1], captures=(*text.captures, capture))
    return encode_text(text), [*numbers, float(batch)]
