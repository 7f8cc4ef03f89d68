"""Which keys a query sees by a mask function of transformers, found by asking it.

transformers describes a mask by a function (batch, head, query, key) -> visible. `pattern_of` calls
it with objects that stand for the indices and remember what they are compared with. A function that
does anything else with them (chunks, packed sequences, images) has no pattern.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Pattern(NamedTuple):
    """Query i sees the keys from i - left to i + right; None is unlimited."""

    left: int | None = None
    right: int | None = None

    def __and__(self, other: Any) -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        return Pattern(_nearer(self.left, other.left), _nearer(self.right, other.right))

    @property
    def device(self) -> None:
        """Mask functions move the masks that they combine to one device."""

    def to(self, device: None) -> "Pattern":
        return self


class Packed(NamedTuple):
    """A pattern inside each of the sequences that are packed into one row.

    Attributes:
        apart: whether the keys of other sequences are masked.
    """

    pattern: Pattern = Pattern()
    apart: bool = False

    def __and__(self, other: Any) -> "Packed":
        if isinstance(other, Pattern):
            return Packed(self.pattern & other, self.apart)
        if not isinstance(other, Packed):
            return NotImplemented
        return Packed(self.pattern & other.pattern, self.apart or other.apart)

    __rand__ = __and__

    @property
    def device(self) -> None:
        """None, as for a `Pattern`: it lies nowhere."""

    def to(self, device: None) -> "Packed":
        return self


def pattern_of(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function, or None where it is not a band around the diagonal."""
    pattern = _seen(mask_function)
    return pattern if isinstance(pattern, Pattern) else None


def packed_pattern(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern inside each packed sequence, if packing is all that was added to a pattern."""
    packed = _seen(mask_function)
    return packed.pattern if isinstance(packed, Packed) and packed.apart else None


def answer_for_packing(masks: Any) -> None:
    """Lets the mask functions that transformers makes for packed sequences answer `_seen`.

    They index tensors, so they are asked first. Positions are asked since 5.24 only.

    Args:
        masks: transformers.masking_utils.
    """
    for name, answer in (
        ("packed_sequence_mask_function", lambda packed: lambda *_: Packed(apart=True)),
        (
            "remap_positions_for_packed_sequence",
            lambda function, positions: lambda *indices: Packed(function(*indices)),
        ),
    ):
        make = getattr(masks, name, None)
        if make is not None and not hasattr(make, "__wrapped__"):
            setattr(masks, name, _answering(make, answer))


def _answering(make: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` of mask functions, which answer for an `_Index` by what ``answer`` makes."""

    @functools.wraps(make)
    def made(*arguments: Any) -> Callable[..., Any]:
        of_tensors, of_unknown = make(*arguments), answer(*arguments)

        def visible(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            chosen = of_unknown if isinstance(q_idx, _Index) else of_tensors
            return chosen(batch_idx, head_idx, q_idx, kv_idx)

        return visible

    return made


def _seen(mask_function: Callable[..., Any]) -> "Pattern | Packed | None":
    """What a mask function answers for any query and key, if that is a band around the diagonal."""
    unknown = _Index(0, 0, 0)
    try:
        seen = mask_function(unknown, unknown, _Index(1, 0, 0), _Index(0, 1, 0))
    except (AttributeError, IndexError, TypeError):
        return None
    pattern = seen.pattern if isinstance(seen, Packed) else seen
    if not isinstance(pattern, Pattern) or min(pattern.left or 0, pattern.right or 0) < 0:
        return None  # negative: not even its own key is seen
    return seen


@dataclasses.dataclass(eq=False)
class _Index:
    """queries * (position of the query) + keys * (position of the key) + shift."""

    queries: int
    keys: int
    shift: int

    def __sub__(self, other: Any) -> "_Index":
        if isinstance(other, int):
            return _Index(self.queries, self.keys, self.shift - other)
        if not isinstance(other, _Index):
            raise TypeError
        shift = self.shift - other.shift
        return _Index(self.queries - other.queries, self.keys - other.keys, shift)

    def __add__(self, other: Any) -> "_Index":
        return self - -other

    def __neg__(self) -> "_Index":
        return _Index(-self.queries, -self.keys, -self.shift)

    def __abs__(self) -> "_Distance":
        return _Distance(self)

    def __ge__(self, other: Any) -> Pattern:
        return (self - other)._not_negative()

    def __gt__(self, other: Any) -> Pattern:
        return (self - other - 1)._not_negative()

    def __le__(self, other: Any) -> Pattern:
        return (-(self - other))._not_negative()

    def __lt__(self, other: Any) -> Pattern:
        return (-(self - other) - 1)._not_negative()

    # Without this, objects are compared by identity, and the answer is a bool.
    def __eq__(self, other: object) -> Any:
        raise TypeError

    def new_ones(self, *shape: Any, **options: Any) -> Pattern:
        """All is visible; mask functions that combine several begin with it."""
        return Pattern()

    def _not_negative(self) -> Pattern:
        if (self.queries, self.keys) == (1, -1):
            return Pattern(right=self.shift)
        if (self.queries, self.keys) == (-1, 1):
            return Pattern(left=self.shift)
        if (self.queries, self.keys) in ((1, 0), (0, 1)) and self.shift >= 0:
            return Pattern()  # positions count from 0
        raise TypeError


@dataclasses.dataclass
class _Distance:
    """The absolute value of an index."""

    index: _Index

    def __le__(self, other: Any) -> Pattern:
        return (self.index <= other) & (self.index >= -other)

    def __lt__(self, other: Any) -> Pattern:
        return (self.index < other) & (self.index > -other)


def _nearer(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return a if b is None else b
    return min(a, b)
