"""GroupNorm fused with an activation function."""

import functools
from typing import Any

from ..runtime.array import Array, compiling, library_of
from ..runtime.checks import known_library
from . import group_norm_dispatch


def group_norm(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    return_stats: bool = False,
) -> Array | tuple[Array, Array]:
    """activation((x - mean) / sqrt(variance + eps) * weight + bias), the mean over each group.

    Arrays are those that `cupyflash.attention` takes; torch tensors have autograd. x is read once
    where a group fits into registers (up to 40960 numbers of 16 bits, half as many of float32; 16
    times as many on GPUs with clusters of blocks) or, with channels last on a Hopper, a sample into
    the shared memory of all multiprocessors (about 25 MB); else twice. The result has the memory
    format of x.

    Args:
        x: (batch, channels, ...), such as (N, C, L) or (N, C, H, W); float16, bfloat16 or float32.
            Channels first or channels last, as its strides say; where there are gaps between its
            positions, as in a cropped image, it is copied first.
        num_groups: a divisor of channels; neighbouring channels form a group.
        weight: (channels,), dtype of x or float32; None is 1, without a bias.
        bias: like weight; None is 0, without a weight.
        eps: added to the variance.
        activation: "silu", "mish", "gelu", "gelu_tanh" or None.
        return_stats: also return float32 (batch, num_groups, 2), mean and 1 / sqrt(variance + eps)
            of each group: what `group_norm_backward` needs.

    Returns:
        out like x; with statistics (out, statistics).

    Raises:
        TypeError: dtypes, libraries, an eps that is no number.
        ValueError: shapes, devices, options, a weight that is not contiguous.

    Source: Group Normalization, arXiv:1803.08494.
    """
    options = (num_groups, eps, "none" if activation is None else activation)
    out, stats = _results(x, weight, bias, options, return_stats)
    return (out, stats) if return_stats else out


def _results(
    x: Array, weight: Array | None, bias: Array | None, options: tuple, need_stats: bool
) -> tuple[Array, Array | None]:
    """`group_norm_dispatch.forward`, by whatever way the library of x wants."""
    if compiling():
        from . import torch_ops

        return torch_ops.group_norm(x, weight, bias, *options)
    library, arrays = library_of(x), (x, weight, bias)
    if library is None:
        call = lambda *known: group_norm_dispatch.forward(  # noqa: E731
            "group_norm", library_of(known[0]), *known, *options, need_stats
        )
        return known_library("group_norm", call, *arrays)
    if library.traced(*arrays):
        from . import torch_ops

        return torch_ops.group_norm(*arrays, *options)
    if library.wants_gradient(*[y for y in arrays if library_of(y) is library]):
        from .autograd import group_norm_with_gradient

        return group_norm_with_gradient(*arrays, *options)
    return group_norm_dispatch.forward("group_norm", library, *arrays, *options, need_stats)


def group_norm_backward(
    dout: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    stats: Array,
    *,
    activation: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of `group_norm` for libraries without autograd; repeatable bit by bit.

    Args:
        dout: gradient of out, like x; copied if its memory format is another one.
        x, weight, bias, activation: of the forward.
        stats: of the forward; their shape says how many groups there are.

    Returns:
        (dx, dweight, dbias), like x, weight and bias; without a weight the last two are None.

    Raises:
        As `group_norm`.
    """
    arrays = (dout, x, weight, bias, stats)
    if compiling():
        from ..runtime.torch_eager import eagerly

        return eagerly(functools.partial(group_norm_backward, activation=activation), *arrays)
    activation = "none" if activation is None else activation
    call: Any = lambda *known: group_norm_dispatch.backward(  # noqa: E731
        "group_norm_backward", library_of(known[1]), *known, activation
    )
    library = library_of(x)
    if library is None:
        return known_library("group_norm_backward", call, *arrays)
    if library.traced(x, *arrays) or library.wants_gradient(
        *(y for y in arrays if library_of(y) is library)
    ):
        from . import torch_ops

        return torch_ops.group_norm_backward(*arrays, activation)
    return call(*arrays)
