"""Torch operators, registered without the Python layers that ``torch.library.custom_op`` adds.

Those layers cost more than the rest of a call. What they would see to holds here: an operator
returns new memory, and Dynamo leaves it alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._library import autograd

from .loaded import untraced
from .torch_calls import refuse_batched

OPERATORS = torch.library.Library("cupyflash", "FRAGMENT")
BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)

_kernels: dict[Any, Callable] = {}  # by operator
_direct: dict[int, bool] = {}  # by the bits of dispatch keys: nothing follows autograd but a kernel


def operator(schema: str) -> Callable[[Callable], Any]:
    """Registers the decorated function as the operator of this schema, which takes its name.

    Args:
        schema: the operator's name with arguments and results; it marks those that it changes.
    """

    def register(kernel: Callable) -> Any:
        name = schema.partition("(")[0]
        OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        OPERATORS.impl(name, untraced(kernel), "CompositeExplicitAutograd")
        found = getattr(torch.ops.cupyflash, name).default
        _kernels[found] = kernel
        return found

    return register


def register_fake(operator: Any) -> Callable[[Callable], Callable]:
    """Has the decorated function make the empty results of an operator for fake arguments."""
    return torch.library.register_fake(operator.name(), lib=OPERATORS)


def register_autograd(
    operator: Any,
    backward: Callable,
    setup_context: Callable | None = None,
    several: bool = False,
) -> None:
    """Gives an operator a derivative, as ``torch.library.register_autograd`` says.

    In a compiled training step nothing requires a gradient and nothing stands between autograd and
    the kernel. Then the kernel is called at once, without the way back through the dispatcher,
    which converts all arguments again.

    Args:
        several: the derivative takes several gradients at once, of operations of torch alone.
    """
    name, backward = operator.name(), backward if several else _of_one(backward)
    try:
        derivative = autograd.make_autograd_impl(operator, autograd.Info(backward, setup_context))
        below, requires_grad = torch._C._after_autograd_keyset, torch._C._any_requires_grad
        bits_of = torch._C.DispatchKeySet.raw_repr
    except AttributeError:  # these names are private: torch 2.7 to 2.14 has them
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=OPERATORS)
        return
    kernel, enabled = _kernels[operator], torch.is_grad_enabled

    def call(keys: Any, *arguments: Any) -> Any:
        bits = bits_of(keys)
        direct = _direct.get(bits)
        if direct is None:  # what follows takes ten times as long as the look-up
            direct = _direct[bits] = (keys & below).highestPriorityTypeId() in BACKENDS
        if direct and not (enabled() and requires_grad(*arguments)):
            return kernel(*arguments)
        return derivative(keys, *arguments)

    OPERATORS.impl(name.partition("::")[2], untraced(call), "Autograd", with_keyset=True)


def _of_one(backward: Callable) -> Callable:
    """The derivative for one gradient at a time; for several torch would miss a rule."""

    def checked(ctx: Any, *gradients: Any) -> Any:
        for x in gradients:
            refuse_batched(*(x if isinstance(x, list | tuple) else (x,)))
        return backward(ctx, *gradients)

    return checked


def register_vmap(operator: Any, rule: Callable) -> None:
    """Gives an operator a rule for ``torch.func.vmap``, as ``torch.library.register_vmap`` says."""
    torch.library.register_vmap(operator.name(), rule, lib=OPERATORS)
