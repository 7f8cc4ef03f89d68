"""The feed-forward network of a transformer block, gated or not."""

from ..runtime.array import Array
from . import dispatch
from .dispatch import Down
from .linear import Norm, with_norm
from .reference import Arrays


def mlp(
    x: Array,
    up_weight: Array,
    down_weight: Array,
    up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    gate_weight: Array | None = None,
    gate_bias: Array | None = None,
    activation: str | None = "gelu",
    residual: Array | None = None,
    norm: Norm | None = None,
) -> Array:
    """hidden down_weight^T + down_bias + residual, hidden = activation(h up_weight^T + up_bias).

    h is norm(x). With a gate hidden = activation(h gate_weight^T + gate_bias) * (h up_weight^T +
    up_bias): SwiGLU with "silu", GEGLU with "gelu". Few rows take one launch, with the hidden
    activations in shared memory, where that is faster than two. Sums are in float32; hidden is
    rounded to the dtype of x. Arrays and gradients as in `cupyflash.linear`.

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
    up = Arrays(x, up_weight, gate_weight, up_bias, gate_bias)
    arrays, options = with_norm("mlp", up, norm)
    options = options._replace(activation=dispatch.activation_name("mlp", activation))
    return dispatch.call("mlp", arrays, options, Down(down_weight, down_bias, residual))
