"""Projections in the steps that torch's autograd and autocast need.

The fused forward writes nothing but its result. Its backward needs what was multiplied (the
normalised x, the hidden activations) and, behind an activation, what was activated. For M rows,
N columns and depth K in 16 bits there are two ways to have the latter:

* multiply again in the backward: 2MNK operations more, a sixth of the 6MNK of a projection with
  both of its gradients. At 700 TFLOP/s that takes 2.2 ps for each of the MN numbers at K = 768,
  12 ps at K = 4096;
* write it, and activate in a pass of its own: 4 bytes more for each number, 1 ps at 4 TB/s.

So everything is written once and no product is computed twice: as many bytes are kept as by
separate operations of torch, and of a gated MLP fewer (`gate`). The norm, each product with its
bias and rotary embedding or residual, and the activation are a step each; every step has a gradient
of its own. Second derivatives are those of torch's operations, but for norms, which have none.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..array import library_of
from ..kernel_launch import keep
from . import dispatch, torch_ops
from . import gate as gates
from .checks import NAMES, check
from .dispatch import NO_DOWN, Down
from .reference import Arrays, Options

LIBRARY = library_of(torch.empty(0))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}
_checked: dict[tuple, bool] = {}


class Product(torch.autograd.Function):
    """A projection without norm, gate and activation.

    The arguments are few, and forward and setup_context are one, as torch spends more time on each
    argument, and on the signature of a setup_context, than the rest of a call takes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        others: tuple[str, Arrays, Options],
    ) -> Tensor:
        function, arrays, ctx.options = others
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_x else None,
            *(arrays.cos, arrays.sin, arrays.positions),
        )
        arrays = arrays._replace(x=x, weight=weight, bias=bias, residual=residual)
        return dispatch.run(function, LIBRARY, (*arrays, *NO_DOWN), ctx.options)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        needs, saved = ctx.needs_input_grad, ctx.saved_tensors
        return *torch_ops.gradients(dout, needs, saved, ctx.options), None


class Gate(torch.autograd.Function):
    """activation(gate) * up of dense tensors on a GPU."""

    @staticmethod
    def forward(ctx: Any, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gates.forward(LIBRARY, activation, gate, up)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *gates.backward(LIBRARY, ctx.activation, gate, up, dout.contiguous())
        # create_graph=True: by operations that have derivatives themselves.
        out = ACTIVATIONS[ctx.activation](gate) * up
        wanted = [y for y in (gate, up) if y.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, dout, create_graph=True))
        return None, *(next(found) if y.requires_grad else None for y in (gate, up))


