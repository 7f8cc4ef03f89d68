"""The way from the arrays of a call to the plan that computes it: GPU or CPU, cached or new.

Arrays come in the order of `TENSORS` or `BACKWARD_TENSORS`, and behind them the fields of `Extras`,
unless there is none of those.
"""

import dataclasses
import functools
import warnings
from typing import Any, NoReturn

from ... import environment
from ...runtime.array import Array, View
from ...runtime.gpu import card_of
from ...runtime.operation import Plans
from ...runtime.philox import is_number, seed_array
from ...runtime.specs import require_library
from . import backends, cpu
from .checks import EXTRAS, check, check_bias_gradient, check_lse
from .lengths import check_lengths
from .options import (
    BIAS,
    DETERMINISTIC,
    DROPOUT_P,
    DROPOUT_SEED,
    MAX_SEQLENS,
    SINKS,
    SLOPES,
    Extras,
    Gradients,
    Options,
    caller_name,
)
from .padding import Padding
from .plan import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from .problem import Problem

TENSORS = ("q", "k", "v")
BACKWARD_TENSORS = ("dout", "q", "k", "v", "out", "lse", "dlse")
OPTIONAL = ("dlse", *Extras._fields)
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
        arrays: q, k, v and perhaps the fields of `Extras`.
        options: the plain fields of `Options`, and whether the LSE is needed: else it may be None.
    """
    options, need_lse = options
    q, k, v = arrays[:3]
    if len(arrays) > 3 or options[DROPOUT_P] or not type(q) is type(k) is type(v):
        arrays = prepared(function, library, TENSORS, arrays, options)
    bias_aligned, sinks = True, None
    if library.on_cpu(q):
        _checked(function, library, arrays, options)
        return cpu.forward(library, *arrays[:3], Options(*options), Extras(*arrays[3:]))
    if len(arrays) > 3:
        bias_aligned, sinks = _extra_alignment(library, arrays[3:])
    settings = environment.current()
    plans = _forward_plans if options[MAX_SEQLENS] is None else _packed_forward_plans
    key, pointers = plans.key(library, arrays, (options, settings.backend, bias_aligned))
    plan = plans.get(key)
    if plan is None or settings.debug:
        problem = _checked(function, library, arrays, options, (key[-1], bias_aligned))
        plan = plans.add(key, _forward_plan(function, problem, library, q, Options(*options)))
    if type(plan) is Padding:
        wide = plan.widen(library, q, k, v)
        out, lse = forward(function, library, (*wide, *arrays[3:]), (plan.options, need_lse))
        return plan.narrow(out), lse
    if sinks is not None:
        pointers[3 + SINKS] = library.pointer(sinks)
    return plan(q, pointers, need_lse)


def _forward_plan(
    function: str, problem: Problem, library: Any, q: Array, options: Options
) -> ForwardPlan | Padding:
    if backends.pads(problem, card_of(problem.device), backward=False):
        return Padding.of(problem, options)
    return forward_plan(function, problem, library, library.view(q), options)


def backward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple[tuple, bool]
) -> Gradients:
    """Gradients of arrays of one library: of the sinks if there are any, of the bias if asked for.

    Args:
        arrays: dout, q, k, v, out, lse, dlse or None, and perhaps the fields of `Extras`.
        options: the plain fields of `Options`, and whether the bias needs a gradient.
    """
    options, bias_grad = options
    arrays = prepared(function, library, BACKWARD_TENSORS, arrays, options)
    dout, q, k, v, out, lse, dlse, *extras = arrays
    deterministic = "error" if options[DETERMINISTIC] else ""
    if library.on_cpu(q):
        asked = {"bias_grad": bias_grad, "deterministic": deterministic}
        _checked(function, library, arrays, options, **asked)
        tensors = (dout, q, k, v, out, lse)
        extras = Extras(*extras)
        return cpu.backward(library, *tensors, Options(*options), extras, bias_grad, dlse)
    deterministic = deterministic or library.determinism()
    bias_aligned, sinks = _extra_alignment(library, extras)
    settings = environment.current()
    plans = _backward_plans if options[MAX_SEQLENS] is None else _packed_backward_plans
    asked = (options, settings.backend, bias_aligned, deterministic, bias_grad)
    key, pointers = plans.key(library, arrays, asked)
    plan = plans.get(key)
    if plan is None or settings.debug:
        aligned = (key[-1], bias_aligned)
        problem = _checked(function, library, arrays, options, aligned, bias_grad, deterministic)
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
    copies = [_contiguous(library, lse, pointers, 5), _contiguous(library, dlse, pointers, 6)]
    if sinks is not None:
        pointers[7 + SINKS] = library.pointer(sinks)
    dq, dk, dv, dbias, dsinks = plan(q, k, v, pointers)
    del copies
    if dbias is not None:
        dbias = library.cast(dbias, extras[BIAS]).reshape(extras[BIAS].shape)
    dsinks = None if dsinks is None else library.cast(dsinks, extras[SINKS])
    return Gradients(dq, dk, dv, dbias, dsinks)


def _contiguous(library: Any, x: Array | None, pointers: list[int], place: int) -> Array | None:
    """x or a dense copy of it, whose pointer is put in its place."""
    if x is None:
        return None
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


def prepared(
    function: str, library: Any, names: tuple[str, ...], arrays: tuple, options: tuple
) -> tuple[Array | None, ...]:
    """The arrays of a call, all of one library, with an array for the seed if there is dropout.

    Preparing them again changes nothing.

    Args:
        names: `TENSORS` or `BACKWARD_TENSORS`.

    Raises:
        TypeError: an array of another library, or a seed of another kind.
        ValueError: a seed out of range, or none in a backward.
        NotImplementedError: slopes that want a gradient.
    """
    given = len(arrays) - len(names)
    if given or options[DROPOUT_P]:
        arrays = with_seed(function, library, names, arrays, options)
    kind = type(arrays[names is BACKWARD_TENSORS])  # of q
    for x in arrays:
        if type(x) is not kind and x is not None:  # a subclass or a stranger
            _check_library(function, library, names, arrays)
            break
    if not given:
        return arrays
    extras = arrays[len(names) :]
    if extras and extras[SLOPES] is not None and library.wants_gradient(extras[SLOPES]):
        refuse_slopes(function)
    return arrays


def refuse_slopes(function: str) -> NoReturn:
    fact = "alibi_slopes have no gradient (use alibi_slopes.detach())"
    raise NotImplementedError(f"{function}: {fact}, got some that require one")


def with_seed(
    function: str, library: Any, names: tuple[str, ...], arrays: tuple, options: tuple
) -> tuple[Array | None, ...]:
    """The arrays of a call, with one for the seed if there is dropout, without seed otherwise."""
    num, dropout_p = len(names), options[DROPOUT_P]
    if len(arrays) == num and not dropout_p:
        return arrays
    extras = Extras(*arrays[num:])
    seed = extras.dropout_seed
    if seed is not None or dropout_p:
        if seed is None and "dout" in names:
            fact = "dropout_p needs the dropout_seed of the forward"
            raise ValueError(f"{function}: {fact}, got None")
        if not dropout_p and not is_number(seed):
            _check_library(function, library, ("dropout_seed",), (seed,))
        seed = seed_array(function, library, arrays[names.index("q")], seed, dropout_p)
        extras = tuple(seed if i == DROPOUT_SEED else x for i, x in enumerate(extras))
    given = any(x is not None for x in extras)
    return (*arrays[:num], *extras) if given else arrays[:num]


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
    _check_library(function, library, names, arrays)
    arrays = {n: x for n, x in zip((*names, *Extras._fields), arrays) if x is not None}
    views = {name: library.view(x) for name, x in arrays.items()}
    lses = {name: views.pop(name) for name in ("lse", "dlse") if name in views}
    extras = {name: views.pop(name) for name in Extras._fields if name in views}
    problem = check(function, views, Options(*options), extras)
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
    if not extras:
        return True, None
    bias, sinks = extras[BIAS], extras[SINKS]
    return (
        bias is None or library.pointer(bias) % 16 == 0,
        None if sinks is None else library.float32(sinks),
    )


def _check_library(
    function: str, library: Any, names: tuple[str, ...], arrays: tuple[Array | None, ...]
) -> None:
    """Raise TypeError where an array is of another library, or is None but not optional."""
    given = {
        name: x
        for name, x in zip((*names, *Extras._fields), arrays)
        if x is not None or name not in OPTIONAL
    }
    require_library(function, library, given, "q", functools.partial(caller_name, function), EXTRAS)
