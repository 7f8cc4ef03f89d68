"""Gradients for torch tensors: one autograd function for dense and packed attention."""

from typing import Any

import torch

from ..array import library_of
from . import dispatch
from .extras import NO_EXTRAS, Extras


class Attention(torch.autograd.Function):
    """(out, lse) of `dispatch.forward_without_gradient`; the LSE has no gradient.

    Bias and sinks are arguments of their own, as only those have gradients.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sinks, function, options, extras, deterministic):  # noqa: ANN001, ANN205
        out, lse = dispatch.forward_without_gradient(
            function, library_of(q), q, k, v, options, extras, True
        )
        ctx.save_for_backward(q, k, v, out, lse, *(() if extras is NO_EXTRAS else extras))
        ctx.arguments = (function, options, deterministic)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, _):  # noqa: ANN001, ANN205
        q, k, v, out, lse, *extras = ctx.saved_tensors
        function, options, deterministic = ctx.arguments
        if dout.stride(-1) != 1:  # an expanded scalar, as .sum() hands it down
            dout = dout.contiguous()
        backward = dispatch.backward
        if torch.is_grad_enabled():  # create_graph=True: not as if the gradients were constants
            from .torch_ops import attention_backward as backward
        gradients = backward(
            function, dout, q, k, v, out, lse, options, Extras(*extras) if extras else NO_EXTRAS,
            deterministic, bias_grad=ctx.needs_input_grad[3],
        )  # fmt: skip
        return *gradients, None, None, None, None


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
