"""Gradients for torch tensors: one autograd function for dense and packed attention."""

from typing import Any

import torch

from ..runtime.array import library_of
from . import dispatch
from .extras import NO_EXTRAS, Extras


class Attention(torch.autograd.Function):
    """(out, lse) of `dispatch.forward_without_gradient`; either may have a gradient.

    Bias and sinks are arguments of their own, as only those have gradients.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sinks, function, options, extras, deterministic):  # noqa: ANN001, ANN205
        out, lse = dispatch.forward_without_gradient(
            function, library_of(q), q, k, v, options, extras, True
        )
        if out._is_view():  # columns of a wider array: torch would refuse out.mul_(x)
            out = out.detach()
        ctx.save_for_backward(q, k, v, out, lse, *(() if extras is NO_EXTRAS else extras))
        ctx.arguments = (function, options, deterministic)
        ctx.set_materialize_grads(False)  # a dlse of zeros would be read for nothing
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):  # noqa: ANN001, ANN205
        q, k, v, out, lse, *extras = ctx.saved_tensors
        function, options, deterministic = ctx.arguments
        dout = readable(dout, out)
        backward = dispatch.backward
        if torch.is_grad_enabled():  # create_graph=True: not as if the gradients were constants
            from .torch_ops import attention_backward as backward
        gradients = backward(
            function, dout, q, k, v, out, lse, options, Extras(*extras) if extras else NO_EXTRAS,
            deterministic, ctx.needs_input_grad[3], dlse,
        )  # fmt: skip
        return *gradients, None, None, None, None


def readable(dout: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """The gradient of out as the kernels read it: None is 0, as where only the LSE is used."""
    if dout is None:
        return torch.zeros_like(out)
    # An expanded scalar, as .sum() hands it down.
    return dout if dout.stride(-1) == 1 else dout.contiguous()


def attention_with_gradient(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: tuple,
    extras: Extras,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), recorded for the backward pass of torch; dropout needs a tensor for its seed."""
    learned = extras.bias, extras.sinks
    return Attention.apply(q, k, v, *learned, function, options, extras, deterministic)
