"""LayerNorm and RMSNorm for torch: the operators, and the gradients of plain tensors.

The operators are ``cupyflash::norm``, ``norm_backward`` and ``dropout_add``. Calls take them where
torch has to see them: under torch.compile and dispatch modes, and for a second derivative. Plain
tensors that want a gradient take `Norm`, which is cheaper.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.lookup import library_of
from ...runtime.philox import require_probability, require_seed_array
from ...runtime.rows import result_strides
from ...runtime.torch_calls import (
    no_second_derivative,
    promised_strides,
    refuse_batched,
    refuse_transforms,
    require_one_device,
)
from ...runtime.torch_operator import operator, register_autograd, register_fake
from . import dispatch, dropout

LIBRARY = library_of(torch.empty(0))


class NormForward:
    """The forward for torch."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """(out, h, statistics) through the operator, which checks when it runs."""
        (x, *others, seed), (rms, eps, _, p, number) = arrays, options
        p, seed = dropout.resolve(function, LIBRARY, x, p, number, seed)
        refuse_transforms(function)
        out, *h, stats = _norm(*_promoted(x, *others), function, rms, eps, seed, p)
        return out, h[0] if h else None, stats

    @staticmethod
    def called(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """Promoted as under autocast; recorded, if a gradient is wanted."""
        (*tensors, seed), (rms, eps, _, p, number) = arrays, options
        tensors = _promoted(*tensors)
        if not LIBRARY.wants_gradient(*tensors):
            return dispatch.forward(function, LIBRARY, (*tensors, seed), options)
        p, seed = dropout.resolve(function, LIBRARY, tensors[0], p, number, seed)
        return Norm.apply(*tensors, function, rms, eps, seed, p)


class NormBackward:
    """The backward for torch."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """(dx, dweight, dbias), with dropout (dx, dweight, dbias, dh), through the operators."""
        (*tensors, seed), (rms, need_dbias, p, number) = arrays, options
        dout, x, *_ = tensors
        p, seed = dropout.resolve(function, LIBRARY, x, p, number, seed, drawn=False)
        dh, *sums = (*_norm_backward(*tensors, function, rms, need_dbias), None, None)[:3]
        if not p:
            return dh, *sums
        return _dropout_add(dh, None, seed, function, p).to(dout.dtype), *sums, dh


def _plain_backward(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
    return dispatch.backward(function, LIBRARY, arrays, options)


class Norm(torch.autograd.Function):
    """(out, h, statistics) of tensors of which some want a gradient."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, residual, function, rms, eps, seed, p):  # noqa: ANN001, ANN205
        arrays, options = (x, weight, bias, residual, seed), (rms, eps, True, p, None)
        out, h, stats = dispatch.forward(function, LIBRARY, arrays, options)
        _save(ctx, arrays, (function, rms, p), h, stats)
        ctx.set_materialize_grads(False)
        return out, h, stats

    @staticmethod
    def backward(ctx: Any, dout, dh, _):  # noqa: ANN001, ANN205
        refuse_batched(dout, dh)
        # With create_graph=True the operators compute them, or gradients would count as constants.
        call = NormBackward.traced if torch.is_grad_enabled() else _plain_backward
        return *_gradients(ctx, dout, dh, call), *[None] * 5


