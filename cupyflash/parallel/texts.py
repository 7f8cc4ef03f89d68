"""Scores and masks of the caller's own, in calls that have some of the heads, or pieces.

A call counts from 0 what it has; `score_text.pieces` makes a text of it that counts among all.
"""

import functools
from typing import Any, NamedTuple

from torch import Tensor

from ..ops.attention.score_text import Capture, Text
from ..ops.attention.score_text.block_mask import is_block_mask, mask_of
from ..ops.attention.score_text.encode import joined
from ..ops.attention.score_text.pieces import of_pieces, values_of_pieces
from ..ops.attention.score_text.scores import written
from ..ops.attention.score_text.tiles import FoundTiles
from ..runtime.array import View
from ..runtime.checks import short
from ..runtime.lookup import library_of
from ..runtime.torch_tracking import refuse_sharded
from .pieces import FUNCTION


def text_of(
    score: Any, mask: Any, lengths: tuple[int, ...], heads: int
) -> tuple[Text | None, tuple, FoundTiles | None]:
    """(the text of both arguments, the arrays and numbers that it reads, perhaps found tiles).

    Args:
        lengths, heads: of the sequences, and of q, for a BlockMask.

    Raises:
        As `cupyflash.Score`; ValueError: a BlockMask of other lengths or heads;
        NotImplementedError: one beside sequences of several lengths.
    """
    if score is mask is None:
        return None, (), None
    if is_block_mask(mask):
        if len(set(lengths)) != 1:
            fact = "mask can be a BlockMask if all sequences have one length, else its mask_mod"
            raise NotImplementedError(f"{FUNCTION}: {fact}, got lengths {short(lengths)}")
        shape = len(lengths), heads, lengths[0]
        mask = mask_of(FUNCTION, "mask", mask, shape, shape)
    text, values = written(FUNCTION, score, mask)
    captures = values[: len(text.captures)]
    return text, captures, values[-1] if len(values) > len(captures) else None


def views_of(text: Text | None, captures: tuple, library: Any) -> tuple[View | None, ...]:
    """Views of what a text reads, None for numbers.

    Raises:
        TypeError: an array that is no torch tensor.
        NotImplementedError: a DTensor.
    """
    views = []
    for capture, x in zip(text.captures if text else (), captures, strict=True):
        if not capture.is_number and library_of(x) is not library:
            fact = f"{capture.name}, which the score or mask reads, must be a torch tensor"
            raise TypeError(f"{FUNCTION}: {fact}, got {short(x)}")
        refuse_sharded(type(x))
        views.append(None if capture.is_number else library.view(x))
    return tuple(views)


def with_alibi(
    text: Text | None, captures: tuple, slopes: Tensor, softcap: float
) -> tuple[Text, tuple]:
    """The softcap and ALiBi as a score, beside a text that has a mask at most, and what it reads.

    The kernels count the distances of ALiBi from their own diagonal, which is not that of the
    sequence in a piece whose queries see keys to their right.
    """
    given = (slopes, softcap) if softcap else (slopes,)
    score = _alibi(slopes.dim(), bool(softcap))
    if text is None:
        return score, given
    return _joined(score, text), (*given, *captures)


@functools.lru_cache(maxsize=64)
def _joined(score: Text, mask: Text) -> Text:
    return joined(score, mask)[0]


def _alibi(axes: int, capped: bool) -> Text:
    captures = [Capture("slopes", "float32", axes), Capture("cap", "float", 0)]
    capped_score = "cap() * tanh(score / cap())" if capped else "score"
    index = "head" if axes == 1 else "batch, head"
    score = f"{capped_score} - slopes({index}) * abs(query - key)"
    return Text(score, "", tuple(captures[: 1 + capped]))


class CallText(NamedTuple):
    """A text with what it reads, for calls of some of the heads.

    Attributes:
        names: the variables that these calls count from elsewhere (`of_pieces`).
        first_head: the number of the first head of a call.
        heads: how many there are in all.
        found: the tiles of the mask, if it remembers them.
    """

    text: Text
    captures: tuple
    names: frozenset[str]
    first_head: int
    heads: int
    found: FoundTiles | None = None

    def of(self, pieces: Tensor | None, part: Any = None) -> tuple[Text, tuple]:
        """The text of one call, and what it reads.

        Args:
            pieces: where the sequences of the call begin (`values_of_pieces`).
            part: what stands for the call, if it has a part of the queries.
        """
        text = of_pieces(self.text, self.names)
        values = values_of_pieces(text, self.captures, pieces, self.first_head, self.heads)
        if self.found is None:
            return text, values
        return text, (*values, self.found if part is None else self.found.of(part))

    def of_heads(self, first: int) -> "CallText":
        """The same for a call whose heads begin at this one of those of this."""
        return self._replace(first_head=self.first_head + first)
