"""Gradients of the norms for torch tensors."""

from typing import Any

import torch

from ..runtime.array import library_of
from . import dispatch, group_norm_dispatch
from . import dropout as dropouts
from .dropout import Dropout


class Norm(torch.autograd.Function):
    """(out, h, statistics) of `norm_dispatch.forward`."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, residual, function, rms, eps, dropout):  # noqa: ANN001, ANN205
        out, h, stats = dispatch.forward(
            function, rms, library_of(x), x, weight, bias, residual, eps, True, dropout
        )
        p, seed = dropout or (0.0, None)
        ctx.save_for_backward(x if h is None else h, weight, stats, seed)
        ctx.arguments = (function, rms, bias is not None, residual is not None, x.dtype, p)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return out, h, stats

    @staticmethod
    def backward(ctx: Any, dout, dh, _):  # noqa: ANN001, ANN205
        h, weight, stats, seed = ctx.saved_tensors
        function, rms, has_bias, has_residual, dtype, p = ctx.arguments
        function, dweight, dbias = f"{function}_backward", None, None
        seen = torch.is_grad_enabled()  # create_graph=True: not as if gradients were constants
        if dout is not None:
            arrays = (dout, h, weight, stats, dh)
            if seen:
                from .torch_ops import norm_backward

                gradients = norm_backward(function, rms, *arrays, has_bias)
            else:
                gradients = dispatch.backward(function, rms, library_of(h), *arrays, has_bias)
            dh, dweight, dbias = gradients
        dx = dh
        if seed is not None and seen:
            from .torch_ops import dropout_add

            dx = dropout_add(function, dh, None, Dropout(p, seed))
        elif seed is not None:
            dx = dropouts.add(function, library_of(h), dh, None, Dropout(p, seed))
        of_residual = dh if has_residual else None
        return dx.to(dtype), dweight, dbias, of_residual, None, None, None, None


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
