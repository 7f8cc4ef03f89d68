"""What torch.compile leaves as it is."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def eagerly(function: Callable, *arguments: Any) -> Any:
    """Call the function outside of the graph that torch.compile makes of its caller."""
    return function(*arguments)
