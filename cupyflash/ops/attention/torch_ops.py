"""torch operators ``cupyflash::attention`` and ``cupyflash::attention_backward``.

A call takes them where torch has to see it: torch.compile traces it, a transform of torch.func maps
it, a dispatch mode records it, a tensor subclass replaces it. All other calls go around torch's
dispatcher, which costs more than the rest of a call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...runtime.array import compiling
from ...runtime.lookup import library_of
from ...runtime.torch_calls import (
    no_second_derivative,
    promised_strides,
    readable,
    refuse_functionalize,
    require_one_device,
    transforms_active,
)
from ...runtime.torch_operator import operator, register_autograd, register_fake, register_vmap
from . import dispatch
from .options import (
    ARGUMENTS,
    BIAS,
    NEWEST_ARGUMENT,
    NUM_ARGUMENTS,
    NUM_EXTRAS,
    SINKS,
    SLOPES,
    Extras,
    Gradients,
    decode,
    encode,
)
from .planning import result_strides
from .preparation import refuse_slopes
from .problem import kernel_head_dim

LIBRARY = library_of(torch.empty(0))


def attention(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor]:
    """(out, lse) of `dispatch.forward` through the operator."""
    q, k, v, *extras = arrays
    call = _forward_op
    if not compiling():
        refuse_functionalize(function)
        call = Transformed.apply if transforms_active() else call
    # The list is made here, because each item of a tuple of the module would be a guard of a
    # compiled call.
    return call(q, k, v, *(extras or [None] * NUM_EXTRAS), function, *encode(options))


def attention_backward(function: str, arrays: tuple, options: tuple, bias_grad: bool) -> Gradients:
    """`dispatch.backward` through the operator, whose own derivative is an error."""
    *tensors, dlse = arrays[:7]
    extras = arrays[7:] or [None] * NUM_EXTRAS
    *options, precision = encode(options)
    return _gradients(*tensors, *extras, function, *options, bias_grad, dlse, precision)


def split_backward(arguments: tuple) -> tuple[tuple, bool, Any]:
    """(arguments of the forward, bias_grad, dlse) of the backward; torch leaves out defaults."""
    bias_grad, *rest = arguments[NUM_ARGUMENTS:]
    dlse, precision = (*rest, *(None, "ieee")[len(rest) :])
    return (*arguments[:NUM_ARGUMENTS], precision), bias_grad, dlse


@operator(
    f"attention(Tensor q, Tensor k, Tensor v, {ARGUMENTS}, {NEWEST_ARGUMENT}) "
    "-> (Tensor out, Tensor lse)"
)
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    function, extras, options = decode(arguments)
    LIBRARY.refuse_tangents(q, k, v, *extras)
    return dispatch.forward(function, LIBRARY, (q, k, v, *extras), (options, True))


@register_fake(_forward_op)
def fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    function, extras, options = decode(arguments)
    require_one_device(function, q, k, v, *extras)
    layout = options.layout_of("q")
    axes = {"thd": (1, 0), "bhsd": (0, 1, 2)}.get(layout, (0, 2, 1))  # axes of the LSE
    if q.dim() != len(axes) + 1:
        fact = f"q must have {len(axes) + 1} dimensions"
        raise ValueError(f"{function}: {fact}, got {q.dim()}: {tuple(q.shape)}")
    lse = q.new_empty([q.shape[axis] for axis in axes], dtype=torch.float32)
    return _empty(q, v.shape[-1], kernel_head_dim(q.shape[-1], v.shape[-1])), lse


@operator(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{ARGUMENTS}, bool bias_grad, Tensor? dlse=None, {NEWEST_ARGUMENT}) -> Tensor[]"
)
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    """dq, dk, dv, then dbias if asked for, then dsinks if there are sinks."""
    arguments, bias_grad, dlse = split_backward(arguments)
    function, extras, options = decode(arguments)
    LIBRARY.refuse_tangents(dout, q, k, v, out, lse, dlse, *extras)
    arrays = (readable(dout, out), q, k, v, out, lse, dlse, *extras)
    gradients = dispatch.backward(function, LIBRARY, arrays, (options, bias_grad))
    learned = zip(gradients[3:], _learned(extras, bias_grad))
    learned = [x.reshape(like.shape).contiguous() for x, like in learned if like is not None]
    return [*gradients[:3], *learned]


@register_fake(_backward_op)
def fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    arguments, bias_grad, dlse = split_backward(arguments)
    function, extras, _ = decode(arguments)
    require_one_device(function, q, dout, k, v, out, lse, dlse, *extras)
    learned = [x for x in _learned(extras, bias_grad) if x is not None]
    width = kernel_head_dim(q.shape[-1], v.shape[-1])
    gradients = [_empty(x, x.shape[-1], width) for x in (q, k, v)]
    return [*gradients, *(x.new_empty(x.shape) for x in learned)]


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    out, lse = output
    if ctx.needs_input_grad[3 + SLOPES]:  # `prepared`, which torch.compile skips, says so
        refuse_slopes(arguments[NUM_EXTRAS])
    ctx.save_for_backward(q, k, v, out, lse, *arguments[:NUM_EXTRAS])
    ctx.arguments = arguments[NUM_EXTRAS:]
    ctx.set_materialize_grads(False)  # a dlse of zeros would be read for nothing


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *extras = ctx.saved_tensors
    bias_grad = ctx.needs_input_grad[3 + BIAS]
    tensors = (readable(dout, out), q, k, v, out, lse)
    *arguments, precision = (*ctx.arguments, "ieee")[: NUM_ARGUMENTS - NUM_EXTRAS + 1]
    gradients = _gradients(*tensors, *extras, *arguments, bias_grad, dlse, precision)
    dq, dk, dv, dbias, dsinks = gradients
    return dq, dk, dv, *Extras(bias=dbias, sinks=dsinks), *[None] * len(ctx.arguments)


def _gradients(*arguments: Any) -> Gradients:
    """Calls `_backward_op` and names its results."""
    call = TransformedBackward.apply if transforms_active() else _backward_op
    dq, dk, dv, *learned = call(*arguments)
    bias_grad = arguments[-3]
    dbias = learned.pop(0) if bias_grad else None
    return Gradients(dq, dk, dv, dbias, learned[0] if learned else None)


_no_second_derivative = no_second_derivative("attention has no second derivative")

# The optional tensors that may have a batch axis, which is then the first of so many axes.
RANKS = {"alibi_slopes": 2, "bias": 4, "seqused_q": 1, "seqused_k": 1, "key_mask": 2}
NOT_BUILT = {
    "cu_seqlens_q": "of packed sequences",
    "cu_seqlens_k": "of packed sequences",
    "dropout_seed": "with dropout",
}


def forward_rule(call: Callable) -> Callable:
    """The vmap rule of ``call(q, k, v, *extras, ...)`` -> (out, lse).

    Raises:
        NotImplementedError: packed sequences; dropout; sinks that are mapped.
    """

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        return mapped(call, info.batch_size, in_dims, arguments, 3)

    return rule


def backward_rule(call: Callable) -> Callable:
    """The vmap rule of ``call(dout, q, k, v, out, lse, *extras, ..., bias_grad, dlse)``.

    Raises:
        NotImplementedError: as the forward, and with sinks or a gradient of the bias: the kernels
            add these up over the batch.
    """

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        tensors, (rest, bias_grad, dlse) = arguments[:6], split_backward(arguments[6:])
        if bias_grad or Extras(*rest[:NUM_EXTRAS]).sinks is not None:
            raise _not_built("of the gradient of bias or sinks")
        dims = (*in_dims[:6], None if dlse is None else in_dims[6 + len(rest)], *in_dims[6:])
        *rest, precision = rest
        arguments = (*tensors, dlse, *rest, bias_grad, precision)
        return mapped(last_at_6, info.batch_size, dims, arguments, 7)

    def last_at_6(*arguments: Any) -> Any:
        return call(*arguments[:6], *arguments[7:-1], arguments[6], arguments[-1])

    return rule


def mapped(
    call: Callable, size: int, in_dims: tuple, arguments: tuple, num_tensors: int
) -> tuple[Any, Any]:
    """(results, their mapped axes) for ``size`` entries of the mapped axes ``in_dims``."""
    end = num_tensors + NUM_EXTRAS
    extras, dims = Extras(*arguments[num_tensors:end]), Extras(*in_dims[num_tensors:end])
    for name, what in NOT_BUILT.items():
        if getattr(extras, name) is not None:
            raise _not_built(what)
    if dims.sinks is not None:
        raise _not_built("over sinks")
    tensors = [  # the last one of the backward, dlse, may be None
        None if x is None else _mapped_first(x, dim, size)
        for x, dim in zip(arguments[:num_tensors], in_dims)
    ]
    batch = tensors[0].shape[1]
    folded = [None if x is None else x.flatten(0, 1) for x in tensors]
    for name, rank in RANKS.items():
        x, dim = getattr(extras, name), getattr(dims, name)
        if x is not None and not (dim is None and _broadcast_over_batch(x, rank)):
            x = _mapped_first(x, dim, size)
            x = x.reshape(size, *[1] * (rank + 1 - x.dim()), *x.shape[1:])
            x = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
            extras = extras._replace(**{name: x})
    results = call(*folded, *extras, *arguments[end:])
    kind = type(results)
    return kind(x.unflatten(0, (size, batch)) for x in results), kind(0 for _ in results)


def _mapped_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the mapped axis in front.

    Where no axis is mapped, each entry gets a copy, because not every kernel takes a stride of 0.
    """
    return x.expand(size, *x.shape).contiguous() if dim is None else x.movedim(dim, 0)


