"""`PROJECTION`, the operation that the public functions of linear layers call."""

from ...runtime.operation import Operation, TorchSide
from .plan import run


def _torch_side() -> TorchSide:
    from . import autograd

    return autograd


PROJECTION = Operation(run, _torch_side)
