"""`FORWARD` and `BACKWARD`, the operations that the public functions of attention call."""

from ...runtime.operation import Operation, TorchSide
from .dispatch import backward, forward
from .names import caller_name
from .options import Extras
from .preparation import BACKWARD_TENSORS, TENSORS


def _forward_name(function: str, place: int) -> str:
    return _name(function, (*TENSORS, *Extras._fields), place)


def _backward_name(function: str, place: int) -> str:
    return _name(function, (*BACKWARD_TENSORS, *Extras._fields), place)


def _name(function: str, names: tuple[str, ...], place: int) -> str:
    """The name of an array for errors; the captures of a text lie behind all that have one."""
    return caller_name(function, names[place]) if place < len(names) else "what a score reads"


def _torch_forward() -> TorchSide:
    from . import torch_side

    return torch_side.Forward


def _torch_backward() -> TorchSide:
    from . import torch_side

    return torch_side.Backward


FORWARD = Operation(forward, _torch_forward, names=_forward_name)
BACKWARD = Operation(backward, _torch_backward, first=1, names=_backward_name, gradient=True)
