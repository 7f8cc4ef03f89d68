"""Functions for calls that torch.compile traces; no other call imports this, and Dynamo with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType

from .torch_calls import current_transform
from .torch_tracking import refuse_sharded


@torch.compiler.disable
def eagerly(function: Callable, *arguments: Any) -> Any:
    """Calls the function outside of the graph that torch.compile makes of its caller."""
    return function(*arguments)


def refuse_in_graph(function: str, arrays: tuple) -> None:
    """Raises NotImplementedError for what no operator takes in a graph of torch.compile.

    That is a DTensor, and a call within torch.func.grad, jvp and their kin, which Dynamo traces but
    which take derivatives of no operator.
    """
    for x in arrays:
        refuse_sharded(type(x))
    if current_transform() in (TransformType.Grad, TransformType.Jvp):
        fact = "derivatives of torch.func within torch.compile are not built"
        allowed = "allowed are torch.autograd.grad, backward and torch.func outside of it"
        raise NotImplementedError(f"{function}: {fact}, {allowed}, got a call within one")
