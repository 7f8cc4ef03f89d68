"""LayerNorm and RMSNorm, fused with the addition of a residual."""

from ..runtime.array import Array, compiling, library_of
from ..runtime.checks import known_library
from . import dispatch


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-5,
    return_stats: bool = False,
) -> Array | tuple[Array, ...]:
    """(h - mean) / sqrt(variance + eps) * weight + bias over the last dimension, h = x + residual.

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
        return_stats: also return float32 (..., 2), mean and 1 / sqrt(variance + eps) of each row:
            what `layer_norm_backward` needs.

    Returns:
        out like x; with a residual (out, h), h like the residual, being that of the next layer; the
        statistics at the end, if wanted.

    Raises:
        TypeError: dtypes, libraries, a bias without a weight, an eps that is no number.
        ValueError: shapes, devices, eps, a weight that is not contiguous.

    Source: Layer Normalization, arXiv:1607.06450.
    """
    return _forward("layer_norm", False, (x, weight, bias, residual), eps, return_stats)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    return_stats: bool = False,
) -> Array | tuple[Array, ...]:
    """h / sqrt(mean of h^2 + eps) * weight over the last dimension, h = x + residual.

    Everything as in `layer_norm`; the mean among the statistics is 0.

    Source: Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    return _forward("rms_norm", True, (x, weight, None, residual), eps, return_stats)


def layer_norm_backward(
    dout: Array, x: Array, weight: Array | None, stats: Array, *, dresidual: Array | None = None
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of `layer_norm` for libraries without autograd; repeatable bit by bit.

    Args:
        dout: gradient of out, like out.
        x: what was normalised: h, if there was a residual; it may be float32 beside 16-bit dout.
        weight: of the forward, with the dtype of dout or float32.
        stats: of the forward.
        dresidual: gradient of h from elsewhere, like x; added to dx.

    Returns:
        (dx, dweight, dbias), like x, weight and weight; without a weight the last two are None. dx
        is the gradient of x and of residual.

    Raises:
        As `layer_norm`.
    """
    return _backward("layer_norm_backward", False, (dout, x, weight, stats, dresidual), True)


def rms_norm_backward(
    dout: Array, x: Array, weight: Array | None, stats: Array, *, dresidual: Array | None = None
) -> tuple[Array, Array | None]:
    """(dx, dweight) of `rms_norm`, as `layer_norm_backward`."""
    arrays = (dout, x, weight, stats, dresidual)
    return _backward("rms_norm_backward", True, arrays, False)[:2]


def _forward(
    function: str, rms: bool, arrays: tuple[Array | None, ...], eps: float, return_stats: bool
) -> Array | tuple[Array, ...]:
    out, h, stats = _results(function, rms, *arrays, eps, return_stats)
    if arrays[-1] is None:
        return (out, stats) if return_stats else out
    return (out, h, stats) if return_stats else (out, h)


def _results(
    function: str,
    rms: bool,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    eps: float,
    need_stats: bool,
) -> tuple[Array | None, ...]:
    """`norm_dispatch.forward`, by whatever way the library of x wants."""
    if compiling():
        from . import torch_ops

        return torch_ops.norm(function, rms, x, weight, bias, residual, eps)
    library, arrays = library_of(x), (x, weight, bias, residual)
    if library is None:
        call = lambda *known: dispatch.forward(  # noqa: E731
            function, rms, library_of(known[0]), *known, eps, need_stats
        )
        return known_library(function, call, *arrays)
    if library.watched(*arrays):
        from . import torch_ops

        if library.traced(*arrays):
            return torch_ops.norm(function, rms, *arrays, eps)
        arrays = torch_ops.promoted(*arrays)
    if library.wants_gradient(*(y for y in arrays if library_of(y) is library)):
        from .autograd import norm_with_gradient

        return norm_with_gradient(function, rms, *arrays, eps)
    return dispatch.forward(function, rms, library, *arrays, eps, need_stats)


def _backward(
    function: str, rms: bool, arrays: tuple[Array | None, ...], need_dbias: bool
) -> tuple[Array, ...]:
    if compiling():
        from ..runtime.torch_eager import eagerly

        return eagerly(_backward, function, rms, arrays, need_dbias)
    call = lambda *known: dispatch.backward(  # noqa: E731
        function, rms, library_of(known[1]), *known, need_dbias
    )
    library = library_of(arrays[1])
    if library is None:
        return known_library(function, call, *arrays)
    if library.traced(arrays[1], *arrays) or library.wants_gradient(
        *(y for y in arrays if library_of(y) is library)
    ):
        from . import torch_ops

        return torch_ops.norm_backward(function, rms, *arrays, need_dbias)
    return call(*arrays)
