"""Calls on torch tensors that are more than a launch: autocast, gradients, torch.compile.

The fused forward writes nothing but its result. Its backward needs what was multiplied (the
normalised x, the hidden activations) and, behind an activation, what was activated. For M rows,
N columns and depth K in 16 bits there are two ways to have the latter:

* multiply again in the backward: 2MNK operations more, a third of the 6MNK of a projection with
  both of its gradients. At 700 TFLOP/s that takes 2.2 ps for each of the MN numbers at K = 768,
  12 ps at K = 4096;
* write it, and activate in a pass of its own: 4 bytes more for each number, 1 ps at 4 TB/s.

So with gradients everything is written once and no product is computed twice: as many bytes are
kept as by separate operations of torch, and of a gated MLP fewer (`elementwise`). The norm, each
product with its bias and rotary embedding or residual, and the activation are a step each; every
step has a gradient of its own. Second derivatives are those of torch's operations, but for norms,
which have none.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...runtime.lookup import library_of
from ...runtime.operation import Plans
from ...runtime.torch_calls import refuse_batched, refuse_transforms, require_one_device
from . import elementwise, plan, torch_ops
from .checks import check
from .options import Arrays, Options

LIBRARY = library_of(torch.empty(0))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}
_checked = Plans()


# The route of a call ------------------------------------------------------------------------------


def traced(function: str, given: tuple, options: Options) -> tuple[Tensor]:
    """The call where torch has to see it: each step is an operator."""
    refuse_transforms(function)
    if not torch.compiler.is_compiling():
        require_one_device(function, *[y for y in given if isinstance(y, Tensor)])
    return _call(function, given, options, traced=True)


def called(function: str, given: tuple, options: Options) -> tuple[Tensor]:
    """The call under autocast, or where gradients are wanted."""
    refuse_transforms(function)
    return _call(function, given, options, traced=False)


def _call(function: str, given: tuple, options: Options, traced: bool) -> tuple[Tensor]:
    arrays, residual = _autocast(function, Arrays(*given), options, traced)
    if LIBRARY.wants_gradient(*arrays):
        out = _in_steps(function, arrays, options, traced)
    elif traced:
        out = torch_ops.linear(*torch_ops.flat(function, arrays, options))
    else:
        (out,) = plan.run(function, LIBRARY, arrays, options)
    return (_plus(function, out, residual),)


def _autocast(
    function: str, arrays: Arrays, options: Options, traced: bool
) -> tuple[Arrays, Tensor | None]:
    """Everything in the dtype of autocast, and a residual of another dtype, which is added last.

    As with separate operations, a norm of a float32 x is computed in float32.
    """
    x, late = arrays.x, arrays.residual
    if not isinstance(x, Tensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return arrays, None
    dtype = torch.get_autocast_dtype(x.device.type)
    arrays = _cast(arrays, dtype, *plan.ROUNDED)
    norm_in_float32 = x.dtype == torch.float32 != dtype and arrays.norm_weight is not None
    if norm_in_float32:
        arrays = _cast(arrays, torch.float32, "norm_weight", "norm_bias")
    for name in ("norm_weight", "norm_bias", "cos", "sin"):
        y = getattr(arrays, name)
        if isinstance(y, Tensor) and y.dtype != dtype:
            arrays = _cast(arrays, torch.float32, name)  # nothing is lost
    if not isinstance(late, Tensor) or late.dtype not in DTYPES or late.dtype == dtype:
        late = None
    if not traced and (norm_in_float32 or late is not None):
        like = arrays._replace(x=torch.empty_like(x, dtype=dtype))
        if late is not None:
            like = like._replace(residual=torch.empty_like(late, dtype=dtype))
        _check_once(function, like, options)
    if norm_in_float32:
        arrays = _normalised(arrays, options)
    arrays = _cast(arrays, dtype, "x")
    return (arrays if late is None else arrays._replace(residual=None)), late


def _cast(arrays: Arrays, dtype: torch.dtype, *names: str) -> Arrays:
    """Casts as autocast does, and leaves everything else as it is: it will be refused."""
    given = {name: getattr(arrays, name) for name in names}
    cast = {
        name: y.to(dtype)
        for name, y in given.items()
        if isinstance(y, Tensor) and y.dtype in DTYPES
    }
    return arrays._replace(**cast)


# Steps with gradients -----------------------------------------------------------------------------


def _in_steps(function: str, arrays: Arrays, options: Options, traced: bool) -> Tensor:
    """A call with gradients; each product is an operator if torch has to see it.

    Raises:
        NotImplementedError: gradients of cos and sin.
    """
    if traced:
        _check_traced(function, arrays)
    else:
        _check_once(function, arrays, options)
    for name in ("cos", "sin"):
        angles = getattr(arrays, name)
        if angles is not None and angles.requires_grad:
            fact = f"{name} has no gradient: it must not require one (use {name}.detach())"
            raise NotImplementedError(f"{function}: {fact}, got one that does")
    if arrays.norm_weight is not None:
        arrays = _normalised(arrays, options)
    if arrays.down_weight is None and options.activation == "none":
        return _product(function, arrays, options, traced)

    def product(*of: Tensor | None) -> Tensor:
        x, weight, bias = of
        return _product("linear", Arrays(x, weight, bias=bias), Options(), traced)

    activate = ACTIVATIONS[options.activation]
    out = product(arrays.x, arrays.weight, arrays.bias)
    if arrays.gate_weight is None:
        out = activate(out)
    else:
        _require_shape(function, "gate_weight", arrays.gate_weight, arrays.weight.shape)
        gate = product(arrays.x, arrays.gate_weight, arrays.gate_bias)
        if traced or not out.is_cuda:  # compilers fuse these
            out = activate(gate) * out
        else:
            out = Gate.apply(options.activation, gate.contiguous(), out.contiguous())
    if arrays.down_weight is None:
        return _plus(function, out, arrays.residual)
    return _product("linear", arrays.second(out), Options(), traced)


def _normalised(arrays: Arrays, options: Options) -> Arrays:
    """The arrays after the norm."""
    from ..norm.norm import layer_norm, rms_norm

    # x becomes rows, by a copy if its axes do not collapse.
    x = arrays.x
    rows = x if x.is_contiguous() else x.reshape(-1, x.shape[-1])
    if options.rms:
        out = rms_norm(rows, arrays.norm_weight, eps=options.eps)
    else:
        out = layer_norm(rows, arrays.norm_weight, arrays.norm_bias, eps=options.eps)
    out = out if rows is x else out.reshape(x.shape)
    return arrays._replace(x=out, norm_weight=None, norm_bias=None)


def _product(function: str, arrays: Arrays, options: Options, traced: bool) -> Tensor:
    """One projection without norm and activation; float32 weights get gradients in float32."""
    dtype, bias = arrays.x.dtype, arrays.bias
    bias = None if bias is None else bias.to(dtype)
    arrays = arrays._replace(weight=arrays.weight.to(dtype), bias=bias)
    if not traced:
        given = (getattr(arrays, name) for name in torch_ops.WITH_GRADIENT)
        return Product.apply(*given, (function, arrays, options))
    if dtype == torch.float32 and arrays.x.is_cuda:
        return _product_in_float32(function, arrays, options)
    return torch_ops.linear(*torch_ops.flat(function, arrays, options))


def _product_in_float32(function: str, arrays: Arrays, options: Options) -> Tensor:
    """torch computes the product: cuBLAS is faster than linear_simt, made for all other cases."""
    if arrays.bias is not None:
        _require_shape(function, "bias", arrays.bias, arrays.weight.shape[:1])
    out = functional.linear(arrays.x, arrays.weight, arrays.bias)
    if arrays.cos is not None:
        angles = arrays.cos, arrays.sin, arrays.positions
        out = torch_ops.rotate(out, *angles, options.interleaved, list(options.heads))
    return _plus(function, out, arrays.residual)


def _plus(function: str, out: Tensor, residual: Tensor | None) -> Tensor:
    """out + residual, of one shape."""
    if residual is None:
        return out
    _require_shape(function, "residual", residual, out.shape)
    return out + residual


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
        arrays = arrays._replace(x=x, weight=weight, bias=bias, residual=residual)
        torch_ops.save_product(ctx, arrays, ctx.needs_input_grad)
        if x.dtype == torch.float32 and x.is_cuda:
            return _product_in_float32(function, arrays, ctx.options)
        return plan.run(function, LIBRARY, arrays, ctx.options)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *torch_ops.product_gradients(
            dout, ctx.needs_input_grad, ctx.saved_tensors, ctx.options
        ), None


class Gate(torch.autograd.Function):
    """activation(gate) * up of dense tensors on a GPU."""

    @staticmethod
    def forward(ctx: Any, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return elementwise.gate(LIBRARY, activation, gate, up)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if not torch.is_grad_enabled():
            refuse_batched(dout)
            dout = dout.contiguous()
            return None, *elementwise.gate(LIBRARY, ctx.activation, gate, up, dout)
        # With create_graph=True, operations that have derivatives themselves compute it.
        out = ACTIVATIONS[ctx.activation](gate) * up
        wanted = [y for y in (gate, up) if y.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, dout, create_graph=True))
        return None, *(next(found) if y.requires_grad else None for y in (gate, up))


# Checks -------------------------------------------------------------------------------------------


def _check_once(function: str, arrays: Arrays, options: Options) -> None:
    """`check` for each signature: the steps would name other arguments than the caller."""
    key, _ = _checked.key(LIBRARY, arrays, (function, options))
    if key not in _checked:
        check(function, LIBRARY, arrays, options)
        _checked.add(key, True)


def _check_traced(function: str, arrays: Arrays) -> None:
    """Refuse what no step can see: it would do less than what was asked, or anything else."""
    if function == "mlp" and arrays.down_weight is None:
        raise TypeError("mlp: down_weight must be an array, got None")
    if arrays.gate_bias is not None and arrays.gate_weight is None:
        raise ValueError(f"{function}: gate_bias must come with gate_weight, got it alone")
    up = "up_weight" if function == "mlp" else "weight"
    for name, weight in ((up, arrays.weight), ("down_weight", arrays.down_weight)):
        if weight is not None and weight.ndim != 2:
            fact = f"{name} must have two dimensions"
            raise ValueError(f"{function}: {fact}, got {tuple(weight.shape)}")


def _require_shape(function: str, name: str, x: Tensor, shape: torch.Size) -> None:
    """torch would broadcast. Only what is traced comes here unchecked."""
    if x.shape != shape:
        fact = f"{name} must have shape {tuple(shape)}"
        raise ValueError(f"{function}: {fact}, got {tuple(x.shape)}")
