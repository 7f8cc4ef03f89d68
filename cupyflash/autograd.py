"""Gradients for torch tensors: one autograd function for dense and packed attention."""

from typing import Any

import torch

from . import dispatch
from .array import library_of


class Attention(torch.autograd.Function):
    """(out, lse) of `dispatch.forward_without_gradient`; the LSE has no gradient."""

    @staticmethod
    def forward(ctx: Any, q, k, v, function, options, alibi_slopes, cu_seqlens, deterministic):  # noqa: ANN001, ANN205
        out, lse = dispatch.forward_without_gradient(
            function, library_of(q), q, k, v, options, alibi_slopes, cu_seqlens, True
        )
        ctx.save_for_backward(q, k, v, out, lse, alibi_slopes, *(cu_seqlens or ()))
        ctx.arguments = (function, options, deterministic)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout, _):  # noqa: ANN001, ANN205
        q, k, v, out, lse, alibi_slopes, *cu_seqlens = ctx.saved_tensors
        function, options, deterministic = ctx.arguments
        if dout.stride(-1) != 1:  # an expanded scalar, as .sum() hands it down
            dout = dout.contiguous()
        gradients = dispatch.backward(
            function, dout, q, k, v, out, lse, options, alibi_slopes,
            tuple(cu_seqlens) or None, deterministic,
        )  # fmt: skip
        return *gradients, None, None, None, None, None


def attention_with_gradient(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: tuple,
    alibi_slopes: torch.Tensor | None,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), recorded for the backward pass of torch."""
    return Attention.apply(q, k, v, function, options, alibi_slopes, cu_seqlens, deterministic)
