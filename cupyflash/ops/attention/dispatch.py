"""The way from the arrays of a call to the plan that computes it: GPU or CPU, cached or new.

Arrays come in the order of `TENSORS` or `BACKWARD_TENSORS`, and behind them the fields of `Extras`,
unless there is none of those. If the options have the text of a caller's score or mask, all fields
are there, and its captures follow them: arrays, and Python numbers.
"""

import dataclasses
import warnings
from typing import Any

from ... import environment
from ...runtime.array import Array, View
from ...runtime.gpu import card_of
from ...runtime.operation import Carried, Plans
from . import backends, cpu
from .checks import check, check_bias_gradient, check_lse
from .lengths import check_lengths
from .names import caller_name
from .options import (
    BIAS,
    DETERMINISTIC,
    DROPOUT_P,
    MAX_SEQLENS,
    NUM_EXTRAS,
    SINKS,
    Extras,
    Gradients,
    Options,
    text_of,
)
from .padding import Padding
from .plan import BackwardPlan, ForwardPlan
from .planning import backward_plan, forward_plan
from .preparation import BACKWARD_TENSORS, TENSORS, check_library, prepared, split_extras
from .problem import Problem

NOT_ARRAYS = (int, float, Carried)  # what captures may be beside arrays
LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"}

_forward_plans = Plans(wide=3)
_backward_plans = Plans(wide=4)

MAX_PACKED_PLANS = 64
# Nearly every batch of packed sequences has its own length, so only the latest plans are kept.
_packed_forward_plans = Plans(wide=3, most=MAX_PACKED_PLANS)
_packed_backward_plans = Plans(wide=4, most=MAX_PACKED_PLANS)


def forward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple[tuple, bool]
) -> tuple[Array, Array | None]:
    """(out, lse) of arrays of one library, without a gradient.

    Args:
        arrays: q, k, v and perhaps the fields of `Extras` and captures.
        options: the plain fields of `Options`, and whether the LSE is needed: else it may be None.
    """
    options, need_lse = options
    q, k, v = arrays[:3]
    if len(arrays) > 3 or options[DROPOUT_P] or not type(q) is type(k) is type(v):
        arrays = prepared(function, library, TENSORS, arrays, options)
    bias_aligned, sinks = True, None
    if library.on_cpu(q):
        _checked(function, library, arrays, options)
        extras, captures = split_extras(arrays[3:])
        return cpu.forward(library, *arrays[:3], Options(*options), extras, captures)
    if len(arrays) > 3:
        bias_aligned, sinks = _extra_alignment(library, arrays[3:])
    settings = environment.current()
    plans = _forward_plans if options[MAX_SEQLENS] is None else _packed_forward_plans
    given, numbers = arrays, None
    if text_of(options) is not None:
        given, numbers = _without_numbers(arrays, len(TENSORS) + NUM_EXTRAS)
    key, pointers = plans.key(library, given, (options, settings.backend, bias_aligned))
    plan = plans.get(key)
    if plan is None or settings.debug:
        problem = _checked(function, library, given, options, (key[-1], bias_aligned))
        plan = plans.add(key, _forward_plan(function, problem, library, q, Options(*options)))
    if type(plan) is Padding:
        wide = plan.widen(library, q, k, v)
        out, lse = forward(function, library, (*wide, *arrays[3:]), (plan.options, need_lse))
        return plan.narrow(out), lse
    if sinks is not None:
        pointers[3 + SINKS] = library.pointer(sinks)
    if numbers:
        for place, number in numbers.items():
            pointers[place] = number
    return plan(q, pointers, need_lse)


def _forward_plan(
    function: str, problem: Problem, library: Any, q: Array, options: Options
) -> ForwardPlan | Padding:
    if backends.pads(problem, card_of(problem.device), backward=False):
        return Padding.of(problem, options)
    return forward_plan(function, problem, library, library.view(q), options)


