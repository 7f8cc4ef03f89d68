"""torch operator ``cupyflash::linear``: the projections of `dispatch.run`, and their gradients.

Calls take it where torch has to see them, as those of attention do (``torch_ops.py``). Gradients
are those of projections without norm, gate and activation, of which `autograd` makes the others.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..runtime.array import dense_strides, library_of
from ..runtime.torch_calls import require_one_device
from . import dispatch, reference, rotary
from .checks import check_rotation
from .dispatch import Down
from .reference import Arrays, Options

LIBRARY = library_of(torch.empty(0))
NUM_ARRAYS = len(Arrays._fields)
INPUTS = NUM_ARRAYS + len(Down._fields)
OPTIONAL = [*Arrays._fields[2:], *(f"down_{name}" for name in Down._fields)]
NUM_INPUTS = INPUTS + len(Options._fields) + 1  # the name of the function
WITH_GRADIENT, ANGLES = (
    [Arrays._fields.index(name) for name in names]
    for names in (("x", "weight", "bias", "residual"), ("cos", "sin", "positions"))
)
OF_STEP = (*WITH_GRADIENT, *ANGLES)  # what a projection with a gradient may have


def flat(function: str, arrays: Arrays, options: Options, down: Down) -> tuple[Any, ...]:
    """The arguments of the operator."""
    return (*arrays, *down, function, *options[:-1], list(options.heads))


def project(*arguments: Any) -> Tensor:
    """`dispatch.run`."""
    given, (function, *options, heads) = arguments[:INPUTS], arguments[INPUTS:]
    LIBRARY.refuse_tangents(*given)
    return dispatch.run(function, LIBRARY, given, Options(*options, tuple(heads)))[0]


def gradients(
    dout: Tensor, needs: tuple[bool, ...], saved: tuple[Tensor | None, ...], options: Options
) -> list[Tensor | None]:
    """Of x, weight, bias and residual, for a projection without norm, gate and activation.

    Args:
        needs: which of the four are wanted.
        saved: x, weight, cos, sin and positions; x for the gradient of weight, weight for that of
            x, the others where there is a rotary embedding.
    """
    x, weight, cos, sin, positions = saved
    results: list[Tensor | None] = [None, None, None, dout if needs[3] else None]
    if cos is not None:
        dout = rotate(dout, cos, -sin, positions, options.interleaved, list(options.heads))
    rows = dout.reshape(-1, dout.shape[-1])
    plain = contextlib.nullcontext()
    if torch._C._is_any_autocast_enabled():  # float32 stays float32
        plain = torch.autocast(dout.device.type, enabled=False)
    with plain:
        if needs[0]:
            results[0] = (rows @ weight).reshape(*dout.shape[:-1], weight.shape[1])
        if needs[1]:
            results[1] = rows.t() @ x.reshape(-1, x.shape[-1])
        if needs[2]:
            results[2] = rows.sum(0)
    return results


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    arrays, (_, *options, heads) = Arrays(*inputs[:NUM_ARRAYS]), inputs[INPUTS:]
    ctx.options = Options(*options, tuple(heads))
    ctx.is_step = ctx.options.activation == "none" and all(
        y is None for i, y in enumerate(inputs[:INPUTS]) if i not in OF_STEP
    )
    needs_x, needs_weight, *_ = ctx.needs = [ctx.needs_input_grad[i] for i in WITH_GRADIENT]
    x, weight = arrays.x if needs_weight else None, arrays.weight if needs_x else None
    ctx.save_for_backward(x, weight, arrays.cos, arrays.sin, arrays.positions)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.is_step:
        raise NotImplementedError(
            "cupyflash::linear: has a gradient without norm, gate and activation only, got some "
            "(call cupyflash.linear or cupyflash.mlp)"
        )
    found = gradients(dout, ctx.needs, ctx.saved_tensors, ctx.options)
    results: list[Tensor | None] = [None] * NUM_INPUTS
    for index, result in zip(WITH_GRADIENT, found):
        results[index] = result
    return tuple(results)


operator = torch.library.custom_op(
    "cupyflash::linear",
    project,
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, "
        + ", ".join(f"Tensor? {name}" for name in OPTIONAL)
        + ", str function, str activation, float eps, bool rms, bool interleaved, SymInt[] heads)"
        " -> Tensor"
    ),
)
operator.register_autograd(_backward, setup_context=_setup)


@operator.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    require_one_device(rest[INPUTS - 2], x, weight, *rest[: INPUTS - 2])
    down_weight = rest[NUM_ARRAYS - 2]
    last = weight if down_weight is None else down_weight
    return x.new_empty((*x.shape[:-1], last.shape[0]))


@torch.library.custom_op(
    "cupyflash::rotate",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, SymInt[] heads) "
        "-> Tensor"
    ),
)
def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    heads: list[int],
) -> Tensor:
    """x (..., (heads_q + 2 heads_kv) * head_dim) with the heads of q and k turned."""
    LIBRARY.refuse_tangents(x, cos, sin)
    options = Options(interleaved=interleaved, heads=tuple(heads))
    if x.is_cuda:
        out = x.clone(memory_format=torch.contiguous_format)
        rotary.turn(LIBRARY, out, cos, sin, positions, options)
        return out
    check_rotation(rotary.FUNCTION, LIBRARY, x, (cos, sin, positions), options)
    given = (None if y is None else LIBRARY.to_numpy(y) for y in (cos, sin, positions))
    angles = dict(zip(("cos", "sin", "positions"), given))
    out = reference.turned(LIBRARY.to_numpy(x), Arrays(None, None, **angles), options)
    return LIBRARY.from_numpy(out, x, dense_strides(out.shape, range(out.ndim)))


@rotate.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    require_one_device("qkv_projection", x, *rest[:3])
    return x.new_empty(x.shape)


def _setup_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *angles, interleaved, heads = inputs
    ctx.save_for_backward(*angles)
    ctx.options = interleaved, heads


def _gradient_of_rotate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    dx = rotate(dout, cos, -sin, positions, *ctx.options)
    return dx, None, None, None, None, None


rotate.register_autograd(_gradient_of_rotate, setup_context=_setup_rotate)
