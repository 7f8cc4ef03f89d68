"""torch operators ``cupyflash::linear`` and ``cupyflash::rotate``, and the gradients of a product.

Calls take them where torch has to see them. Only a projection without norm, gate and activation has
a gradient here, of which `autograd` makes those of all others.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from ...runtime.array import dense_strides
from ...runtime.lookup import library_of
from ...runtime.torch_calls import require_one_device
from ...runtime.torch_operator import operator, register_autograd, register_fake
from . import elementwise, plan, reference
from .checks import check_rotation
from .options import Arrays, Options

LIBRARY = library_of(torch.empty(0))
NUM_ARRAYS = len(Arrays._fields)
NUM_INPUTS = NUM_ARRAYS + 1 + len(Options._fields)  # inputs of the operator
WITH_GRADIENT = ("x", "weight", "bias", "residual")  # the inputs of a product
OF_PRODUCT = (*WITH_GRADIENT, "cos", "sin", "positions")


def save_product(ctx: Any, arrays: Arrays, needs: tuple[bool, ...]) -> None:
    """Keep x for the gradient of weight, weight for that of x, and the angles."""
    x = arrays.x if needs[1] else None
    weight = arrays.weight if needs[0] else None
    ctx.save_for_backward(x, weight, arrays.cos, arrays.sin, arrays.positions)


def product_gradients(
    dout: Tensor, needs: tuple[bool, ...], saved: tuple[Tensor | None, ...], options: Options
) -> list[Tensor | None]:
    """The gradients of `WITH_GRADIENT`, where ``needs`` says that they are wanted."""
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


def flat(function: str, arrays: Arrays, options: Options) -> tuple[Any, ...]:
    """The arguments of the operator ``cupyflash::linear``."""
    *others, heads = options  # older Dynamos fail at slices of a NamedTuple
    return (*arrays, function, *others, list(heads))


def _unflat(arguments: tuple[Any, ...]) -> tuple[str, Arrays, Options]:
    function, *options, heads = arguments[NUM_ARRAYS:]
    return function, Arrays(*arguments[:NUM_ARRAYS]), Options(*options, tuple(heads))


@operator(
    "linear(Tensor x, Tensor weight, "
    + ", ".join(f"Tensor? {name}" for name in Arrays._fields[2:])
    + ", str function, str activation, float eps, bool rms, bool interleaved, SymInt[] heads)"
    " -> Tensor"
)
def linear(*arguments: Any) -> Tensor:
    """All that a call computes; the arguments are those of `flat`."""
    function, arrays, options = _unflat(arguments)
    LIBRARY.refuse_tangents(*arrays)
    return plan.run(function, LIBRARY, arrays, options)[0]


@register_fake(linear)
def _(*arguments: Any) -> Tensor:
    function, arrays, _ = _unflat(arguments)
    require_one_device(function, *arrays)
    last = arrays.weight if arrays.down_weight is None else arrays.down_weight
    return arrays.x.new_empty((*arrays.x.shape[:-1], last.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, arrays, ctx.options = _unflat(inputs)
    others = (y for name, y in arrays._asdict().items() if name not in OF_PRODUCT)
    ctx.is_product = ctx.options.activation == "none" and all(y is None for y in others)
    ctx.needs = [ctx.needs_input_grad[Arrays._fields.index(name)] for name in WITH_GRADIENT]
    save_product(ctx, arrays, ctx.needs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.is_product:
        raise NotImplementedError(
            "cupyflash::linear: has a gradient without norm, gate and activation only, got some "
            "(call cupyflash.linear or cupyflash.mlp)"
        )
    found = product_gradients(dout, ctx.needs, ctx.saved_tensors, ctx.options)
    results: list[Tensor | None] = [None] * NUM_INPUTS
    for name, result in zip(WITH_GRADIENT, found):
        results[Arrays._fields.index(name)] = result
    return tuple(results)


register_autograd(linear, _backward, setup_context=_setup, several=True)


@operator(
    "rotate(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, SymInt[] heads) "
    "-> Tensor"
)
def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    heads: list[int],
) -> Tensor:
    """x (..., (heads_q + 2 heads_kv) * head_dim) with the heads of q and k rotated."""
    LIBRARY.refuse_tangents(x, cos, sin)
    options = Options(interleaved=interleaved, heads=tuple(heads))
    if x.is_cuda:
        out = x.clone(memory_format=torch.contiguous_format)
        elementwise.rotate(LIBRARY, out, cos, sin, positions, options)
        return out
    check_rotation(LIBRARY, x, (cos, sin, positions), options)
    given = (None if y is None else LIBRARY.to_numpy(y) for y in (cos, sin, positions))
    angles = dict(zip(("cos", "sin", "positions"), given))
    out = reference.rotated(LIBRARY.to_numpy(x), Arrays(None, None, **angles), options)
    return LIBRARY.from_numpy(out, x, dense_strides(out.shape, range(out.ndim)))


@register_fake(rotate)
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


register_autograd(rotate, _gradient_of_rotate, setup_context=_setup_rotate, several=True)