def backward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple[tuple, bool]
) -> tuple[Array | None, ...]:
    """Gradients of arrays of one library: of the sinks if there are any, of the bias if asked for.

    Args:
        arrays: dout, q, k, v, out, lse, dlse or None, and perhaps the fields of `Extras` and
            captures.
        options: the plain fields of `Options`, and whether the bias needs a gradient.

    Returns:
        The fields of `Gradients`; with a text, behind them those of its captures that learn, None
        for the others.
    """
    options, bias_grad = options
    arrays = prepared(function, library, BACKWARD_TENSORS, arrays, options)
    dout, q, k, v, out, lse, dlse, *extras = arrays
    deterministic = "error" if options[DETERMINISTIC] else ""
    if library.on_cpu(q):
        asked = {"bias_grad": bias_grad, "deterministic": deterministic}
        _checked(function, library, arrays, options, **asked)
        tensors = (dout, q, k, v, out, lse)
        extras, captures = split_extras(extras)
        options = Options(*options)
        return cpu.backward(library, *tensors, options, extras, bias_grad, dlse, captures)
    deterministic = deterministic or library.determinism()
    bias_aligned, sinks = _extra_alignment(library, extras) if extras else (True, None)
    settings = environment.current()
    plans = _backward_plans if options[MAX_SEQLENS] is None else _packed_backward_plans
    asked = (options, settings.backend, bias_aligned, deterministic, bias_grad)
    given, numbers = arrays, None
    if text_of(options) is not None:
        given, numbers = _without_numbers(arrays, len(BACKWARD_TENSORS) + NUM_EXTRAS)
    key, pointers = plans.key(library, given, asked)
    plan = plans.get(key)
    if plan is None or settings.debug:
        aligned = (key[-1], bias_aligned)
        problem = _checked(function, library, given, options, aligned, bias_grad, deterministic)
        views = {name: library.view(x) for name, x in {"q": q, "k": k, "v": v}.items()}
        wanted = (Options(*options), deterministic, bias_grad)
        plan = plans.add(key, _backward_plan(function, problem, library, views, *wanted))
    if type(plan) is Padding:
        dout, q, k, v, out = plan.widen(library, dout, q, k, v, out)
        arrays = (dout, q, k, v, out, lse, dlse, *arrays[7:])
        return plan.narrow_gradients(backward(function, library, arrays, (plan.options, bias_grad)))
    if deterministic == "warn" and plan.dbias_has_no_order:
        name = caller_name(function, "bias")
        warnings.warn(
            f"{function}: the gradient of a {name} that is broadcast has no deterministic order, "
            "as torch.use_deterministic_algorithms(True, warn_only=True) asks to be told",
            stacklevel=2,
        )
    # Copies live until the launch.
    copies = [_contiguous(library, lse, pointers, 5)]
    if dlse is not None:
        copies.append(_contiguous(library, dlse, pointers, 6))
    if sinks is not None:
        pointers[7 + SINKS] = library.pointer(sinks)
    if numbers:
        for place, number in numbers.items():
            pointers[place] = number
    dq, dk, dv, dbias, dsinks, *of_captures = plan(q, k, v, pointers)
    del copies
    if dbias is not None:
        dbias = library.cast(dbias, extras[BIAS]).reshape(extras[BIAS].shape)
    dsinks = None if dsinks is None else library.cast(dsinks, extras[SINKS])
    gradients = Gradients(dq, dk, dv, dbias, dsinks)
    captures = extras[NUM_EXTRAS:]
    return (*gradients, *_like(library, of_captures, captures)) if captures else gradients


def _like(library: Any, gradients: list[Array | None], captures: list) -> list[Array | None]:
    """The gradients of captures in their dtypes; a plan gives none if no capture learns."""
    gradients = gradients or [None] * len(captures)
    return [None if g is None else library.cast(g, x) for g, x in zip(gradients, captures)]


def _contiguous(library: Any, x: Array, pointers: list[int], place: int) -> Array:
    """x or a dense copy of it, whose pointer is put in its place."""
    dense = library.contiguous(x)
    if dense is not x:
        pointers[place] = library.pointer(dense)
    return dense


def _backward_plan(
    function: str,
    problem: Problem,
    library: Any,
    views: dict[str, View],
    options: Options,
    deterministic: str,
    bias_grad: bool,
) -> BackwardPlan | Padding:
    if backends.pads(problem, card_of(problem.device), backward=True):
        return Padding.of(problem, options)
    return backward_plan(function, problem, library, views, options, deterministic, bias_grad)


def _without_numbers(arrays: tuple, first: int) -> tuple[tuple, dict[int, Any]]:
    """The arrays with None where there are numbers or found tiles, and a dictionary of the latter.

    Its keys are their places.

    Args:
        first: the place of the first capture.
    """
    captures = enumerate(arrays[first:], first)
    numbers = {place: x for place, x in captures if isinstance(x, NOT_ARRAYS)}
    if not numbers:
        return arrays, numbers
    given = list(arrays)
    for place in numbers:
        given[place] = None
    return tuple(given), numbers


def _checked(
    function: str,
    library: Any,
    arrays: tuple,
    options: tuple,
    aligned: tuple[bool, bool] = (True, True),
    bias_grad: bool | None = None,
    deterministic: str = "",
) -> Problem:
    """The `Problem` of a call; reads lengths where that is free or debugging asks for it.

    Args:
        aligned: whether the tensors begin at multiples of 16 bytes, and whether the bias does.
        bias_grad: None of a forward.
        deterministic: what asks for it, "error" or "warn".
    """
    names = TENSORS if bias_grad is None else BACKWARD_TENSORS
    check_library(function, library, names, arrays)
    text, captures = text_of(options), arrays[len(names) + NUM_EXTRAS :]
    captures = captures[: len(text.captures)] if text is not None else ()
    numbers = (int, float, type(None))
    captures = tuple(None if isinstance(x, numbers) else library.view(x) for x in captures)
    arrays = {n: x for n, x in zip((*names, *Extras._fields), arrays) if x is not None}
    views = {name: library.view(x) for name, x in arrays.items()}
    lses = {name: views.pop(name) for name in ("lse", "dlse") if name in views}
    extras = {name: views.pop(name) for name in Extras._fields if name in views}
    problem = check(function, views, Options(*options), extras, captures)
    problem = dataclasses.replace(problem, aligned=aligned[0], bias_aligned=aligned[1])
    check_lse(function, problem, lses)
    if bias_grad is not None:
        check_bias_gradient(function, problem, bias_grad, deterministic == "error")
    if problem.device < 0 or environment.current().debug:
        lengths = {name: library.to_list(arrays[name]) for name in LENGTHS & arrays.keys()}
        check_lengths(function, problem, lengths)
    return problem


def _extra_alignment(library: Any, extras: tuple) -> tuple[bool, Array | None]:
    """Whether the bias begins at a multiple of 16 bytes, and the sinks in float32.

    The caller holds these until the launch: the memory of a converted array is free after it.
    """
    bias, sinks = extras[BIAS], extras[SINKS]
    return (
        bias is None or library.pointer(bias) % 16 == 0,
        None if sinks is None else library.float32(sinks),
    )
