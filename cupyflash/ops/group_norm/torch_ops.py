"""torch operators ``cupyflash::group_norm`` and ``group_norm_backward``, and their autograd.

Calls take them where torch has to see them, as those of attention do (``torch_ops.py``).
"""

from typing import Any

import torch
from torch import Tensor

from ...runtime.lookup import library_of
from ...runtime.torch_calls import (
    no_second_derivative,
    promised_strides,
    refuse_batched,
    refuse_transforms,
    require_one_device,
)
from ...runtime.torch_operator import operator, register_autograd, register_fake
from .dispatch import backward, forward
from .groups import dense_like

LIBRARY = library_of(torch.empty(0))


class GroupNormForward:
    """`forward` for torch."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor]:
        """Through the operator, which checks when it runs."""
        refuse_transforms(function)
        return _group_norm(*arrays, *options[:-1])

    @staticmethod
    def called(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor | None]:
        """Recorded for the backward pass, if a gradient is wanted."""
        if LIBRARY.wants_gradient(*arrays):
            return GroupNorm.apply(*arrays, *options[:-1])
        return forward(function, LIBRARY, arrays, options)


class GroupNormBackward:
    """`backward` for torch: the operator, whose derivative is an error."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor | None, ...]:
        """(dx, dweight, dbias); without a weight the last two are None."""
        return (*_group_norm_backward(*arrays, *options), None, None)[:3]


class GroupNorm(torch.autograd.Function):
    """(out, statistics) of `forward`."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, num_groups, eps, activation):  # noqa: ANN001, ANN205
        options = (num_groups, eps, activation, True)
        out, stats = forward("group_norm", LIBRARY, (x, weight, bias), options)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.activation = activation
        ctx.mark_non_differentiable(stats)
        return out, stats

    @staticmethod
    def backward(ctx: Any, dout, _):  # noqa: ANN001, ANN205
        refuse_batched(dout)
        x, weight, bias, stats = ctx.saved_tensors
        call = "group_norm_backward", (dout, x, weight, bias, stats), (ctx.activation,)
        if torch.is_grad_enabled():  # create_graph=True: not as if the gradients were constants
            return *GroupNormBackward.traced(*call), None, None, None
        function, arrays, options = call
        gradients = backward(function, LIBRARY, arrays, options)
        return *gradients, None, None, None


# Inductor keeps graphs on disk by the names of operators: new arguments come last, with a default.
@operator(
    "group_norm(Tensor x, Tensor? weight, Tensor? bias, SymInt num_groups, float eps, "
    "str activation) -> (Tensor out, Tensor stats)"
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
    return forward("group_norm", LIBRARY, (x, weight, bias), options)


@register_fake(_group_norm)
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, *options: Any
) -> tuple[Tensor, Tensor]:
    require_one_device("group_norm", x, weight, bias)
    stats = x.new_empty((x.shape[0], num_groups, 2), dtype=torch.float32)
    return _image_like(x), stats


@operator(
    "group_norm_backward(Tensor dout, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, "
    "str activation) -> Tensor[]"
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
    results = backward("group_norm_backward", LIBRARY, arrays, (activation,))
    return [y for y in results if y is not None]


@register_fake(_group_norm_backward)
def _(
    dout: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    require_one_device("group_norm_backward", x, dout, weight, bias, rest[0])
    return [_image_like(x), *(y.new_empty(y.shape) for y in (weight, bias) if y is not None)]


def _setup_group_norm(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, _, ctx.activation = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient_of_group_norm(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    arrays, options = (dout, *ctx.saved_tensors), (ctx.activation,)
    gradients = GroupNormBackward.traced("group_norm_backward", arrays, options)
    return *gradients, None, None, None


register_autograd(_group_norm, _gradient_of_group_norm, setup_context=_setup_group_norm)
register_autograd(_group_norm_backward, no_second_derivative("norms have no second derivative"))


def _image_like(x: Tensor) -> Tensor:
    """An empty tensor as `cupyflash.group_norm` allocates it for x (batch, channels, ...)."""
    view = LIBRARY.view(x)
    return x.new_empty_strided(view.shape, promised_strides(view, dense_like))
