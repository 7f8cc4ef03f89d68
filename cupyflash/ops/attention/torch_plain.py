"""torch operators ``cupyflash::attention_plain`` and ``cupyflash::attention_plain_backward``.

Calls take them in the place of those of torch_ops.py if they have no optional arrays, softcap,
dropout or packed sequences, and no transform of torch.func maps them. torch converts every argument
of an operator at every call of a compiled graph, and these have a quarter of the arguments: the
options that are no numbers are one string.
"""

import functools
from typing import Any

from torch import Tensor

from ...runtime.torch_calls import current_transform, no_second_derivative, readable
from ...runtime.torch_operator import operator, register_autograd, register_fake, register_vmap
from . import dispatch
from .options import (
    CAUSAL,
    LAYOUTS,
    NUM_ARGUMENTS,
    NUM_EXTRAS,
    PRECISIONS,
    TEXT,
    Options,
    encode,
)
from .torch_ops import (
    LIBRARY,
    backward_rule,
    fake_backward,
    fake_forward,
    forward_rule,
)
from .torch_ops import _backward_op as general_backward
from .torch_ops import _forward_op as general_forward

OPTIONS = "str call, float? scale=None, SymInt[]? window=None"


def is_plain(arrays: tuple, options: tuple) -> bool:
    """Whether these operators take a call; the general ones say what is wrong with another."""
    causal, _, _, softcap, layout, lengths, dropout_p, _, precision = options[:TEXT]
    return (
        len(arrays) == 3
        and lengths is None
        and causal in CAUSAL
        and layout in LAYOUTS
        and precision in PRECISIONS
        and softcap == 0
        and dropout_p == 0
        and current_transform() is None
    )


def attention(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor]:
    """(out, lse) of `dispatch.forward` through the operator."""
    causal, scale, window, _, layout, _, _, deterministic, precision = encode(options)
    call = f"{function}|{causal}|{layout}|{deterministic}|{precision}"
    return _forward_op(*arrays, call, scale, window)


@functools.lru_cache(maxsize=1024)  # a bound on memory, for scales that change with every call
def _decoded(call: str, scale: float | None, window: tuple | None) -> tuple[str, Options]:
    function, causal, layout, deterministic, precision = call.split("|")
    in_order = deterministic == "True"
    plain = Options(causal or False, scale, window, layout=layout)
    return function, plain._replace(deterministic=in_order, precision=precision)


def _call_of(call: str, scale: float | None, window: Any) -> tuple[str, Options]:
    """The name of the function, and the options of a call."""
    return _decoded(call, scale, None if window is None else tuple(window))


def _general(call: str, scale: float | None = None, window: Any = None) -> tuple:
    """The arguments of the general operator behind the tensors."""
    function, options = _decoded.__wrapped__(call, scale, window)
    return (*[None] * NUM_EXTRAS, function, *encode(options))


@operator(f"attention_plain(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor out, Tensor lse)")
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, call: str, scale: float | None = None, window: Any = None
) -> tuple[Tensor, Tensor]:
    function, options = _call_of(call, scale, window)
    LIBRARY.refuse_tangents(q, k, v)
    return dispatch.forward(function, LIBRARY, (q, k, v), (options, True))


@operator(
    "attention_plain_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS}, Tensor? dlse=None) -> (Tensor dq, Tensor dk, Tensor dv)"
)
def _backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: str,
    scale: float | None = None,
    window: Any = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    function, options = _call_of(call, scale, window)
    LIBRARY.refuse_tangents(dout, q, k, v, out, lse, dlse)
    arrays = (readable(dout, out), q, k, v, out, lse, dlse)
    return dispatch.backward(function, LIBRARY, arrays, (options, False))[:3]


@register_fake(_forward_op)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    return fake_forward(q, k, v, *_general(*call))


@register_fake(_backward_op)
def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, call, dlse = _apart(arguments)
    *general, precision = _general(*call)
    return tuple(fake_backward(*tensors, *general, False, dlse, precision))


def _apart(arguments: tuple) -> tuple[tuple, tuple, Any]:
    """(tensors, options, dlse) of the backward; torch leaves out defaults."""
    return arguments[:6], arguments[6:9], arguments[9] if len(arguments) > 9 else None


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.call = (*inputs[3:], None, None)[:3]
    ctx.given = len(inputs)
    ctx.set_materialize_grads(False)  # a dlse of zeros would be read for nothing


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    gradients = _backward_op(readable(dout, out), q, k, v, out, lse, *ctx.call, dlse)
    return (*gradients, *[None] * (ctx.given - 3))


def _map_forward(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
    general = _general(*arguments[3:])
    dims = (*in_dims[:3], *[None] * len(general))
    return forward_rule(general_forward)(info, dims, *arguments[:3], *general)


def _map_backward(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
    tensors, call, dlse = _apart(arguments)
    *general, precision = _general(*call)
    dims = (*in_dims[:6], *[None] * (NUM_ARGUMENTS + 1), _apart(in_dims)[2], None)
    rule = backward_rule(general_backward)
    return tuple(map(tuple, rule(info, dims, *tensors, *general, False, dlse, precision)))


register_autograd(_forward_op, _backward, setup_context=_setup_context)
register_autograd(_backward_op, no_second_derivative("attention has no second derivative"))
register_vmap(_forward_op, _map_forward)
register_vmap(_backward_op, _map_backward)
