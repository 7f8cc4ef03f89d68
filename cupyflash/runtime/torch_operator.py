"""Torch operators, registered without the Python layers that ``torch.library.custom_op`` adds.

Those layers cost more than the rest of a call. What they would see to holds here: an operator
returns new memory, and Dynamo leaves it alone.
"""

from collections.abc import Callable
from typing import Any

import torch

from .loaded import untraced

OPERATORS = torch.library.Library("cupyflash", "FRAGMENT")


def operator(schema: str) -> Callable[[Callable], Any]:
    """Registers the decorated function as the operator of this schema, which takes its name.

    Args:
        schema: the operator's name with arguments and results; it marks those that it changes.
    """

    def register(kernel: Callable) -> Any:
        name = schema.partition("(")[0]
        OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        OPERATORS.impl(name, untraced(kernel), "CompositeExplicitAutograd")
        return getattr(torch.ops.cupyflash, name).default

    return register


def register_fake(operator: Any) -> Callable[[Callable], Callable]:
    """Has the decorated function make the empty results of an operator for fake arguments."""
    return torch.library.register_fake(operator.name(), lib=OPERATORS)


def register_autograd(
    operator: Any, backward: Callable, setup_context: Callable | None = None
) -> None:
    """Gives an operator a derivative, as ``torch.library.register_autograd`` says."""
    name = operator.name()
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=OPERATORS)


def register_vmap(operator: Any, rule: Callable) -> None:
    """Gives an operator a rule for ``torch.func.vmap``, as ``torch.library.register_vmap`` says."""
    torch.library.register_vmap(operator.name(), rule, lib=OPERATORS)
