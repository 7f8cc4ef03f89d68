"""`FORWARD` and `BACKWARD`, the operations that the public functions of attention call."""

from ...runtime.operation import Operation, TorchSide
from .dispatch import BACKWARD_TENSORS, TENSORS, backward, forward
from .options import Extras, caller_name


def _forward_name(function: str, place: int) -> str:
    return caller_name(function, (*TENSORS, *Extras._fields)[place])


def _backward_name(function: str, place: int) -> str:
    return caller_name(function, (*BACKWARD_TENSORS, *Extras._fields)[place])


def _torch_forward() -> TorchSide:
    from . import torch_side

    return torch_side.Forward


def _torch_backward() -> TorchSide:
    from . import torch_side

    return torch_side.Backward


FORWARD = Operation(forward, _torch_forward, names=_forward_name)
BACKWARD = Operation(backward, _torch_backward, first=1, names=_backward_name, gradient=True)
