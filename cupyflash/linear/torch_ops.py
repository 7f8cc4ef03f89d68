"""torch operator ``cupyflash::linear``: the projections of `dispatch.call`, inference only.

Calls take it where torch has to see them, as those of attention do (``torch_ops.py``).
"""

from typing import Any

import torch
from torch import Tensor

from ..array import library_of
from ..torch_meta import require_one_device
from . import dispatch
from .dispatch import Down
from .reference import Arrays, Options

LIBRARY = library_of(torch.empty(0))
NUM_ARRAYS = len(Arrays._fields)
INPUTS = NUM_ARRAYS + len(Down._fields)
OPTIONAL = [*Arrays._fields[2:], *(f"down_{name}" for name in Down._fields)]


def call(function: str, arrays: Arrays, options: Options, down: Down) -> Tensor:
    """`dispatch.call` through the operator, which checks when it runs."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{function}: is not built for transforms of torch.func")
    return _project(*arrays, *down, function, *options[:-1], list(options.heads))


@torch.library.custom_op(
    "cupyflash::linear",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, "
        + ", ".join(f"Tensor? {name}" for name in OPTIONAL)
        + ", str function, str activation, float eps, bool rms, bool interleaved, SymInt[] heads)"
        " -> Tensor"
    ),
)
def _project(*arguments: Any) -> Tensor:
    given, (function, *options, heads) = arguments[:INPUTS], arguments[INPUTS:]
    options = Options(*options, tuple(heads))
    LIBRARY.refuse_tangents(*given)
    return dispatch.run(function, LIBRARY, given, options)


@_project.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    require_one_device(rest[INPUTS - 2], x, weight, *rest[: INPUTS - 2])
    down_weight = rest[NUM_ARRAYS - 2]
    last = weight if down_weight is None else down_weight
    return x.new_empty((*x.shape[:-1], last.shape[0]))


def _no_backward(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError("cupyflash: projections have no backward (use torch.no_grad())")


_project.register_autograd(_no_backward)
