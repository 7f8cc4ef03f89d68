"""Projections in the steps that torch's autograd needs.

The fused forward writes nothing but its result. Its backward needs what was multiplied (the
normalised x, the hidden activations) and, behind an activation, what was activated. For M rows,
N columns and depth K in 16 bits there are two ways to have the latter:

* multiply again in the backward: 2MNK operations more, a third of the 6MNK of a projection with
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

from ..runtime.array import library_of
from ..runtime.operation import Plans
from . import dispatch, torch_ops
from . import gate as gates
from .checks import check
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
_checked = Plans()


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
        if x.dtype == torch.float32 and x.is_cuda:
            return _product_in_float32(function, arrays, ctx.options)
        return dispatch.run(function, LIBRARY, (*arrays, *NO_DOWN), ctx.options)[0]

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


def in_steps(function: str, arrays: Arrays, options: Options, down: Down, traced: bool) -> Tensor:
    """A call with gradients; each product is an operator if torch has to see it.

    Raises:
        NotImplementedError: gradients of cos and sin.
    """
    if traced:
        _check_traced(function, arrays, down)
    else:
        check_once(function, arrays, down, options)
    for name in ("cos", "sin"):
        angles = getattr(arrays, name)
        if angles is not None and angles.requires_grad:
            fact = f"{name} has no gradient: it must not require one (use {name}.detach())"
            raise NotImplementedError(f"{function}: {fact}, got one that does")
    x = arrays.x
    if arrays.norm_weight is not None:
        x = normalised(x, arrays, options)
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
        _require_shape(function, "gate_weight", arrays.gate_weight, arrays.weight.shape)
        gate = product(x, arrays.gate_weight, arrays.gate_bias, None)
        if traced or not out.is_cuda:  # compilers fuse these
            out = activate(gate) * out
        else:
            out = Gate.apply(options.activation, gate.contiguous(), out.contiguous())
    else:
        out = activate(out)
    if down.weight is not None:
        return product(out, down.weight, down.bias, down.residual)
    return plus(function, out, arrays.residual)


def _product(function: str, arrays: Arrays, options: Options, traced: bool) -> Tensor:
    """One projection without norm and activation; float32 weights get gradients in float32."""
    dtype, bias = arrays.x.dtype, arrays.bias
    bias = None if bias is None else bias.to(dtype)
    arrays = arrays._replace(weight=arrays.weight.to(dtype), bias=bias)
    if traced:
        if dtype == torch.float32 and arrays.x.is_cuda:
            return _product_in_float32(function, arrays, options)
        return torch_ops.operator(*torch_ops.flat(function, arrays, options, NO_DOWN))
    x, weight, bias, residual = arrays.x, arrays.weight, arrays.bias, arrays.residual
    return Product.apply(x, weight, bias, residual, (function, arrays, options))


def _product_in_float32(function: str, arrays: Arrays, options: Options) -> Tensor:
    """By torch: cuBLAS is faster than linear_simt, which is made for what has no other kernel."""
    if arrays.bias is not None:
        _require_shape(function, "bias", arrays.bias, arrays.weight.shape[:1])
    out = functional.linear(arrays.x, arrays.weight, arrays.bias)
    if arrays.cos is not None:
        angles = arrays.cos, arrays.sin, arrays.positions
        out = torch_ops.rotate(out, *angles, options.interleaved, list(options.heads))
    return plus(function, out, arrays.residual)


def plus(function: str, out: Tensor, residual: Tensor | None) -> Tensor:
    """out + residual, of one shape."""
    if residual is None:
        return out
    _require_shape(function, "residual", residual, out.shape)
    return out + residual


def _require_shape(function: str, name: str, x: Tensor, shape: torch.Size) -> None:
    """torch would broadcast. Only what is traced comes here unchecked."""
    if x.shape != shape:
        fact = f"{name} must have shape {tuple(shape)}"
        raise ValueError(f"{function}: {fact}, got {tuple(x.shape)}")


def normalised(x: Tensor, arrays: Arrays, options: Options) -> Tensor:
    """x after the norm."""
    from ..norm.norm import layer_norm, rms_norm

    # As rows, which may be copied: axes that do not collapse are no matter to a projection.
    rows = x if x.is_contiguous() else x.reshape(-1, x.shape[-1])
    if options.rms:
        out = rms_norm(rows, arrays.norm_weight, eps=options.eps)
    else:
        out = layer_norm(rows, arrays.norm_weight, arrays.norm_bias, eps=options.eps)
    return out if rows is x else out.reshape(x.shape)


def _check_traced(function: str, arrays: Arrays, down: Down) -> None:
    """What no step can see: it would do less than what was asked, or anything else."""
    if function == "mlp" and down.weight is None:
        raise TypeError("mlp: down_weight must be an array, got None")
    if arrays.gate_bias is not None and arrays.gate_weight is None:
        raise ValueError(f"{function}: gate_bias must come with gate_weight, got it alone")
    up = "up_weight" if function == "mlp" else "weight"
    for name, weight in ((up, arrays.weight), ("down_weight", down.weight)):
        if weight is not None and weight.ndim != 2:
            fact = f"{name} must have two dimensions"
            raise ValueError(f"{function}: {fact}, got {tuple(weight.shape)}")


def check_once(function: str, arrays: Arrays, down: Down, options: Options) -> None:
    """`check` for each signature: the steps would name other arguments than the caller."""
    given = (*arrays, *down)
    checked = lambda: check(function, LIBRARY, given, options)  # noqa: E731
    _checked.find(LIBRARY, given, (function, options), checked, lambda *_: True)
