"""The layers of a `PolicyUnet` as prepared launches on buffers made once.

Sequences lie in memory as (batch, length, channels) with rows of zeros between them. A window of a
convolution, some neighbouring rows, is itself one row of a matrix whose rows overlap; so each
convolution is one `cupyflash.linear`, with no copy before it and its bias in the same launch.
"""

import functools
from collections.abc import Callable

import cupyflash

from ..packages import importing
from ..runtime.launch import Prepared
from ..runtime.lookup import library_of
from .diffusion_policy import GroupNormMish, ResidualBlock

with importing(__name__, "torch>=2.7"):
    import torch
    from torch import nn
    from torch.nn import functional

GAP = 2  # rows of zeros around each sequence: a kernel of 5 reads so many beyond its ends


class Sequences:
    """Sequences in memory as (batch, length, channels), with rows of zeros between them.

    Attributes:
        inside: the sequences without the zeros, (batch, channels, length).
    """

    def __init__(self, batch: int, channels: int, length: int, like: torch.Tensor) -> None:
        self.batch, self.channels, self.length = batch, channels, length
        self.rows = like.new_zeros(batch * (length + GAP) + 2 * GAP, channels)
        self.inside = spread(self.rows[GAP:], batch, length, GAP)

    def windows(self, size: int, stride: int = 1) -> torch.Tensor:
        """The windows of a convolution, (windows, size * channels): rows that overlap in memory.

        Between the windows of two sequences there are GAP / stride that belong to neither.
        """
        count = (self.batch * (self.length + GAP) - GAP) // stride
        rows = self.rows[GAP - (size - 1) // 2 :]
        return rows.as_strided(
            (count, size * self.channels), (stride * self.channels, 1), rows.storage_offset()
        )


def spread(rows: torch.Tensor, batch: int, length: int, gap: int) -> torch.Tensor:
    """Sequences (batch, channels, length) in rows (..., channels), ``gap`` rows between them."""
    channels = rows.shape[-1]
    strides = ((length + gap) * channels, 1, channels)
    return rows.as_strided((batch, channels, length), strides, rows.storage_offset())


def prepared(call: Callable[[], torch.Tensor], like: torch.Tensor) -> Prepared:
    """One launch of this library on the current stream of torch, at the cost of a launch."""
    return Prepared(call, functools.partial(library_of(like).stream, like.get_device()))


class Convolution:
    """A convolution as one product: each row of the weights makes one output channel.

    Calls return (batch, channels, length), in memory as (batch, length, channels).
    """

    def __init__(self, module: nn.Conv1d, source: Sequences) -> None:
        size, stride = module.kernel_size[0], module.stride[0]
        weight = module.weight.permute(0, 2, 1)  # (out, size, in)
        weight = padded(weight, 0, 0, source.channels - weight.shape[2]).flatten(1)
        bias, windows = module.bias.clone(), source.windows(size, stride)
        self.shape = source.batch, weight.shape[0], source.length // stride
        sizes = source.batch, source.length // stride, GAP // stride
        call = lambda: spread(cupyflash.linear(windows, weight, bias), *sizes)  # noqa: E731
        self.call = prepared(call, weight)

    def __call__(self) -> torch.Tensor:
        return self.call()


def growth(module: nn.ConvTranspose1d, source: Sequences) -> Prepared:
    """The transposed convolution of kernel 4 and stride 2: each row gives its two at once.

    out[2 i] = w1 x[i] + w3 x[i - 1] and out[2 i + 1] = w2 x[i] + w0 x[i + 1].
    """
    w0, w1, w2, w3 = module.weight.permute(2, 1, 0)  # (out, in) each
    none = torch.zeros_like(w0)
    weight = torch.cat([torch.cat([w3, w1, none], 1), torch.cat([none, w2, w0], 1)])
    bias, windows = module.bias.repeat(2), source.windows(3)
    sizes = source.batch, 2 * source.length, 2 * GAP

    def call() -> torch.Tensor:
        rows = cupyflash.linear(windows, weight, bias)
        return spread(rows.view(-1, rows.shape[1] // 2), *sizes)

    return prepared(call, weight)


class Normalised:
    """GroupNorm and Mish of a convolution; calls return (batch, channels, length), contiguous.

    A copy and the one launch of channels first are less than the three of channels last.
    """

    def __init__(self, norm: GroupNormMish, source: Convolution) -> None:
        groups, options = norm.num_groups, {"eps": norm.eps, "activation": "mish"}
        weight, bias = norm.weight.clone(), norm.bias.clone()
        self.source, self.x = source, weight.new_empty(source.shape)
        x = self.x
        call = lambda: cupyflash.group_norm(x, groups, weight, bias, **options)  # noqa: E731
        self.norm = prepared(call, weight)

    def __call__(self) -> torch.Tensor:
        self.x.copy_(self.source())
        return self.norm()


class Block:
    """A `ResidualBlock` from ``source`` to ``out``; ``scale``, ``shift`` (batch, channels, 1)."""

    def __init__(
        self,
        module: ResidualBlock,
        source: Sequences,
        scale: torch.Tensor,
        shift: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        between = Sequences(source.batch, scale.shape[1], source.length, module.skip.weight)
        (first, first_norm), (second, second_norm) = module.first, module.second
        self.first = Normalised(first_norm, Convolution(first, source))
        self.second = Normalised(second_norm, Convolution(second, between))
        self.skip = Convolution(module.skip, source)
        self.between, self.scale, self.shift, self.out = between.inside, scale, shift, out

    def __call__(self) -> None:
        """Nine launches."""
        torch.addcmul(self.shift, self.first(), self.scale, out=self.between)
        torch.add(self.second(), self.skip(), out=self.out)


def padded(x: torch.Tensor, *more: int) -> torch.Tensor:
    """A copy with so many zeros behind each axis."""
    return functional.pad(x, [n for count in reversed(more) for n in (0, count)]).clone()