def call(function: str, arrays: Arrays, options: Options, down: Down, traced: bool) -> Tensor:
    """`dispatch.call` under autocast, or where gradients are wanted or torch has to see the call.

    Args:
        traced: torch has to see the call: each step is an operator.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{function}: is not built for transforms of torch.func")
    if traced and not torch.compiler.is_compiling():
        _require_one_device(function, (*arrays, *down))
    arrays, down, residual = _autocast(arrays, options, down)
    if _wants_gradient(*arrays, *down):
        out = _in_steps(function, arrays, options, down, traced)
    elif traced:
        out = torch_ops.operator(*torch_ops.flat(function, arrays, options, down))
    else:
        out = dispatch.run(function, LIBRARY, (*arrays, *down), options)
    return out if residual is None else out + residual


def _require_one_device(function: str, given: tuple[Any, ...]) -> None:
    """An operator gives a shape without numbers as soon as one tensor has none."""
    x = given[0]
    for name, y in zip(NAMES[function], given, strict=True):
        if isinstance(y, Tensor) and y.device != x.device:
            where = f"x on {x.device} and {name} on {y.device}"
            raise ValueError(f"{function}: all arrays must be on the same device, got {where}")


def _in_steps(function: str, arrays: Arrays, options: Options, down: Down, traced: bool) -> Tensor:
    if not traced:
        _check_once(function, arrays, options, down)
    for name in ("cos", "sin"):
        angles = getattr(arrays, name)
        if angles is not None and angles.requires_grad:
            fact = f"{name} has no gradient: it must not require one (use {name}.detach())"
            raise NotImplementedError(f"{function}: {fact}, got one that does")
    x = arrays.x
    if arrays.norm_weight is not None:
        x = _normalised(x, arrays, options)
        arrays = arrays._replace(x=x, norm_weight=None, norm_bias=None)
    if down.weight is None and options.activation == "none":
        return _product(function, arrays, options, traced)

    def product(*of: Tensor | None) -> Tensor:
        x, weight, bias, residual = of
        step = Arrays(x, weight, bias=bias, residual=residual)
        return _product("linear", step, Options(), traced)

    activate = ACTIVATIONS[options.activation]
    out = product(x, arrays.weight, arrays.bias, None)
    if arrays.gate_weight is not None:
        gate = product(x, arrays.gate_weight, arrays.gate_bias, None)
        if traced or not out.is_cuda:  # compilers fuse these
            out = activate(gate) * out
        else:
            out = Gate.apply(options.activation, gate.contiguous(), out.contiguous())
    else:
        out = activate(out)
    if down.weight is not None:
        return product(out, down.weight, down.bias, down.residual)
    return out if arrays.residual is None else out + arrays.residual


def _product(function: str, arrays: Arrays, options: Options, traced: bool) -> Tensor:
    """One projection without norm and activation; float32 weights get gradients in float32."""
    dtype, bias = arrays.x.dtype, arrays.bias
    bias = None if bias is None else bias.to(dtype)
    arrays = arrays._replace(weight=arrays.weight.to(dtype), bias=bias)
    if dtype == torch.float32 and arrays.x.is_cuda:
        return _product_in_float32(arrays, options)
    if traced:
        return torch_ops.operator(*torch_ops.flat(function, arrays, options, NO_DOWN))
    x, weight, bias, residual = arrays.x, arrays.weight, arrays.bias, arrays.residual
    return Product.apply(x, weight, bias, residual, (function, arrays, options))


def _product_in_float32(arrays: Arrays, options: Options) -> Tensor:
    """By torch: cuBLAS is faster than linear_simt, which is made for what has no other kernel."""
    out = functional.linear(arrays.x, arrays.weight, arrays.bias)
    if arrays.cos is not None:
        angles = arrays.cos, arrays.sin, arrays.positions
        out = torch_ops.rotate(out, *angles, options.interleaved, list(options.heads))
    return out if arrays.residual is None else out + arrays.residual


def _normalised(x: Tensor, arrays: Arrays, options: Options) -> Tensor:
    from ..norm.norm import layer_norm, rms_norm

    # As rows, which may be copied: axes that do not collapse are no matter to a projection.
    rows = x if x.is_contiguous() else x.reshape(-1, x.shape[-1])
    if options.rms:
        out = rms_norm(rows, arrays.norm_weight, eps=options.eps)
    else:
        out = layer_norm(rows, arrays.norm_weight, arrays.norm_bias, eps=options.eps)
    return out if rows is x else out.reshape(x.shape)


def _autocast(arrays: Arrays, options: Options, down: Down) -> tuple[Arrays, Down, Tensor | None]:
    """Everything in the dtype of autocast, and a residual of another dtype, which is added last.

    As with separate operations, a norm of a float32 x is computed in float32.
    """
    x = arrays.x
    if not isinstance(x, Tensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return arrays, down, None
    dtype = torch.get_autocast_dtype(x.device.type)
    if x.dtype == torch.float32 != dtype and arrays.norm_weight is not None:
        weight, bias = _in_dtype(torch.float32, arrays.norm_weight, arrays.norm_bias)
        x = _normalised(x, arrays._replace(norm_weight=weight, norm_bias=bias), options)
        arrays = arrays._replace(norm_weight=None, norm_bias=None)
    names = ("weight", "gate_weight", "bias", "gate_bias")
    cast = _in_dtype(dtype, x, *(getattr(arrays, name) for name in names))
    arrays = arrays._replace(**dict(zip(("x", *names), cast)))
    weight, bias = _in_dtype(dtype, down.weight, down.bias)
    down = down._replace(weight=weight, bias=bias)
    for residual in (arrays.residual, down.residual):
        if isinstance(residual, Tensor) and residual.dtype != dtype:
            return arrays._replace(residual=None), down._replace(residual=None), residual
    return arrays, down, None


def _in_dtype(dtype: torch.dtype, *given: Any) -> list[Any]:
    """What autocast casts in another dtype, everything else as it is: it will be refused."""
    half = (torch.float16, torch.bfloat16, torch.float32)
    return [y.to(dtype) if isinstance(y, Tensor) and y.dtype in half else y for y in given]


def _wants_gradient(*given: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(y, Tensor) and y.requires_grad for y in given)


def _check_once(function: str, arrays: Arrays, options: Options, down: Down) -> None:
    """`check` for each signature: the steps would name other arguments than the caller."""
    given = (*arrays, *down)
    try:
        key = (function, options, *[None if y is None else LIBRARY.signature(y) for y in given])
    except AttributeError:  # an array of another library
        check(function, LIBRARY, given, options)
        raise
    if key not in _checked:
        check(function, LIBRARY, given, options)
        keep(_checked, key, True)
