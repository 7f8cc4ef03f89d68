"""What a mask function of transformers shows, found by calling it with symbols for its indices.

transformers describes a mask by a function (batch, head, query, key) -> visible. `pattern_of` calls
it with objects that stand for the indices and remember what they are compared with. A function that
does anything else with them (chunks, packed sequences, images) has no pattern.
"""

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
        """Mask functions move what they combine to one device."""
        return None

    def to(self, device: None) -> "Pattern":
        return self


def pattern_of(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function, or None where it is not a band around the diagonal."""
    unknown = _Index(0, 0, 0)
    try:
        pattern = mask_function(unknown, unknown, _Index(1, 0, 0), _Index(0, 1, 0))
    except (AttributeError, IndexError, TypeError):
        return None
    if not isinstance(pattern, Pattern) or min(pattern.left or 0, pattern.right or 0) < 0:
        return None  # negative: not even its own key is seen
    return pattern


class _Index:
    """queries * (position of the query) + keys * (position of the key) + shift."""

    def __init__(self, queries: int, keys: int, shift: int) -> None:
        self.queries, self.keys, self.shift = queries, keys, shift

    def __sub__(self, other: Any) -> "_Index":
        if isinstance(other, int):
            return _Index(self.queries, self.keys, self.shift - other)
        if not isinstance(other, _Index):
            raise TypeError
        shift = self.shift - other.shift
        return _Index(self.queries - other.queries, self.keys - other.keys, shift)

    def __add__(self, other: Any) -> "_Index":
        if not isinstance(other, int):
            raise TypeError
        return _Index(self.queries, self.keys, self.shift + other)

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

    # Without these two, objects are compared by identity, and the answer is a bool.
    def __eq__(self, other: object) -> Any:
        raise TypeError

    def __ne__(self, other: object) -> Any:
        raise TypeError

    def new_ones(self, *shape: Any, **options: Any) -> Pattern:
        """What mask functions begin with that are made of several: all is visible."""
        return Pattern()

    def _not_negative(self) -> Pattern:
        if (self.queries, self.keys) == (1, -1):
            return Pattern(right=self.shift)
        if (self.queries, self.keys) == (-1, 1):
            return Pattern(left=self.shift)
        if (self.queries, self.keys) in ((1, 0), (0, 1)) and self.shift >= 0:
            return Pattern()  # positions count from 0
        raise TypeError


class _Distance:
    """The absolute value of an index."""

    def __init__(self, index: _Index) -> None:
        self.index = index

    def __le__(self, other: Any) -> Pattern:
        return (self.index <= other) & (self.index >= -other)

    def __lt__(self, other: Any) -> Pattern:
        return (self.index < other) & (self.index > -other)


def _nearer(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return a if b is None else b
    return min(a, b)
