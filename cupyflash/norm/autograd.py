"""The gradient of GroupNorm for torch tensors."""

from typing import Any

import torch

from ..runtime.array import library_of
from . import group_norm_dispatch


class GroupNorm(torch.autograd.Function):
    """(out, statistics) of `group_norm_dispatch.forward`."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, num_groups, eps, activation):  # noqa: ANN001, ANN205
        library = library_of(x)
        options = (num_groups, eps, activation, True)
        out, stats = group_norm_dispatch.forward("group_norm", library, (x, weight, bias), options)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.activation = activation
        ctx.mark_non_differentiable(stats)
        return out, stats

    @staticmethod
    def backward(ctx: Any, dout, _):  # noqa: ANN001, ANN205
        x, weight, bias, stats = ctx.saved_tensors
        call = "group_norm_backward", (dout, x, weight, bias, stats), (ctx.activation,)
        if torch.is_grad_enabled():  # create_graph=True: not as if the gradients were constants
            from .torch_ops import GroupNormBackward

            return *GroupNormBackward.traced(*call), None, None, None
        function, arrays, options = call
        gradients = group_norm_dispatch.backward(function, library_of(x), arrays, options)
        return *gradients, None, None, None
