"""`FORWARD` and `BACKWARD`, the operations that the public functions of attention call."""

import functools

from ...runtime.operation import Operation, TorchSide
from .dispatch import backward, forward
from .names import caller_name
from .options import Extras
from .preparation import BACKWARD_TENSORS, TENSORS


def _name(tensors: tuple[str, ...], function: str, place: int) -> str:
    """The name of an array for errors; the captures of a text lie behind all that have one."""
    names = (*tensors, *Extras._fields)
    return caller_name(function, names[place]) if place < len(names) else "what a score reads"


def _torch_forward() -> TorchSide:
    from . import torch_side

    return torch_side.Forward


def _torch_backward() -> TorchSide:
    from . import torch_side

    return torch_side.Backward


FORWARD = Operation(forward, _torch_forward, names=functools.partial(_name, TENSORS))
BACKWARD = Operation(
    backward,
    _torch_backward,
    first=1,
    names=functools.partial(_name, BACKWARD_TENSORS),
    gradient=True,
)
