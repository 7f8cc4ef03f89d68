"""torch operators ``cupyflash::norm`` and ``cupyflash::group_norm``, each with its backward.

Calls take them where torch has to see them, as those of attention do (``torch_ops.py``).
"""

from typing import Any

import torch
from torch import Tensor

from ..runtime.array import library_of
from ..runtime.torch_calls import require_one_device
from . import autograd, dispatch, group_norm_dispatch
from . import dropout as dropouts
from .detour import result_strides
from .dropout import Dropout
from .groups import dense_like

LIBRARY = library_of(torch.empty(0))


def promoted(x: Tensor, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
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


class NormForward:
    """`dispatch.call_forward` for torch."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """(out, h, statistics) through the operator, which checks when it runs."""
        (x, *others, seed), (rms, eps, _, p, number) = arrays, options
        seed = number if seed is None else seed
        dropout = dropouts.of_traced_call(function, LIBRARY, x, p, seed)
        _refuse_transforms(function)
        p, seed = dropout or (0.0, None)
        out, *h, stats = _norm(*promoted(x, *others), function, rms, eps, seed, p)
        return out, h[0] if h else None, stats

    @staticmethod
    def called(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """Promoted as under autocast; recorded, if a gradient is wanted."""
        (*tensors, seed), (rms, eps, need_stats, p, number) = arrays, options
        seed = number if seed is None else seed
        dropout = dropouts.of_call(function, LIBRARY, tensors[0], p, seed)
        tensors = promoted(*tensors)
        if LIBRARY.wants_gradient(*tensors):
            return autograd.Norm.apply(*tensors, function, rms, eps, dropout)
        return dispatch.forward(function, rms, LIBRARY, *tensors, eps, need_stats, dropout)


class NormBackward:
    """`dispatch.call_backward` for torch: the operator, whose own derivative is an error."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """(dx, dweight, dbias), with dropout (dx, dweight, dbias, dh)."""
        (*tensors, seed), (rms, need_dbias, p, number) = arrays, options
        seed = number if seed is None else seed
        dropout = dropouts.of_backward(function, LIBRARY, tensors[1], p, seed)
        return norm_backward(function, rms, *tensors, need_dbias, dropout)

    @classmethod
    def called(cls, function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """The operator where a derivative is wanted."""
        if LIBRARY.wants_gradient(*arrays):
            return cls.traced(function, arrays, options)
        return dispatch.call_backward(function, LIBRARY, arrays, options)


def norm_backward(
    function: str,
    rms: bool,
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    dresidual: Tensor | None,
    need_dbias: bool,
    dropout: Dropout | None = None,
) -> tuple[Tensor | None, ...]:
    """`dispatch.backward` through the operator, whose own derivative is an error.

    With dropout (dx, dweight, dbias, dh).
    """
    arrays = (dout, x, weight, stats, dresidual)
    dh, *sums = (*_norm_backward(*arrays, function, rms, need_dbias), None, None)[:3]
    if dropout is None:
        return dh, *sums
    return dropout_add(function, dh, None, dropout).to(dout.dtype), *sums, dh


def dropout_add(function: str, x: Tensor, residual: Tensor | None, dropout: Dropout) -> Tensor:
    """`dropout.add` through the operator."""
    return _dropout_add(x, residual, dropout.seed, function, dropout.p)


class GroupNormForward:
    """`group_norm_dispatch.forward` for torch."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor]:
        """Through the operator, which checks when it runs."""
        _refuse_transforms(function)
        return _group_norm(*arrays, *options[:-1])

    @staticmethod
    def called(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor | None]:
        """Recorded for the backward pass, if a gradient is wanted."""
        if LIBRARY.wants_gradient(*arrays):
            return autograd.GroupNorm.apply(*arrays, *options[:-1])
        return group_norm_dispatch.forward(function, LIBRARY, arrays, options)


class GroupNormBackward:
    """`group_norm_dispatch.backward` for torch: the operator, whose derivative is an error."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """(dx, dweight, dbias); without a weight the last two are None."""
        return (*_group_norm_backward(*arrays, *options), None, None)[:3]

    @classmethod
    def called(cls, function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """The operator where a derivative is wanted."""
        if LIBRARY.wants_gradient(*arrays):
            return cls.traced(function, arrays, options)
        return group_norm_dispatch.backward(function, LIBRARY, arrays, options)


# Inductor keeps graphs on disk by the names of operators: new arguments come last, with a default.
@torch.library.custom_op(
    "cupyflash::norm",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, str function, bool rms, "
        "float eps, Tensor? dropout_seed=None, float dropout_p=0.0) -> Tensor[]"
    ),
)
def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    function: str,
    rms: bool,
    eps: float,
    dropout_seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> list[Tensor]:
    """out; h if there is a residual or dropout; statistics."""
    arrays = (x, weight, bias, residual)
    LIBRARY.refuse_tangents(*arrays)
    dropout = None if dropout_seed is None else Dropout(dropout_p, dropout_seed)
    results = dispatch.forward(function, rms, LIBRARY, *arrays, eps, True, dropout)
    return [y for y in results if y is not None]


@_norm.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    function: str,
    rms: bool,
    eps: float,
    dropout_seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> list[Tensor]:
    require_one_device(function, x, weight, bias, residual, dropout_seed)
    stats = x.new_empty((*x.shape[:-1], 2), dtype=torch.float32)
    if residual is None and dropout_seed is None:
        return [_rows_like(x, x.dtype), stats]
    h = _rows_like(x, x.dtype if residual is None else residual.dtype)
    return [_rows_like(x if dropout_seed is None or h.dtype != x.dtype else h, x.dtype), h, stats]


@torch.library.custom_op(
    "cupyflash::dropout_add",
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor seed, str function, float p) -> Tensor",
)
def _dropout_add(
    x: Tensor, residual: Tensor | None, seed: Tensor, function: str, p: float
) -> Tensor:
    """dropout(x) + residual."""
    LIBRARY.refuse_tangents(x, residual)
    return dropouts.add(function, LIBRARY, x, residual, Dropout(p, seed))


@_dropout_add.register_fake
def _(x: Tensor, residual: Tensor | None, seed: Tensor, function: str, p: float) -> Tensor:
    require_one_device(function, x, residual, seed)
    return _rows_like(x, x.dtype if residual is None else residual.dtype)


@torch.library.custom_op(
    "cupyflash::norm_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor x, Tensor? weight, Tensor stats, Tensor? dresidual, str function, "
        "bool rms, bool need_dbias) -> Tensor[]"
    ),
)
def _norm_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    dresidual: Tensor | None,
    function: str,
    rms: bool,
    need_dbias: bool,
) -> list[Tensor]:
    """dx, dweight if there is a weight, dbias if wanted."""
    LIBRARY.refuse_tangents(dout, x, weight, stats, dresidual)
    arrays = (dout, x, weight, stats, dresidual)
    results = dispatch.backward(function, rms, LIBRARY, *arrays, need_dbias)
    return [y for y in results if y is not None]


@_norm_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> list[Tensor]:
    require_one_device(rest[2], x, dout, weight, *rest[:2])
    sums = 0 if weight is None else 1 + rest[-1]
    return [_rows_like(x, x.dtype), *(weight.new_empty(weight.shape) for _ in range(sums))]


@torch.library.custom_op(
    "cupyflash::group_norm",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor? weight, Tensor? bias, SymInt num_groups, float eps, str activation) "
        "-> (Tensor out, Tensor stats)"
    ),
)
def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    LIBRARY.refuse_tangents(x, weight, bias)
    options = (num_groups, eps, activation, True)
    return group_norm_dispatch.forward("group_norm", LIBRARY, (x, weight, bias), options)


@_group_norm.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, *options: Any
) -> tuple[Tensor, Tensor]:
    require_one_device("group_norm", x, weight, bias)
    stats = x.new_empty((x.shape[0], num_groups, 2), dtype=torch.float32)
    return _image_like(x), stats


@torch.library.custom_op(
    "cupyflash::group_norm_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, str activation) "
        "-> Tensor[]"
    ),
)
def _group_norm_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    activation: str,
) -> list[Tensor]:
    """dx; dweight and dbias if there is a weight."""
    LIBRARY.refuse_tangents(dout, x, weight, bias, stats)
    arrays = (dout, x, weight, bias, stats)
    results = group_norm_dispatch.backward("group_norm_backward", LIBRARY, arrays, (activation,))
    return [y for y in results if y is not None]


@_group_norm_backward.register_fake
def _(
    dout: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    require_one_device("group_norm_backward", x, dout, weight, bias, rest[0])
    return [_image_like(x), *(y.new_empty(y.shape) for y in (weight, bias) if y is not None)]


def _setup_norm(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weight, bias, residual, function, rms, _, *dropout = inputs
    seed, p = dropout or (None, 0.0)
    ctx.save_for_backward(output[1] if len(output) > 2 else x, weight, output[-1], seed)
    ctx.arguments = (function, rms, bias is not None, residual is not None, x.dtype, p)
    ctx.mark_non_differentiable(output[-1])


def _gradient_of_norm(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    dout, *dh, _ = gradients
    h, weight, stats, seed = ctx.saved_tensors
    function, rms, has_bias, has_residual, dtype, p = ctx.arguments
    function, arrays = f"{function}_backward", (dout, h, weight, stats, *(dh or [None]))
    dropout = None if seed is None else Dropout(p, seed)
    dx, dweight, dbias, *dh = norm_backward(function, rms, *arrays, has_bias, dropout)
    of_residual = (dh or [dx])[0] if has_residual else None
    # torch leaves out the last arguments where they have their defaults, and wants none for them.
    options = 3 if dropout is None else 5
    return dx.to(dtype), dweight, dbias, of_residual, *[None] * options


def _setup_dropout_add(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, residual, seed, *ctx.options = inputs
    ctx.save_for_backward(seed)
    ctx.dtype, ctx.has_residual = x.dtype, residual is not None


def _gradient_of_dropout_add(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    function, p = ctx.options
    dx = dropout_add(function, dh, None, Dropout(p, *ctx.saved_tensors)).to(ctx.dtype)
    return dx, dh if ctx.has_residual else None, None, None, None


def _setup_group_norm(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, _, ctx.activation = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient_of_group_norm(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    arrays, options = (dout, *ctx.saved_tensors), (ctx.activation,)
    gradients = GroupNormBackward.traced("group_norm_backward", arrays, options)
    return *gradients, None, None, None


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError("cupyflash: norms have no second derivative")


_dropout_add.register_autograd(_gradient_of_dropout_add, setup_context=_setup_dropout_add)
_norm.register_autograd(_gradient_of_norm, setup_context=_setup_norm)
_norm_backward.register_autograd(_no_second_derivative)
_group_norm.register_autograd(_gradient_of_group_norm, setup_context=_setup_group_norm)
_group_norm_backward.register_autograd(_no_second_derivative)


def _rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the norms allocate for a result like this tensor."""
    strides = result_strides(LIBRARY, LIBRARY.view(x))
    return x.new_empty_strided(tuple(x.shape), strides, dtype=dtype)


def _image_like(x: Tensor) -> Tensor:
    """What `cupyflash.group_norm` allocates for a result like x (batch, channels, ...)."""
    view = LIBRARY.view(x)
    return x.new_empty_strided(view.shape, dense_like(view))


def _refuse_transforms(function: str) -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{function}: is not built for transforms of torch.func")