class Arguments(NamedTuple):
    """The arguments of ``cupyflash::norm``."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    function: str
    rms: bool
    eps: float
    dropout_seed: Tensor | None = None
    dropout_p: float = 0.0

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        """All tensors, the seed of dropout last."""
        return *self[:4], self.dropout_seed


@operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, str function, bool rms, "
    "float eps, Tensor? dropout_seed=None, float dropout_p=0.0) -> Tensor[]"
)
def _norm(*arguments: Any) -> list[Tensor]:
    """out; h if there is a residual or dropout; statistics."""
    given = Arguments(*arguments)
    LIBRARY.refuse_tangents(*given.arrays)
    options = (given.rms, given.eps, True, given.dropout_p, None)
    results = dispatch.forward(given.function, LIBRARY, given.arrays, options)
    return [y for y in results if y is not None]


@register_fake(_norm)
def _(*arguments: Any) -> list[Tensor]:
    given = Arguments(*arguments)
    x, residual, drops = given.x, given.residual, bool(given.dropout_p)
    require_one_device(given.function, *given.arrays)
    stats = x.new_empty((*x.shape[:-1], 2), dtype=torch.float32)
    if residual is None and not drops:
        return [_rows_like(x, x.dtype), stats]
    h = _rows_like(x, x.dtype if residual is None else residual.dtype)
    return [_rows_like(h if drops and h.dtype == x.dtype else x, x.dtype), h, stats]


@operator("dropout_add(Tensor x, Tensor? residual, Tensor seed, str function, float p) -> Tensor")
def _dropout_add(
    x: Tensor, residual: Tensor | None, seed: Tensor, function: str, p: float
) -> Tensor:
    """dropout(x) + residual."""
    LIBRARY.refuse_tangents(x, residual)
    require_probability(function, p)
    require_seed_array(function, LIBRARY, x, seed)
    return dropout.add(function, LIBRARY, x, residual, p, seed)


@register_fake(_dropout_add)
def _(x: Tensor, residual: Tensor | None, seed: Tensor, function: str, p: float) -> Tensor:
    require_one_device(function, x, residual, seed)
    return _rows_like(x, x.dtype if residual is None else residual.dtype)


@operator(
    "norm_backward(Tensor dout, Tensor x, Tensor? weight, Tensor stats, Tensor? dresidual, "
    "str function, bool rms, bool need_dbias) -> Tensor[]"
)
def _norm_backward(*arguments: Any) -> list[Tensor]:
    """dx, dweight if there is a weight, dbias if wanted."""
    *arrays, function, rms, need_dbias = arguments
    LIBRARY.refuse_tangents(*arrays)
    options = (rms, need_dbias, 0.0, None)
    results = dispatch.backward(function, LIBRARY, (*arrays, None), options)
    return [y for y in results if y is not None]


@register_fake(_norm_backward)
def _(dout: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> list[Tensor]:
    require_one_device(rest[2], x, dout, weight, *rest[:2])
    sums = 0 if weight is None else 1 + rest[-1]
    return [_rows_like(x, x.dtype), *(weight.new_empty(weight.shape) for _ in range(sums))]


def _save(ctx: Any, arrays: tuple, options: tuple, h: Tensor | None, stats: Tensor) -> None:
    """Keep what `_gradients` needs.

    Args:
        arrays: x, weight, bias, residual and the seed of dropout.
        options: the name of the function, rms, and the probability of dropout.
        h: the input of the norm, None where that is x.
    """
    x, weight, bias, residual, seed = arrays
    ctx.save_for_backward(x if h is None else h, weight, stats, seed)
    ctx.options = (*options, bias is not None, residual is not None, x.dtype)
    ctx.mark_non_differentiable(stats)


def _gradients(
    ctx: Any, dout: Tensor | None, dh: Tensor | None, call: Callable
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and residual, by a ``call`` of the backward."""
    h, weight, stats, seed = ctx.saved_tensors
    function, rms, p, has_bias, has_residual, dtype = ctx.options
    function, dweight, dbias, dx = f"{function}_backward", None, None, dh
    if dout is None and dh is None:  # a function behind this one gave no gradients
        return None, None, None, None
    if dout is not None:
        arrays = (dout, h, weight, stats, dh, seed)
        dx, dweight, dbias, *of_h = call(function, arrays, (rms, has_bias, p, None))
        dh = of_h[0] if of_h else dx
    elif p:
        dx = _dropout_add(dh, None, seed, function, p)
    return dx.to(dtype), dweight, dbias, dh if has_residual else None


def _setup_norm(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    given = Arguments(*inputs)
    options, h = (given.function, given.rms, given.dropout_p), output[1:-1]
    _save(ctx, given.arrays, options, h[0] if h else None, output[-1])
    # torch leaves out the last arguments where they have their defaults, and wants none for them.
    ctx.num_options = 5 if given.dropout_p else 3 if given.dropout_seed is None else 4


def _gradient_of_norm(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    dout, *dh, _ = gradients
    results = _gradients(ctx, dout, dh[0] if dh else None, NormBackward.traced)
    return *results, *[None] * ctx.num_options


def _setup_dropout_add(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, residual, seed, *ctx.options = inputs
    ctx.save_for_backward(seed)
    ctx.dtype, ctx.has_residual = x.dtype, residual is not None


def _gradient_of_dropout_add(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    dx = _dropout_add(dh, None, *ctx.saved_tensors, *ctx.options).to(ctx.dtype)
    return dx, dh if ctx.has_residual else None, None, None, None


register_autograd(_norm, _gradient_of_norm, setup_context=_setup_norm)
register_autograd(_norm_backward, no_second_derivative("norms have no second derivative"))
register_autograd(_dropout_add, _gradient_of_dropout_add, setup_context=_setup_dropout_add)


def _promoted(x: Tensor, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    """x and residual as torch's + would see them under autocast, where layers mix dtypes.

    With them go a weight and bias of 16 bits, which would be refused beside float32.
    """
    device, given = x.device.type, (x, weight, bias, residual)
    if not isinstance(residual, Tensor) or x.is_meta or not torch.is_autocast_enabled(device):
        return given
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if x.dtype == residual.dtype or dtype != torch.float32:
        return x.to(dtype), weight, bias, residual.to(dtype)
    half = (torch.float16, torch.bfloat16)
    scales = (
        y.to(dtype) if isinstance(y, Tensor) and y.dtype in half else y for y in (weight, bias)
    )
    return x.to(dtype), *scales, residual.to(dtype)


def _rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result like this tensor, with the strides that the norms give it."""
    rule = functools.partial(result_strides, LIBRARY)
    strides = promised_strides(LIBRARY.view(x), rule)
    return x.new_empty_strided(tuple(x.shape), strides, dtype=dtype)
