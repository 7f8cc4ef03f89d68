"""Calls with torch tensors: autocast, gradients, and the operators where torch must see a call."""

from typing import Any

import torch
from torch import Tensor

from ...runtime.array import compiling
from ...runtime.lookup import library_of
from ...runtime.torch_calls import readable, refuse_batched
from . import dispatch
from .options import BIAS, DROPOUT_P, NUM_EXTRAS, SINKS, Gradients, text_of
from .preparation import BACKWARD_TENSORS, TENSORS, prepared, with_seed

LIBRARY = library_of(torch.empty(0))


class Forward:
    """`dispatch.forward` with a gradient."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple[tuple, bool]) -> tuple[Tensor, Tensor]:
        """(out, lse) by the operator, for torch.compile, dispatch modes and tensor subclasses."""
        prepare = with_seed if compiling() else prepared
        arrays = _autocast(prepare(function, LIBRARY, TENSORS, arrays, options[0]))
        if text_of(options[0]) is not None:
            from . import torch_text

            return torch_text.attention(function, arrays, options[0])
        from . import torch_ops, torch_plain

        if torch_plain.is_plain(arrays, options[0]):
            return torch_plain.attention(function, arrays, options[0])
        return torch_ops.attention(function, arrays, options[0])

    @staticmethod
    def called(
        function: str, arrays: tuple, options: tuple[tuple, bool]
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse), recorded for the backward pass where a tensor requires a gradient."""
        q, k, v = arrays[:3]
        if len(arrays) > 3 or options[0][DROPOUT_P] or not type(q) is type(k) is type(v):
            arrays = prepared(function, LIBRARY, TENSORS, arrays, options[0])
        if LIBRARY.is_autocast():
            arrays = _autocast(arrays)
            if not LIBRARY.wants_gradient(*arrays):
                return dispatch.forward(function, LIBRARY, arrays, options)
        q, k, v, *extras = arrays
        learned = (extras[BIAS], extras[SINKS]) if extras else (None, None)
        extras, captures = extras[:NUM_EXTRAS], extras[NUM_EXTRAS:]
        results = _record(q, k, v, *learned, (function, extras, *options), *captures)
        return results if options[1] else (results, None)


class Backward:
    """`dispatch.backward`, whose own derivative is an error."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple[tuple, bool]) -> Gradients:
        """The gradients by the operator."""
        if not compiling():
            arrays = prepared(function, LIBRARY, BACKWARD_TENSORS, arrays, options[0])
        if text_of(options[0]) is not None:
            from . import torch_text

            return torch_text.attention_backward(function, arrays, *options)
        from . import torch_ops

        return torch_ops.attention_backward(function, arrays, *options)


class Attention(torch.autograd.Function):
    """(out, lse) of `dispatch.forward`, or out; either may have a gradient.

    Bias and sinks are arguments of their own, as only those of the extras have gradients. All that
    is no tensor is one argument, as torch spends time on each; but the captures of a text are
    tensors and numbers.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sinks, call, *captures):  # noqa: ANN001, ANN205
        function, extras, options, need_lse = call
        # Tensors in here would outlive what checkpoints and hooks make of saved ones.
        ctx.call = function, len(extras), options
        arrays = (q, k, v, *extras, *captures)
        out, lse = dispatch.forward(function, LIBRARY, arrays, (options, True))
        if out._is_view():  # columns of a wider array: torch would refuse out.mul_(x)
            out = out.detach()
        ctx.numbers = ()
        if captures:
            ctx.numbers = [None if isinstance(x, Tensor) else x for x in captures]
            captures = [x if isinstance(x, Tensor) else None for x in captures]
        ctx.save_for_backward(q, k, v, out, lse, *extras, *captures)
        if not need_lse:
            return out
        ctx.set_materialize_grads(False)  # a dlse of zeros would be read for nothing
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse=None):  # noqa: ANN001, ANN205
        refuse_batched(dout, dlse)
        q, k, v, out, lse, *extras = ctx.saved_tensors
        function, given, options = ctx.call
        if ctx.numbers:
            from .score_text.arguments import learned_options

            options = learned_options(options, ctx.needs_input_grad[6:])
            extras, captures = extras[:given], extras[given:]
            extras += [x if number is None else number for x, number in zip(captures, ctx.numbers)]
        arrays = (readable(dout, out), q, k, v, out, lse, dlse, *extras)
        options = (options, ctx.needs_input_grad[3])
        if torch.is_grad_enabled():  # create_graph=True: not as if the gradients were constants
            gradients = Backward.traced(function, arrays, options)
        else:
            gradients = dispatch.backward(function, LIBRARY, arrays, options)
        rest = len(ctx.numbers) - len(gradients[5:])  # found tiles, which stand behind captures
        return *gradients[:5], None, *gradients[5:], *[None] * rest


# This skips the Python layer of `Attention.apply`, which only transforms of torch.func need; they
# take `Forward.traced`.
_record = super(torch.autograd.Function, Attention).apply


def _autocast(arrays: tuple) -> tuple[Tensor | None, ...]:
    """The arrays of a forward, cast under autocast as torch's own attention casts them.

    A float32 bias and float32 sinks stay what they are: the kernels read them as they lie.
    """
    device = arrays[0].device.type
    if arrays[0].is_meta or not torch.is_autocast_enabled(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple([_cast(x, dtype, place - 3) for place, x in enumerate(arrays)])


def _cast(x: Tensor | None, dtype: torch.dtype, extra: int) -> Tensor | None:
    """x as autocast casts it; ``extra`` is its place in `Extras`, negative for q, k and v."""
    if x is None or x.dtype == dtype:
        return x
    if extra >= 0 and (extra not in (BIAS, SINKS) or x.dtype == torch.float32):
        return x
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
