"""The options and arrays of a call with the arguments ``score`` and ``mask``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....runtime.array import Array, compiling
from ....runtime.loaded import untraced
from ..options import NUM_EXTRAS, SLOPES, Extras, Options
from .block_mask import is_block_mask, mask_of
from .encode import SEPARATOR
from .scores import Mask, Score, made, written
from .text import Text
from .tree import Kind
from .write import nodes

LAYOUT, SOFTCAP = map(Options._fields.index, ("layout", "softcap"))
ARGUMENTS = ("score", "mask")  # their names
NAMES = {"flex_attention": ("score_mod", "block_mask")}
SEQUSED = tuple(map(Extras._fields.index, ("seqused_q", "seqused_k")))
AXES = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2)}  # of batch, heads and seqlen
BACKWARD = 7  # arrays before the optional ones, of which dout is the first


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


@untraced
def with_text(
    function: str,
    options: tuple,
    arrays: tuple,
    tensors: int,
    score: Score | Callable | None,
    mask: Mask | Callable | None,
) -> tuple[tuple, tuple]:
    """The options with the text at their end, and the arrays with its captures at theirs.

    A score that is a softcap becomes that option; without a mask there is no text then.

    Args:
        tensors: the number of arrays before the optional ones.
        mask: also a BlockMask of torch.

    Raises:
        As `written`.
    """
    missing, names = [None] * (tensors + NUM_EXTRAS - len(arrays)), NAMES.get(function, ARGUMENTS)
    if not compiling():
        score = made(function, names[0], Score, score)
    cap = score.softcap if isinstance(score, Score) else None
    slopes = (*arrays, *missing)[tensors + SLOPES]
    if cap is not None and options[SOFTCAP] == 0 and slopes is None:
        options, score = (*options[:SOFTCAP], cap, *options[SOFTCAP + 1 :]), None
        if mask is None:
            return options, arrays
    if compiling():
        text, captures = _traced(function, score, mask)
        return (*options, text), (*arrays, *missing, *captures)
    by_blocks = is_block_mask(mask)
    if by_blocks:
        mask = _of_blocks(function, options, arrays[tensors == BACKWARD :], mask)
    text, captures = written(function, score, mask, names)
    extras = (*arrays[tensors:], *missing)
    if by_blocks and any(extras[x] is not None for x in SEQUSED):
        captures = captures[: len(text.captures)]  # other lengths have other tiles
    return (*options, text), (*arrays, *missing, *captures)


def _traced(function: str, score: Any, mask: Any) -> tuple[str, tuple]:
    """The text as a string, and its captures, while torch.compile traces the call.

    Raises:
        NotImplementedError: a function, which cannot be traced within a trace.
    """
    strings, captures = [], ()
    for x, kind in ((score, Score), (mask, Mask)):
        if isinstance(x, kind):
            strings.append(x.encoded)
            captures = (*captures, *x.values)
        elif x is not None:
            fact = f"within torch.compile allowed is a cupyflash.{kind.__name__} from outside of it"
            raise NotImplementedError(f"{function}: {fact}, got another object")
    return SEPARATOR.join(strings), captures


def _of_blocks(function: str, options: tuple, arrays: tuple, mask: Any) -> Mask:
    """The mask of a BlockMask for these options and q, k, ….

    Raises:
        NotImplementedError: packed sequences.
        ValueError: other lengths.
    """
    layout, name = options[LAYOUT], NAMES.get(function, ARGUMENTS)[1]
    if layout not in AXES:
        fact = f"{name} cannot be a BlockMask beside packed sequences, allowed is its mask_mod"
        raise NotImplementedError(f"{function}: {fact}, got layout {layout!r}")
    shapes = [tuple(getattr(x, "shape", ())) for x in arrays[:2]]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"{function}: q and k must have four axes, got {shapes}")
    sizes = [[shape[axis] for axis in AXES[layout]] for shape in shapes]
    return mask_of(function, name, mask, *sizes)


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
