"""torch operators ``cupyflash::attention`` and ``cupyflash::attention_backward``.

A call takes them where torch has to see it: torch.compile traces it, a transform of torch.func maps
it, a dispatch mode records it, a tensor subclass replaces it. All other calls go around torch's
dispatcher, which costs more than the rest of a call.
"""

from typing import Any

import torch
from torch import Tensor

from ..runtime.array import library_of
from ..runtime.torch_calls import require_one_device
from . import dispatch, torch_vmap
from .autograd import readable
from .extras import NO_EXTRAS, Extras, Gradients
from .options import Options
from .padding import result_strides
from .problem import kernel_head_dim
from .torch_arguments import ARGUMENTS, NUM_EXTRAS, decode, encode, split_backward

LIBRARY = library_of(torch.empty(0))


def autocast(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """The arrays of a call as torch's own attention would see them under autocast.

    A float32 bias and float32 sinks stay what they are: the kernels read them as they lie.
    """
    device = q.device.type
    if q.is_meta or not torch.is_autocast_enabled(device):
        return q, k, v, extras
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    for name in ("bias", "sinks"):
        x = getattr(extras, name)
        if x is not None and x.dtype != torch.float32:
            extras = extras._replace(**{name: cast(x)})
    return cast(q), cast(k), cast(v), extras


def compiled(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple,
    extras: Extras,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`dispatch.forward` in what torch.compile can trace; the operator checks when it runs."""
    if extras is not NO_EXTRAS or Options(*options).dropout_p:
        extras = dispatch.with_seed(function, LIBRARY, q, options, extras)
    q, k, v, extras = autocast(q, k, v, extras)
    return attention(function, q, k, v, options, extras, deterministic)


def attention(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple,
    extras: Extras,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `dispatch.forward` through the operator."""
    call = Transformed.apply if _transforms_active() else _forward_op
    return call(q, k, v, *extras, function, *encode(options), deterministic)


def attention_backward(
    function: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: tuple,
    extras: Extras,
    deterministic: bool,
    bias_grad: bool,
    dlse: Tensor | None,
) -> Gradients:
    """`dispatch.backward` through the operator, whose own derivative is an error."""
    arguments = (*extras, function, *encode(options), deterministic, bias_grad, dlse)
    return _gradients(dout, q, k, v, out, lse, *arguments)


@torch.library.custom_op(
    "cupyflash::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> (Tensor out, Tensor lse)",
)
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    function, options, extras, _ = decode(arguments)
    LIBRARY.refuse_tangents(q, k, v, *extras)
    out, lse = dispatch.forward_without_gradient(
        function, LIBRARY, q, k, v, options, extras, need_lse=True
    )
    return out, lse


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    function, options, extras, _ = decode(arguments)
    require_one_device(function, q, k, v, *extras)
    layout = options.layout_of("q")
    axes = {"thd": (1, 0), "bhsd": (0, 1, 2)}.get(layout, (0, 2, 1))  # of the LSE
    if q.dim() != len(axes) + 1:
        fact = f"q must have {len(axes) + 1} dimensions"
        raise ValueError(f"{function}: {fact}, got {q.dim()}: {tuple(q.shape)}")
    lse = q.new_empty([q.shape[axis] for axis in axes], dtype=torch.float32)
    return _empty(q, v.shape[-1], kernel_head_dim(q.shape[-1], v.shape[-1])), lse


# Inductor keeps graphs on disk by the names of operators: new arguments come last, with a default.
@torch.library.custom_op(
    "cupyflash::attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{ARGUMENTS}, bool bias_grad, Tensor? dlse=None) -> Tensor[]"
    ),
)
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    """dq, dk, dv, then dbias if asked for, then dsinks if there are sinks."""
    arguments, bias_grad, dlse = split_backward(arguments)
    function, options, extras, deterministic = decode(arguments)
    LIBRARY.refuse_tangents(dout, q, k, v, out, lse, dlse, *extras)
    tensors = (readable(dout, out), q, k, v, out, lse)
    gradients = dispatch.backward(
        function, *tensors, options, extras, deterministic, bias_grad, dlse
    )
    learned = zip(gradients[3:], _learned(extras, bias_grad))
    learned = [x.reshape(like.shape).contiguous() for x, like in learned if like is not None]
    return [*gradients[:3], *learned]


@_backward_op.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    arguments, bias_grad, dlse = split_backward(arguments)
    extras = Extras(*arguments[:NUM_EXTRAS])
    require_one_device(arguments[NUM_EXTRAS], q, dout, k, v, out, lse, dlse, *extras)
    learned = [x for x in _learned(extras, bias_grad) if x is not None]
    width = kernel_head_dim(q.shape[-1], v.shape[-1])
    gradients = [_empty(x, x.shape[-1], width) for x in (q, k, v)]
    return [*gradients, *(x.new_empty(x.shape) for x in learned)]


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, *arguments[:NUM_EXTRAS])
    ctx.arguments = arguments[NUM_EXTRAS:]
    ctx.set_materialize_grads(False)  # a dlse of zeros would be read for nothing


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *extras = ctx.saved_tensors
    bias_grad = Extras(*ctx.needs_input_grad[3 : 3 + NUM_EXTRAS]).bias
    tensors = (readable(dout, out), q, k, v, out, lse)
    dq, dk, dv, dbias, dsinks = _gradients(*tensors, *extras, *ctx.arguments, bias_grad, dlse)
    return dq, dk, dv, *Extras(bias=dbias, sinks=dsinks), *[None] * len(ctx.arguments)


def _gradients(*arguments: Any) -> Gradients:
    """What `_backward_op` of these arguments gives, by name."""
    call = TransformedBackward.apply if _transforms_active() else _backward_op
    dq, dk, dv, *learned = call(*arguments)
    bias_grad = arguments[-2]
    dbias = learned.pop(0) if bias_grad else None
    return Gradients(dq, dk, dv, dbias, learned[0] if learned else None)


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError("cupyflash: attention has no second derivative")


_forward_op.register_autograd(_backward, setup_context=_setup_context)
_backward_op.register_autograd(_no_second_derivative)
_forward_op.register_vmap(torch_vmap.forward_rule(_forward_op))
_backward_op.register_vmap(torch_vmap.backward_rule(_backward_op))


class Transformed(torch.autograd.Function):
    """The operator for torch.func, which takes no derivative of operators."""

    forward = staticmethod(_forward_op)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    vmap = staticmethod(torch_vmap.forward_rule(lambda *x: Transformed.apply(*x)))


class TransformedBackward(torch.autograd.Function):
    """The operator of the backward for torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_backward_op(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    backward = staticmethod(_no_second_derivative)
    vmap = staticmethod(torch_vmap.backward_rule(lambda *x: TransformedBackward.apply(*x)))


def _transforms_active() -> bool:
    """Dynamo maps operators by itself and cannot trace the functions for torch.func."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _learned(extras: Extras, bias_grad: bool) -> tuple[Tensor | None, Tensor | None]:
    """The optional tensors whose gradients the backward gives."""
    return extras.bias if bias_grad else None, extras.sinks


def _empty(like: Tensor, head_dim: int, width: int) -> Tensor:
    """What is allocated for a result like this tensor but for its head_dim.

    Args:
        width: the head_dim of the kernels; on the CPU there are none.
    """
    shape, view = (*like.shape[:-1], head_dim), LIBRARY.view(like)
    if like.device.type == "cpu":
        strides = LIBRARY.strides_of_empty(shape, view)
    else:
        strides = result_strides(LIBRARY, shape, width, view)
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
