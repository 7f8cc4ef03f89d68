"""torch operators ``cupyflash::attention_text`` and ``cupyflash::attention_text_backward``.

They are those of torch_ops.py with the text of a score or a mask, and what it reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime.array import compiling
from ...runtime.torch_calls import (
    no_second_derivative,
    readable,
    refuse_functionalize,
    transforms_active,
)
from ...runtime.torch_operator import operator, register_autograd, register_fake, register_vmap
from . import dispatch
from .options import ARGUMENTS, BIAS, NUM_ARGUMENTS, NUM_EXTRAS, SLOPES, Extras, decode, encode
from .preparation import refuse_slopes
from .score_text.encode import decode_text, encode_text, folded, values_of
from .torch_ops import LIBRARY, fake_backward, fake_forward, mapped

NUM_PLAIN = NUM_ARGUMENTS + 1  # arguments between the tensors and the text
SCHEMA = f"{ARGUMENTS}, str precision, str text, Tensor[] captures, float[] numbers"


def attention(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor]:
    """(out, lse) of `dispatch.forward` through the operator."""
    q, k, v, *rest = arrays
    extras = rest[:NUM_EXTRAS] or [None] * NUM_EXTRAS
    arguments = (*extras, function, *encode(options))
    text = options[-1] if compiling() else encode_text(options[-1])
    tensors, numbers = _apart(rest[NUM_EXTRAS:])
    if not compiling():
        refuse_functionalize(function)
        if transforms_active():
            return Transformed.apply(q, k, v, *arguments, text, tuple(numbers), *tensors)
    return _forward_op(q, k, v, *arguments, text, tensors, numbers)


def attention_backward(
    function: str, arrays: tuple, options: tuple, bias_grad: bool
) -> tuple[Tensor | None, ...]:
    """`dispatch.backward` through the operator, whose own derivative is an error."""
    tensors, dlse, rest = arrays[:6], arrays[6], arrays[7:]
    extras = rest[:NUM_EXTRAS] or [None] * NUM_EXTRAS
    arguments = (*extras, function, *encode(options))
    captures, numbers = _apart(rest[NUM_EXTRAS:])
    text = options[-1] if compiling() else encode_text(options[-1])
    return _gradients(tensors, arguments, text, captures, numbers, bias_grad, dlse)


def _apart(captures: Sequence[Any]) -> tuple[list[Tensor], list[float]]:
    """The tensors and the numbers of a call."""
    tensors = [x for x in captures if isinstance(x, Tensor)]
    return tensors, [float(x) for x in captures if isinstance(x, int | float)]


def _decoded(arguments: tuple) -> tuple[str, tuple, tuple, list]:
    """(function, optional arrays, options, captures) of an operator's arguments."""
    *plain, text, tensors, numbers = arguments
    function, extras, options = decode(tuple(plain))
    text = decode_text(text)
    values = values_of(text, tensors, numbers)
    return function, Extras(*extras), options._replace(text=text), values


@operator(f"attention_text(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor lse)")
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    function, extras, options, captures = _decoded(arguments)
    tensors = (q, k, v, *extras, *captures)
    LIBRARY.refuse_tangents(*tensors)
    return dispatch.forward(function, LIBRARY, tensors, (options, True))


@register_fake(_forward_op)
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return fake_forward(q, k, v, *arguments[:NUM_PLAIN])


@operator(
    "attention_text_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}, bool bias_grad, Tensor? dlse) -> Tensor[]"
)
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    """dq, dk, dv, dbias if asked for, dsinks if there are sinks, then those of the captures."""
    *arguments, bias_grad, dlse = arguments
    function, extras, options, captures = _decoded(tuple(arguments))
    arrays = (readable(dout, out), q, k, v, out, lse, dlse, *extras, *captures)
    LIBRARY.refuse_tangents(*arrays)
    gradients = dispatch.backward(function, LIBRARY, arrays, (options, bias_grad))
    likes = (extras.bias if bias_grad else None, extras.sinks)
    likes += tuple(x if of.learns else None for of, x in zip(options.text.captures, captures))
    learned = zip(gradients[3:], likes, strict=True)
    learned = [x.reshape(like.shape).contiguous() for x, like in learned if like is not None]
    return [*gradients[:3], *learned]


