"""Calls on torch tensors that are more than a launch: autocast, gradients, torch.compile."""

from typing import Any

import torch
from torch import Tensor

from ..runtime.array import library_of
from ..runtime.torch_calls import require_one_device
from . import autograd, dispatch, torch_ops
from .dispatch import Down
from .reference import Arrays, Options

LIBRARY = library_of(torch.empty(0))
NUM_ARRAYS = len(Arrays._fields)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def traced(function: str, given: tuple, options: Options) -> tuple[Tensor]:
    """`dispatch.run` where torch has to see the call: each step is an operator."""
    if not torch.compiler.is_compiling():
        _refuse_transforms(function)
        require_one_device(function, *[y for y in given if isinstance(y, Tensor)])
    return _call(function, given, options, traced=True)


def called(function: str, given: tuple, options: Options) -> tuple[Tensor]:
    """`dispatch.run` under autocast, or where gradients are wanted."""
    _refuse_transforms(function)
    return _call(function, given, options, traced=False)


def _call(function: str, given: tuple, options: Options, traced: bool) -> tuple[Tensor]:
    arrays, down = Arrays(*given[:NUM_ARRAYS]), Down(*given[NUM_ARRAYS:])
    arrays, down, residual = _autocast(function, arrays, options, down, traced)
    if LIBRARY.wants_gradient(*arrays, *down):
        out = autograd.in_steps(function, arrays, options, down, traced)
    elif traced:
        out = torch_ops.operator(*torch_ops.flat(function, arrays, options, down))
    else:
        (out,) = dispatch.run(function, LIBRARY, (*arrays, *down), options)
    return (autograd.plus(function, out, residual),)


def _refuse_transforms(function: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{function}: is not built for transforms of torch.func")


def _autocast(
    function: str, arrays: Arrays, options: Options, down: Down, traced: bool
) -> tuple[Arrays, Down, Tensor | None]:
    """Everything in the dtype of autocast, and a residual of another dtype, which is added last.

    As with separate operations, a norm of a float32 x is computed in float32.
    """
    x = arrays.x
    if not isinstance(x, Tensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return arrays, down, None
    dtype = torch.get_autocast_dtype(x.device.type)
    names = ("weight", "gate_weight", "bias", "gate_bias")
    cast = _in_dtype(dtype, *(getattr(arrays, name) for name in names))
    arrays = arrays._replace(**dict(zip(names, cast)))
    weight, bias = _in_dtype(dtype, down.weight, down.bias)
    down = down._replace(weight=weight, bias=bias)
    apart = x.dtype == torch.float32 != dtype and arrays.norm_weight is not None
    if apart:
        weight, bias = _in_dtype(torch.float32, arrays.norm_weight, arrays.norm_bias)
        arrays = arrays._replace(norm_weight=weight, norm_bias=bias)
    late = arrays.residual if down.weight is None else down.residual
    if not isinstance(late, Tensor) or late.dtype not in DTYPES or late.dtype == dtype:
        late = None
    if not traced and (apart or late is not None):
        like = [None if y is None else torch.empty_like(y, dtype=dtype) for y in (x, late)]
        autograd.check_once(function, *_replaced(arrays, down, *like), options)
    if apart:
        x = autograd.normalised(x, arrays, options)
        arrays = arrays._replace(norm_weight=None, norm_bias=None)
    arrays = arrays._replace(x=_in_dtype(dtype, x)[0])
    for name in ("norm_weight", "norm_bias", "cos", "sin"):
        y = getattr(arrays, name)
        if isinstance(y, Tensor) and y.dtype in DTYPES and y.dtype not in (dtype, torch.float32):
            arrays = arrays._replace(**{name: y.float()})  # nothing is lost
    if late is not None:
        arrays, down = arrays._replace(residual=None), down._replace(residual=None)
    return arrays, down, late


def _replaced(
    arrays: Arrays, down: Down, x: Tensor, residual: Tensor | None
) -> tuple[Arrays, Down]:
    """With these in place of x and, if there is one, of the residual."""
    arrays = arrays._replace(x=x)
    if residual is None:
        return arrays, down
    if down.weight is None:
        return arrays._replace(residual=residual), down
    return arrays, down._replace(residual=residual)


def _in_dtype(dtype: torch.dtype, *given: Any) -> list[Any]:
    """What autocast casts in another dtype, everything else as it is: it will be refused."""
    return [y.to(dtype) if isinstance(y, Tensor) and y.dtype in DTYPES else y for y in given]
