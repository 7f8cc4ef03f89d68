"""Functions for the torch operators of all topics: calls outside of graphs, checks, refusals."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from .array import View, dense_strides

LARGE = 2**20  # stands for an unknown size where the order of axes depends on it


def transforms_active() -> bool:
    """Whether a transform of torch.func runs; Dynamo maps operators by itself and sees none."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def refuse_transforms(function: str) -> None:
    """Raises NotImplementedError within transforms of torch.func."""
    if transforms_active():
        raise NotImplementedError(f"{function}: is not built for transforms of torch.func")


def refuse_functionalize(function: str) -> None:
    """Raises NotImplementedError within torch.func.functionalize."""
    if current_transform() == TransformType.Functionalize:
        fact = "is not built for torch.func.functionalize, allowed are grad and vmap"
        raise NotImplementedError(f"{function}: {fact}, got a call within it")


def current_transform() -> Any:
    """The innermost transform of torch.func, or None."""
    if not torch._C._are_functorch_transforms_active():
        return None
    return retrieve_current_functorch_interpreter().key()


def no_second_derivative(fact: str) -> Callable[..., None]:
    """The derivative of an operator that is a gradient itself: an error that states the fact."""

    def backward(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError(f"cupyflash: {fact}")

    return backward


def refuse_batched(*gradients: Tensor | None) -> None:
    """Raises NotImplementedError if a gradient stands for several, and has no memory of its own."""
    for x in gradients:
        if x is not None and torch._C._functorch.is_legacy_batchedtensor(x):
            fact = "several gradients at once (is_grads_batched, vectorize) are not built"
            raise NotImplementedError(f"cupyflash: {fact}, allowed is one backward for each")


def readable(dout: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of out as the kernels read it: None is 0, as where only the LSE is used."""
    if dout is None:
        return torch.zeros_like(out)
    # .sum() hands down an expanded scalar, whose strides are 0.
    return dout if dout.stride(-1) == 1 else dout.contiguous()


def require_one_device(function: str, first: Tensor, *others: Tensor | None) -> None:
    """All tensors must be on the device of the first; meta tensors and real ones do not mix.

    Raises:
        ValueError: a tensor is on another device.
    """
    for x in others:
        if x is not None and x.device != first.device:
            fact = "all tensors must be on the same device"
            raise ValueError(f"{function}: {fact}, got {first.device} and {x.device}")


def promised_strides(
    like: View, rule: Callable[[View], tuple[int, ...]], columns: int | None = None
) -> tuple[int, ...]:
    """The strides of a dense result like an input, as a fake of an operator promises them.

    Sizes that only the run knows, as that of ``x[mask]``, are symbols that no rule can compare.
    They count as large, which tells the order of the axes.

    Args:
        rule: gives the strides, of the view of the input.
        columns: of the result in memory; those of the input by default.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not free_unbacked_symbols((*like.shape, *like.strides)):
        return rule(like)
    known = (tuple(map(_known, numbers)) for numbers in (like.shape, like.strides))
    steps = rule(View(*known, like.dtype, like.device))
    order = sorted(range(len(steps)), key=lambda axis: -steps[axis])
    return dense_strides((*like.shape[:-1], columns or like.shape[-1]), order)


def _known(size: Any) -> Any:
    """A size, `LARGE` in the place of each symbol if one of them is unknown."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not free_unbacked_symbols(size):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, LARGE)))
