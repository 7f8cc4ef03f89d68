"""Projections: products of matrices with norm, bias, activation and residual in the same launch."""

from typing import Literal, NamedTuple

from ...runtime.array import Array, ArrayT
from ...runtime.checks import activation_name, integer_within, plain_flag, plain_real
from .checks import MAX_SIZE
from .kernels import ACTIVATIONS
from .operations import PROJECTION
from .options import Arrays, Options

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"] | None


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
            and takes the nearest one. None: 0, 1, ... in each sequence; packed sequences must have
            positions, as nothing else says where each of them begins.
        interleaved: pairs are (0, 1), (2, 3), ..., not (0, rotary_dim / 2), ...
    """

    cos: Array
    sin: Array
    positions: Array | None = None
    interleaved: bool = False


def linear(
    x: ArrayT,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: Activation = None,
    residual: Array | None = None,
    norm: Norm | None = None,
) -> ArrayT:
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
    arrays, options = _with_norm("linear", Arrays(x, weight, bias=bias, residual=residual), norm)
    options = options._replace(activation=activation_name("linear", activation, ACTIVATIONS))
    return PROJECTION("linear", arrays, options)[0]


def mlp(
    x: ArrayT,
    up_weight: Array,
    down_weight: Array,
    up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    gate_weight: Array | None = None,
    gate_bias: Array | None = None,
    activation: Activation = "gelu",
    residual: Array | None = None,
    norm: Norm | None = None,
) -> ArrayT:
    """hidden down_weight^T + down_bias + residual, hidden = activation(h up_weight^T + up_bias).

    h is norm(x). With a gate hidden = activation(h gate_weight^T + gate_bias) * (h up_weight^T +
    up_bias): SwiGLU with "silu", GEGLU with "gelu". Sums are in float32; hidden is rounded to the
    dtype of x. Arrays and gradients as in `cupyflash.linear`.

    Args:
        x: (..., d_in), float16, bfloat16 or float32.
        up_weight: (d_hidden, d_in).
        down_weight: (d_out, d_hidden).
        up_bias: (d_hidden,).
        down_bias: (d_out,).
        gate_weight: like up_weight.
        gate_bias: like up_bias; only with gate_weight.
        activation: "gelu", "gelu_tanh", "silu", "relu" or None.
        residual: (..., d_out), added last.
        norm: of x, before the first product.

    Returns:
        (..., d_out), dtype of x, contiguous.

    Raises:
        As `cupyflash.linear`.

    Source: GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    arrays = Arrays(x, up_weight, gate_weight, up_bias, gate_bias, residual)
    arrays = arrays._replace(down_weight=down_weight, down_bias=down_bias)
    arrays, options = _with_norm("mlp", arrays, norm)
    options = options._replace(activation=activation_name("mlp", activation, ACTIVATIONS))
    return PROJECTION("mlp", arrays, options)[0]


def qkv_projection(
    x: ArrayT,
    weight: Array,
    bias: Array | None = None,
    *,
    heads_q: int,
    heads_kv: int | None = None,
    norm: Norm | None = None,
    rotary: Rotary | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """q, k and v of norm(x) weight^T + bias, as `cupyflash.attention` reads them; q and k rotated.

    Arrays and gradients as in `cupyflash.linear`.

    Args:
        x: (batch, seqlen, d_in), or (total, d_in) of packed sequences.
        weight: ((heads_q + 2 heads_kv) * head_dim, d_in), the rows of q, then those of k, of v.
        bias: one number for each row of weight.
        heads_q: query heads.
        heads_kv: heads of k and v, a divisor of heads_q; None is heads_q.
        norm: of x, before the product.
        rotary: rotary embedding of q and k. Packed sequences must have positions (total,), which
            begin with 0 in each of them.

    Returns:
        q (batch, seqlen, heads_q, head_dim), k and v (batch, seqlen, heads_kv, head_dim), without
        batch for packed sequences: views of one array.

    Raises:
        As `cupyflash.linear`, ValueError for heads and positions, and NotImplementedError for cos
        and sin that require a gradient.
    """
    arrays, options = _with_norm("qkv_projection", Arrays(x, weight, bias=bias), norm)
    function, most = "qkv_projection", MAX_SIZE - 1
    heads_q = integer_within(function, "heads_q", heads_q, 1, most)
    heads_kv = heads_q if heads_kv is None else heads_kv
    heads_kv = integer_within(function, "heads_kv", heads_kv, 1, most)
    if heads_q % heads_kv:
        fact = "heads_kv must divide heads_q"
        raise ValueError(f"qkv_projection: {fact}, got {heads_kv} and {heads_q}")
    options = options._replace(heads=(heads_q, heads_kv))
    if rotary is not None:
        if not isinstance(rotary, Rotary):
            fact = "rotary must be a cupyflash.Rotary or None"
            raise TypeError(f"qkv_projection: {fact}, got {type(rotary).__name__}")
        for name in ("cos", "sin"):
            if getattr(rotary, name) is None:
                raise TypeError(f"qkv_projection: {name} must be an array, got None")
        cos, sin, positions, interleaved = rotary
        arrays = arrays._replace(cos=cos, sin=sin, positions=positions)
        interleaved = plain_flag("qkv_projection", "interleaved of rotary", interleaved)
        options = options._replace(interleaved=interleaved)
    out = PROJECTION("qkv_projection", arrays, options)[0]
    count = heads_q + 2 * heads_kv
    out = out.reshape(*x.shape[:-1], count, out.shape[-1] // count)
    if getattr(out, "requires_grad", False):  # backward: one concatenation, no sum of three
        return out.split((heads_q, heads_kv, heads_kv), -2)
    behind_k = heads_q + heads_kv
    return out[..., :heads_q, :], out[..., heads_q:behind_k, :], out[..., behind_k:, :]


def _with_norm(function: str, arrays: Arrays, norm: Norm | None) -> tuple[Arrays, Options]:
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
