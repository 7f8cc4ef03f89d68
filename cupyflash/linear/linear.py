"""Projections: one product of matrices with norm, bias, activation and residual in one launch."""

from typing import NamedTuple

from ..runtime.array import Array
from ..runtime.checks import plain_flag, plain_real
from . import dispatch
from .reference import Arrays, Options


class Norm(NamedTuple):
    """The norm before a projection: LayerNorm, or RMSNorm if ``rms``, over the last dimension.

    Attributes:
        weight: (d_in,), dtype of x or float32.
        bias: like weight; not for RMSNorm.
        eps: added to the variance; a number, no array.
    """

    weight: Array
    bias: Array | None = None
    eps: float = 1e-5
    rms: bool = False


class Rotary(NamedTuple):
    """The rotary embedding of q and k (RoFormer, arXiv:2104.09864); angles have no gradient.

    Attributes:
        cos, sin: (num_positions, rotary_dim / 2), float32 or dtype of x; rotary_dim <= head_dim.
        positions: (batch, seqlen), int32 or int64, below num_positions: a GPU does not check that
            and takes the nearest one. None: 0, 1, ... in each sequence; packed sequences, of which
            nothing says where they begin, must have positions.
        interleaved: pairs are (0, 1), (2, 3), ..., not (0, rotary_dim / 2), ...
    """

    cos: Array
    sin: Array
    positions: Array | None = None
    interleaved: bool = False


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    residual: Array | None = None,
    norm: Norm | None = None,
) -> Array:
    """activation(norm(x) weight^T + bias) + residual; sums in float32, rounded once.

    Arrays are those that `cupyflash.attention` takes. Last dimensions are contiguous, other strides
    are free (an x or residual whose rows lie in no single stride is copied first). Rows that begin
    on multiples of 16 bytes are read fastest.

    torch tensors have autograd: gradients of all of them, each in its own dtype; second derivatives
    without a norm. Where a gradient is wanted, norm and activation are steps of their own, which
    keep what the backward reads. Under torch's autocast all is as with torch's own operations. For
    the other libraries there is no backward.

    Args:
        x: (..., d_in), float16, bfloat16 or float32.
        weight: (d_out, d_in), as in ``torch.nn.Linear``, dtype of x or float32. A float32 weight or
            bias beside an x of 16 bits is rounded to its dtype in each call.
        bias: (d_out,), dtype of x or float32.
        activation: "gelu", "gelu_tanh", "silu", "relu" or None.
        residual: (..., d_out), dtype of x (under autocast any), added last.
        norm: of x, before the product.

    Returns:
        (..., d_out), dtype of x, contiguous.

    Raises:
        TypeError: dtypes, libraries, options that are no plain numbers.
        ValueError: shapes, strides, devices, activation, eps.
        NotImplementedError: transforms of torch.func.
    """
    arrays, options = with_norm("linear", Arrays(x, weight, bias=bias, residual=residual), norm)
    options = options._replace(activation=dispatch.activation_name("linear", activation))
    return dispatch.call("linear", arrays, options)


def with_norm(function: str, arrays: Arrays, norm: Norm | None) -> tuple[Arrays, Options]:
    """Arrays and options of a projection after a norm.

    Raises:
        TypeError: norm is no `Norm`, or has no weight.
        ValueError: an RMSNorm with a bias.
    """
    if norm is None:
        return arrays, Options()
    if not isinstance(norm, Norm):
        got = type(norm).__name__
        raise TypeError(f"{function}: norm must be a cupyflash.Norm or None, got {got}")
    if norm.weight is None:
        raise TypeError(f"{function}: weight of norm must be an array, got None")
    rms = plain_flag(function, "rms of norm", norm.rms)
    if rms and norm.bias is not None:
        raise ValueError(f"{function}: norm must have no bias if it is an RMSNorm, got one")
    arrays = arrays._replace(norm_weight=norm.weight, norm_bias=norm.bias)
    return arrays, Options(eps=plain_real(function, "eps of norm", norm.eps), rms=rms)
