"""Calls around torch.compile, and checks of tensors without memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.compiler.disable
def eagerly(function: Callable, *arguments: Any) -> Any:
    """Call the function outside of the graph that torch.compile makes of its caller."""
    return function(*arguments)


def require_one_device(function: str, first: Tensor, *others: Tensor | None) -> None:
    """All tensors on the device of the first: meta tensors and real ones do not mix.

    Raises:
        ValueError: they are not.
    """
    for x in others:
        if x is not None and x.device != first.device:
            fact = "all tensors must be on the same device"
            raise ValueError(f"{function}: {fact}, got {first.device} and {x.device}")
