"""From the arguments ``score`` and ``mask`` to the options and arrays of a call."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....runtime.array import Array
from .scores import Mask, Score, written
from .text import Text
from .tree import Kind
from .write import nodes

NUM_EXTRAS = 9  # fields of `Extras`, which stand before the captures


class ScoreGradients(NamedTuple):
    """Results of a backward pass with ``score_grad``, None of what is not asked for.

    Attributes:
        dcaptures: gradients of what the score reads, by the names of its text.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None
    dcaptures: dict[str, Array]


def with_text(
    function: str,
    options: tuple,
    arrays: tuple,
    tensors: int,
    score: Score | Callable | None,
    mask: Mask | Callable | None,
) -> tuple[tuple, tuple]:
    """The options with the text at their end, and the arrays with its captures at theirs.

    Args:
        tensors: the number of arrays before the optional ones.

    Raises:
        As `written`.
    """
    text, captures = written(function, score, mask)
    missing = tensors + NUM_EXTRAS - len(arrays)
    return (*options, text), (*arrays, *[None] * missing, *captures)


def with_gradients(function: str, options: tuple) -> tuple:
    """The options of a backward in which all floating-point arrays of the score learn.

    Raises:
        ValueError: there is no such array.
    """
    text = options[-1]
    names = set()
    if isinstance(text, Text) and text.score_tree is not None:
        names = learnable(text)
    if not names:
        fact = "score_grad needs a score that reads floating-point arrays"
        raise ValueError(f"{function}: {fact}, got none")
    return learned_options(options, [x.name in names for x in text.captures])


def learnable(text: Text) -> set[str]:
    """The names of the captures that can have a gradient: floating-point arrays of the score."""
    read = {x.value for x in nodes(text.score_tree) if x.op == "capture"}
    return {x.name for x in read if x.kind == Kind.FLOAT and not x.is_number}


def learning(text: Text, flags: Sequence[bool]) -> Text:
    """The text with captures that learn where the flags say so."""
    captures = [x._replace(learns=bool(flag)) for x, flag in zip(text.captures, flags)]
    return text._replace(captures=tuple(captures))


def learned_options(options: tuple, flags: Sequence[bool]) -> tuple:
    """The options of a backward in which these captures of the text learn."""
    return (*options[:-1], learning(options[-1], flags))


def gradients_by_name(options: tuple, gradients: Sequence[Any]) -> dict[str, Array]:
    named = zip(options[-1].captures, gradients)
    return {capture.name: x for capture, x in named if x is not None}