def _broadcast_over_batch(x: Tensor, rank: int) -> bool:
    return x.dim() < rank or (rank == RANKS["bias"] and x.shape[0] == 1)


def _not_built(what: str) -> NotImplementedError:
    return NotImplementedError(f"cupyflash: torch.func.vmap {what} is not built")


register_autograd(_forward_op, _backward, setup_context=_setup_context)
register_autograd(_backward_op, _no_second_derivative)
register_vmap(_forward_op, forward_rule(_forward_op))
register_vmap(_backward_op, backward_rule(_backward_op))


class Transformed(torch.autograd.Function):
    """The operator for torch.func, which takes no derivative of operators."""

    forward = staticmethod(_forward_op)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    vmap = staticmethod(forward_rule(lambda *x: Transformed.apply(*x)))


class TransformedBackward(torch.autograd.Function):
    """The operator of the backward for torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_backward_op(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    backward = staticmethod(_no_second_derivative)
    vmap = staticmethod(backward_rule(lambda *x: TransformedBackward.apply(*x)))


def _learned(extras: tuple, bias_grad: bool) -> tuple[Tensor | None, Tensor | None]:
    """The optional tensors whose gradients the backward gives."""
    return (extras[BIAS] if bias_grad else None, extras[SINKS]) if extras else (None, None)


def _empty(like: Tensor, head_dim: int, width: int) -> Tensor:
    """Allocates a result like this tensor, but for its head_dim.

    Args:
        width: the head_dim of the kernels; on the CPU there are none.
    """
    columns = head_dim if like.device.type == "cpu" else width
    rule = lambda view: result_strides(LIBRARY, columns, view)  # noqa: E731
    strides = promised_strides(LIBRARY.view(like), rule, columns)
    shape = (*like.shape[:-1], head_dim)
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