@register_fake(_backward_op)
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    *plain, text, tensors, _, bias_grad, dlse = arguments
    *plain, precision = plain
    gradients = fake_backward(dout, q, k, v, out, lse, *plain, bias_grad, dlse, precision)
    flags = [x.learns for x in decode_text(text).captures if not x.is_number]
    return [*gradients, *(x.new_empty(x.shape) for x, learns in zip(tensors, flags) if learns)]


def _gradients(
    tensors: Sequence[Tensor],
    arguments: Sequence[Any],
    text: str,
    captures: list[Tensor],
    numbers: list[float],
    bias_grad: bool,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The fields of `Gradients` and, for each capture, its gradient or None."""
    if transforms_active():
        flat = (*arguments, text, tuple(numbers), bias_grad, dlse, *captures)
        found = TransformedBackward.apply(*tensors, *flat)
    else:
        found = _backward_op(*tensors, *arguments, text, captures, numbers, bias_grad, dlse)
    dq, dk, dv, *learned = found
    dbias = learned.pop(0) if bias_grad else None
    dsinks = None if Extras(*arguments[:NUM_EXTRAS]).sinks is None else learned.pop(0)
    of_captures = [learned.pop(0) if x.learns else None for x in decode_text(text).captures]
    return dq, dk, dv, dbias, dsinks, *of_captures


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward needs of q, k, v, plain arguments, text, numbers and captures."""
    *plain, text, numbers = inputs[3 : 3 + NUM_PLAIN + 2]
    ctx.captures = len(inputs) - (3 + NUM_PLAIN + 2)
    tensors = (*inputs[:3], *output, *plain[:NUM_EXTRAS], *inputs[3 + NUM_PLAIN + 2 :])
    ctx.save_for_backward(*tensors)
    ctx.call = plain[NUM_EXTRAS:], text, numbers
    ctx.set_materialize_grads(False)  # a dlse of zeros would be read for nothing


def _backward(
    ctx: Any, flags: Sequence[bool], learns: Sequence[bool], dout: Any, dlse: Any
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """(gradients of q, k, v and the optional tensors, those of the captures).

    Args:
        flags, learns: what needs a gradient, of the former and of the latter.
    """
    q, k, v, out, lse, *saved = ctx.saved_tensors
    extras, captures = saved[:NUM_EXTRAS], saved[NUM_EXTRAS:]
    arguments, text, numbers = ctx.call
    if flags[3 + SLOPES]:
        refuse_slopes(arguments[0])
    text = decode_text(text)
    flags_of = iter(learns)
    learning = [x._replace(learns=not x.is_number and next(flags_of)) for x in text.captures]
    text = encode_text(text._replace(captures=tuple(learning)))
    tensors = (readable(dout, out), q, k, v, out, lse)
    call = (*extras, *arguments)
    found = _gradients(tensors, call, text, captures, list(numbers), flags[3 + BIAS], dlse)
    dq, dk, dv, dbias, dsinks, *of_captures = found
    of_tensors = [x for x, of in zip(of_captures, learning) if not of.is_number]
    return (dq, dk, dv, *Extras(bias=dbias, sinks=dsinks)), of_tensors


def _setup_op(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *plain, tensors, numbers = inputs
    _setup(ctx, (*plain, numbers, *tensors), output)


def _backward_of_op(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    *flags, learns, _ = ctx.needs_input_grad
    found, captures = _backward(ctx, flags, learns, dout, dlse)
    numbers = None if ctx.call[2] else []  # torch takes an empty list for one of tensors
    return *found, *[None] * (NUM_PLAIN - NUM_EXTRAS + 1), captures, numbers


_no_second_derivative = no_second_derivative("attention has no second derivative")
register_autograd(_forward_op, _backward_of_op, setup_context=_setup_op)
register_autograd(_backward_op, _no_second_derivative)


def forward_rule(call: Callable) -> Callable:
    """The vmap rule of ``call(q, k, v, *arguments, text, captures, numbers)``."""

    def rule(info: Any, in_dims: tuple, *inputs: Any) -> tuple:
        return _mapped(call, info.batch_size, in_dims, inputs, 3)

    return rule


def backward_rule(call: Callable) -> Callable:
    """The vmap rule of the arguments of `_backward_op`.

    Raises:
        NotImplementedError: as the forward, and with gradients that are summed over the batch.
    """

    def rule(info: Any, in_dims: tuple, *inputs: Any) -> tuple:
        *plain, text, captures, numbers, bias_grad, dlse = inputs
        learns = any(x.learns for x in decode_text(text).captures)
        if bias_grad or learns or Extras(*plain[6 : 6 + NUM_EXTRAS]).sinks is not None:
            what = "of the gradient of bias, sinks or what a score reads"
            raise NotImplementedError(f"cupyflash: torch.func.vmap {what} is not built")
        dims = (*in_dims[:6], in_dims[-1], *in_dims[6:-2])
        given = (*plain[:6], dlse, *plain[6:], text, captures, numbers)
        return _mapped(dlse_last, info.batch_size, dims, given, 7)

    def dlse_last(*given: Any) -> Any:
        return call(*given[:6], *given[7:], False, given[6])

    return rule


def _mapped(call: Callable, size: int, in_dims: tuple, inputs: tuple, tensors: int) -> tuple:
    """`mapped` of torch_ops, with a text whose batch index is that within an entry of the map.

    Raises:
        NotImplementedError: as without a text, and captures that are mapped.
    """
    *plain, text, captures, numbers = inputs
    if any(x is not None for x in in_dims[-2] or ()):
        raise NotImplementedError("cupyflash: torch.func.vmap over what a score reads is not built")
    first, dim = plain[tensors == 7], in_dims[tensors == 7]  # q
    batch = first.shape[1 if dim == 0 else 0]
    text, numbers = folded(text, numbers, batch)
    behind = lambda *given: call(*given, text, captures, numbers)  # noqa: E731
    return mapped(behind, size, in_dims[: len(plain)], tuple(plain), tensors)


def _nested(call: Callable) -> Callable:
    """``call(q, k, v, *arguments, text, captures, numbers)`` of a call with captures at its end."""
    return lambda *inputs: call(
        *inputs[: 3 + NUM_PLAIN + 1],
        list(inputs[3 + NUM_PLAIN + 2 :]),
        list(inputs[3 + NUM_PLAIN + 1]),
    )


class Transformed(torch.autograd.Function):
    """The operator for torch.func, which takes no derivative of operators, and of no lists."""

    forward = staticmethod(_nested(_forward_op))
    setup_context = staticmethod(_setup)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        flags, learns = ctx.needs_input_grad, ctx.needs_input_grad[3 + NUM_PLAIN + 2 :]
        found, captures = _backward(ctx, flags, learns, dout, dlse)
        return *found, *[None] * (NUM_PLAIN - NUM_EXTRAS + 2), *captures

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *inputs: Any) -> tuple:
        end = 3 + NUM_PLAIN + 1
        flat = lambda *x: Transformed.apply(*x[:end], tuple(x[-1]), *x[-2])  # noqa: E731
        dims = (*in_dims[:end], list(in_dims[end + 1 :]), None)
        inputs = (*inputs[:end], list(inputs[end + 1 :]), list(inputs[end]))
        return _mapped(flat, info.batch_size, dims, inputs, 3)


class TransformedBackward(torch.autograd.Function):
    """The operator of the backward for torch.func, without gradients of captures in vmap."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        end = 6 + NUM_PLAIN
        text, numbers, bias_grad, dlse = inputs[end : end + 4]
        captures = list(inputs[end + 4 :])
        return tuple(_backward_op(*inputs[:end], text, captures, list(numbers), bias_grad, dlse))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *inputs: Any) -> tuple:
        end = 6 + NUM_PLAIN

        def flat(*x: Any) -> Any:
            *plain, captures, numbers, bias_grad, dlse = x
            given = (*plain, tuple(numbers), bias_grad, dlse, *captures)
            return TransformedBackward.apply(*given)

        def nested(x: tuple) -> tuple:
            numbers, bias_grad, dlse, *captures = x[end + 1 :]
            return (*x[: end + 1], captures, numbers, bias_grad, dlse)

        return backward_rule(flat)(info, nested(in_dims), *nested(inputs))


register_vmap(_forward_op, forward_rule(_forward_op))
register_vmap(_backward_op, backward_rule(_backward_op))
