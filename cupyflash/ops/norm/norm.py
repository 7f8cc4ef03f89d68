"""LayerNorm and RMSNorm, with dropout and the addition of a residual before them."""

from ...runtime.array import Array
from ...runtime.operation import Operation, TorchSide
from . import dispatch
from .dropout import split


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    return_stats: bool = False,
) -> Array | tuple[Array, ...]:
    """(h - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    h is dropout(x) + residual, rounded to the dtype in which it is returned.

    Arrays are those that `cupyflash.attention` takes; torch tensors have autograd. Strides are
    free: where the last dimension is not contiguous, or more than four others do not collapse, x or
    residual is copied first. Both are read once, where a row fits into registers (16384 numbers of
    16 bits, 8192 of float32; four times as many on sm_90).

    Args:
        x: (..., columns), float16, bfloat16 or float32.
        weight: (columns,), dtype of x or float32; None is 1, without a bias.
        bias: like weight; None is 0.
        residual: like x, or float32; None is 0. A float32 residual of 16-bit x costs a copy of x
            and one of out. Under torch's autocast both are promoted to one dtype.
        eps: added to the variance.
        dropout_p: probability, in steps of 2^-16, with which a number of x becomes 0; the others
            are divided by 1 - dropout_p. It costs a kernel that reads x and residual and writes h.
        dropout_seed: from 0 to 2^63 - 1, or int64 of one element on the device of x; equal seeds
            drop numbers at the same places (row in C order, column), whatever strides and dtype.
            None draws one from the generator of the library.
        return_stats: also return float32 (..., 2), mean and 1 / sqrt(variance + eps) of each row:
            what `layer_norm_backward` needs.

    Returns:
        out like x; with a residual (out, h), h like the residual, being that of the next layer; the
        statistics at the end, if wanted. With statistics h is returned wherever dropout_p is not 0,
        as the backward needs it: (out, h, stats).

    Raises:
        TypeError: dtypes, libraries, a bias without a weight, options that are no numbers.
        ValueError: shapes, devices, values of options, a weight that is not contiguous.

    Source: Layer Normalization, arXiv:1607.06450.
    """
    seed, dropout = split(dropout_p, dropout_seed)
    arrays, options = (x, weight, bias, residual, seed), (False, eps, return_stats, *dropout)
    return _returned(FORWARD("layer_norm", arrays, options), residual, return_stats)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    return_stats: bool = False,
) -> Array | tuple[Array, ...]:
    """h / sqrt(mean of h^2 + eps) * weight over the last dimension, h = dropout(x) + residual.

    Everything as in `layer_norm`; the mean among the statistics is 0.

    Source: Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    seed, dropout = split(dropout_p, dropout_seed)
    arrays, options = (x, weight, None, residual, seed), (True, eps, return_stats, *dropout)
    return _returned(FORWARD("rms_norm", arrays, options), residual, return_stats)


def layer_norm_backward(
    dout: Array,
    x: Array,
    weight: Array | None,
    stats: Array,
    *,
    dresidual: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
) -> tuple[Array | None, ...]:
    """Gradients of `layer_norm` for libraries without autograd; deterministic.

    Args:
        dout: gradient of out, like out.
        x: what was normalised: h, if there was a residual or dropout; it may be float32 beside
            16-bit dout.
        weight: of the forward, with the dtype of dout or float32.
        stats: of the forward.
        dresidual: gradient of h from elsewhere, like x; added to dx.
        dropout_p: of the forward.
        dropout_seed: of the forward, which must have been given one.

    Returns:
        (dx, dweight, dbias), like x, weight and weight; without a weight the last two are None. dx
        is the gradient of x and of residual. With a dropout_p that is not 0 these two differ:
        (dx, dweight, dbias, dh), where dx is dropped as x was and has the dtype of dout, and dh,
        like x, is the gradient of h and so of the residual.

    Raises:
        As `layer_norm`.
    """
    seed, dropout = split(dropout_p, dropout_seed)
    arrays, options = (dout, x, weight, stats, dresidual, seed), (False, True, *dropout)
    return BACKWARD("layer_norm_backward", arrays, options)


def rms_norm_backward(
    dout: Array,
    x: Array,
    weight: Array | None,
    stats: Array,
    *,
    dresidual: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
) -> tuple[Array | None, ...]:
    """Gradients of `rms_norm` for libraries without autograd; deterministic.

    Args:
        dout to dropout_seed: as in `layer_norm_backward`, with the stats of `rms_norm`.

    Returns:
        (dx, dweight), with a dropout_p that is not 0 (dx, dweight, dh), each as
        `layer_norm_backward` returns it.

    Raises:
        As `layer_norm`.
    """
    seed, dropout = split(dropout_p, dropout_seed)
    arrays, options = (dout, x, weight, stats, dresidual, seed), (True, False, *dropout)
    dx, dweight, _, *dh = BACKWARD("rms_norm_backward", arrays, options)
    return dx, dweight, *dh


def _returned(
    results: tuple[Array | None, ...], residual: Array | None, return_stats: bool
) -> Array | tuple[Array, ...]:
    """The results of (out, h, statistics) that the caller asked for."""
    out, h, stats = results
    if residual is not None:
        return (out, h, stats) if return_stats else (out, h)
    if return_stats:
        return (out, stats) if h is None else (out, h, stats)
    return out


def _torch_forward() -> TorchSide:
    from . import torch_ops

    return torch_ops.NormForward


def _torch_backward() -> TorchSide:
    from . import torch_ops

    return torch_ops.NormBackward


FORWARD = Operation(dispatch.forward, _torch_forward)
BACKWARD = Operation(dispatch.backward, _torch_backward, first=1, gradient=True)
