"""GroupNorm fused with an activation function: public functions; `dispatch` makes the calls."""

from ...runtime.array import Array
from ...runtime.checks import activation_name
from ...runtime.operation import Operation, TorchSide
from . import dispatch
from .kernels import ACTIVATIONS


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
    where channels are first and a group fits into registers (up to 40960 numbers of 16 bits, half
    as many of float32; 16 times as many on GPUs with clusters of blocks); else twice. The result
    has the memory format of x.

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
    activation = activation_name("group_norm", activation, ACTIVATIONS)
    options = (num_groups, eps, activation, return_stats)
    out, stats = FORWARD("group_norm", (x, weight, bias), options)
    return (out, stats) if return_stats else out


def group_norm_backward(
    dout: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    stats: Array,
    *,
    activation: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of `group_norm` for libraries without autograd; deterministic.

    Args:
        dout: gradient of out, like x; copied if its memory format is another one.
        x, weight, bias, activation: of the forward.
        stats: of the forward; their shape says how many groups there are.

    Returns:
        (dx, dweight, dbias), like x, weight and bias; without a weight the last two are None.

    Raises:
        As `group_norm`.
    """
    function = "group_norm_backward"
    options = (activation_name(function, activation, ACTIVATIONS),)
    return BACKWARD(function, (dout, x, weight, bias, stats), options)


def _torch_forward() -> TorchSide:
    from . import torch_ops

    return torch_ops.GroupNormForward


def _torch_backward() -> TorchSide:
    from . import torch_ops

    return torch_ops.GroupNormBackward


FORWARD = Operation(dispatch.forward, _torch_forward)
BACKWARD = Operation(dispatch.backward, _torch_backward, first=1, gradient=True)
