"""The layout of (batch, channels, ...) in memory, and its groups as matrices for a kernel."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from ...runtime.array import View, dense_strides
from ...runtime.config import ITEM_SIZE
from ...runtime.rows import collapse
from ...runtime.structs import header

structs = header("group_norm/params.cuh")

MAX_GROUP = 2**31 - 2**16  # elements of a group, and channels of a tensor: kernels round them up


class Layout(NamedTuple):
    """Strides of samples, channels and positions, in elements."""

    batch: int
    channel: int
    position: int
    nhwc: bool


def layout_of(x: View, nhwc: bool | None = None) -> Layout | None:
    """The layout of (batch, channels, ...); None if neither channels nor positions are dense.

    Args:
        nhwc: what to take of a tensor with one position or channel, which can be both.
    """
    batch, channel = (step if size > 1 else 0 for size, step in zip(x.shape[:2], x.strides[:2]))
    sizes, ((position, *rest),) = [1], [[0]]
    if 0 not in x.shape:
        sizes, ((position, *rest),) = collapse(x.shape[2:], [x.strides[2:]])
    fits = {False: position == 1 or sizes == [1], True: channel == 1 or x.shape[1] == 1}
    possible = [] if rest else [last for last in fits if fits[last]]
    if possible:
        if nhwc not in possible:
            nhwc = possible[-1 if channel == 1 else 0]
        return Layout(batch, channel, position, nhwc)
    return Layout(0, 0, 0, False) if 0 in x.shape else None


def dense_like(x: View) -> tuple[int, ...]:
    """Strides of a dense tensor with the memory format of x: that of a result."""
    layout = layout_of(x)
    if layout is None:  # to be copied: in which order its axes lie
        steps = [step for size, step in zip(x.shape[2:], x.strides[2:]) if size > 1]
        nhwc = x.shape[1] > 1 and all(x.strides[1] < step for step in steps)
    else:
        nhwc = layout.nhwc
    batch, channel, *positions = range(len(x.shape))
    order = [batch, *positions, channel] if nhwc else [batch, channel, *positions]
    return dense_strides(x.shape, order)


class Groups:
    """The groups of tensors of one shape and one memory format, which all have a `Layout`.

    Attributes:
        batch, num_groups, positions: of the tensors.
        channels, size: of a group: its channels, its elements.
        strides: ``<name>_strides`` of each tensor, for the parameter structs.
        aligned: whether every row of positions (of channels, if they are last) begins, and its
            length is, a multiple of 16 bytes.
        dense: whether the channels of a group lie side by side, channels first.
        halves: whether 16 bytes hold two whole channels, which lie side by side.

    Raises:
        ValueError: a group is too large.
    """

    def __init__(self, function: str, views: Mapping[str, View], num_groups: int) -> None:
        tensors = {name: x for name, x in views.items() if name not in ("weight", "bias")}
        x = tensors["x"]
        self.nhwc = layout_of(x).nhwc
        layouts = {name: layout_of(y, self.nhwc) for name, y in tensors.items()}
        self.batch, channels, self.num_groups = *x.shape[:2], num_groups
        self.channels, self.positions = channels // num_groups, math.prod(x.shape[2:])
        self.size = self.channels * self.positions
        for count, name in ((self.size, "elements of a group"), (channels, "channels")):
            if count >= MAX_GROUP:
                raise ValueError(f"{function}: {name} must be fewer than {MAX_GROUP}, got {count}")
        self.strides = {
            f"{name}_strides": structs.GroupStrides(*y[:3]) for name, y in layouts.items()
        }
        item = ITEM_SIZE[x.dtype]
        whole = lambda *counts: all(count * item % 16 == 0 for count in counts)  # noqa: E731
        if self.nhwc:
            self.dense = self.halves = False
            self.aligned = whole(channels, *(s for y in layouts.values() for s in (y[0], y[2])))
            return
        self.aligned = whole(self.positions, *(s for y in layouts.values() for s in y[:2]))
        gaps = any(y.channel != self.positions for y in layouts.values())
        self.dense = self.channels == 1 or not gaps
        two = self.positions * item == 8 and self.channels % 2 == 0
        self.halves = self.dense and two and whole(*(y.batch for y in layouts.values()))

    def shape(self, eps: float, vector: int) -> structs.GroupNormShape:
        """The shape as the kernels get it."""
        sizes = self.batch, self.num_groups, self.channels, self.positions
        packs = _divisor(max(1, self.positions // vector))
        return structs.GroupNormShape(*sizes, 1 / self.size, eps, packs)


def _divisor(n: int) -> structs.Divisor:
    """The factor and the shift by which kernels divide numbers from 0 to 2^31 - 1 by n."""
    shift = (n - 1).bit_length()
    return structs.Divisor((1 << 32) * ((1 << shift) - n) // n + 1, shift)
