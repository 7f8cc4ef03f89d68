"""Calls outside of the graphs of torch.compile, and a check that also serves meta tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.compiler.disable
def eagerly(function: Callable, *arguments: Any) -> Any:
    """Calls the function outside of the graph that torch.compile makes of its caller."""
    return function(*arguments)


def require_one_device(function: str, first: Tensor, *others: Tensor | None) -> None:
    """All tensors must be on the device of the first; meta tensors and real ones do not mix.

    Raises:
        ValueError: a tensor is on another device.
    """
    for x in others:
        if x is not None and x.device != first.device:
            fact = "all tensors must be on the same device"
            raise ValueError(f"{function}: {fact}, got {first.device} and {x.device}")
