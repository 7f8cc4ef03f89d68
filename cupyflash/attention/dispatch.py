"""From the arrays of a call to the plan that computes it: GPU or CPU, cached or new.

The hot path is one dictionary lookup: shapes, strides, dtypes, devices and options of a call are
the key, and everything that follows from them, checks included, is done once and kept in the plan.
"""

import dataclasses
import warnings
from typing import Any

import numpy

from .. import environment
from ..runtime.array import Array, compiling, from_foreign, library_of, to_foreign
from ..runtime.checks import plain_flag
from ..runtime.operation import Plans
from ..runtime.philox import is_number, seed_array
from . import cpu
from .extras import NO_EXTRAS, NO_POINTERS, Extras, Gradients
from .names import caller_name
from .options import Options, plain_options
from .padding import Padding
from .plan import BackwardPlan, ForwardPlan
from .problem import (
    Problem,
    check,
    check_bias_gradient,
    check_cu_seqlens,
    check_lse,
    check_seqused,
)

BIAS = Extras._fields.index("bias")
TENSORS = ("dout", "q", "k", "v", "out", "lse")  # of a backward

_forward_plans = Plans()
_backward_plans = Plans()

MAX_PACKED_PLANS = 64
# Of packed sequences nearly every batch has a length of its own, so only the latest plans are kept.
_packed_forward_plans = Plans(most=MAX_PACKED_PLANS)
_packed_backward_plans = Plans(most=MAX_PACKED_PLANS)
MAX_SEQLENS = Options._fields.index("max_seqlens")


def forward(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    options: tuple,
    extras: Extras = NO_EXTRAS,
    deterministic: bool = False,
    need_lse: bool = False,
) -> tuple[Array, Array | None]:
    """(out, lse) in the library of q, with gradients where torch wants them.

    Args:
        options: the fields of `Options`; a plain tuple costs less.
        need_lse: otherwise lse may be None.
    """
    options = plain_options(function, options)
    if compiling():
        from . import torch_ops

        return torch_ops.compiled(function, q, k, v, options, extras, deterministic)
    if type(deterministic) is not bool:
        deterministic = plain_flag(function, "deterministic", deterministic)
    library = library_of(q)
    if library is None:
        q_, k, v, extras = _imported(function, {"q": q, "k": k, "v": v}, extras)
        results = forward(function, q_, k, v, options, extras, need_lse=need_lse)
        return tuple(None if x is None else to_foreign(x, q) for x in results)
    if not type(q) is type(k) is type(v):  # subclasses and strangers
        _check_library(function, library, {"k": k, "v": v})
    wants_gradient = library.wants_gradient(q, k, v)
    given = (q, k, v)
    if extras is not NO_EXTRAS or options[-1]:  # dropout_p
        extras = prepared(function, library, q, options, extras)
        wants_gradient = library.wants_gradient(q, k, v, *extras.learned)
        given = (q, k, v, *extras)
    if library.watched(*given):
        from . import torch_ops

        q, k, v, extras = torch_ops.autocast(q, k, v, extras)
        if library.traced(q, k, v, *extras):
            return torch_ops.attention(function, q, k, v, options, extras, deterministic)
    if wants_gradient:
        from .autograd import attention_with_gradient

        return attention_with_gradient(function, q, k, v, options, extras, deterministic)
    return forward_without_gradient(function, library, q, k, v, options, extras, need_lse)


def forward_without_gradient(
    function: str,
    library: Any,
    q: Array,
    k: Array,
    v: Array,
    options: tuple,
    extras: Extras,
    need_lse: bool,
) -> tuple[Array, Array | None]:
    """`forward` of arrays of one known library; the extras are `prepared`."""
    if library.on_cpu(q):
        _checked(function, library, {"q": q, "k": k, "v": v}, options, extras)
        return cpu.forward(library, q, k, v, Options(*options), extras)
    pointer, signature = library.pointer, library.signature
    settings = environment.current()
    q_, k_, v_ = pointer(q), pointer(k), pointer(v)
    aligned = (q_ | k_ | v_) % 16 == 0
    converted, extra_signatures, extra_pointers = _for_kernels(library, extras)
    bias_aligned = extra_pointers[BIAS] % 16 == 0
    key = (
        signature(q), signature(k), signature(v), options, aligned, settings.backend,
        extra_signatures, bias_aligned,
    )  # fmt: skip
    packed = options[MAX_SEQLENS] is not None
    plans = _packed_forward_plans if packed else _forward_plans
    plan = plans.get(key)
    if plan is None or settings.debug:
        problem = _checked(function, library, {"q": q, "k": k, "v": v}, options, extras)
        problem = dataclasses.replace(problem, bias_aligned=bias_aligned)
        if problem.needs_padding:
            plan = Padding.of(problem, Options(*options))
        else:
            access = problem.access(0 if aligned else 1)
            view = library.view(q)
            plan = ForwardPlan(function, problem, access, library, view, Options(*options))
        plans.add(key, plan)
    if type(plan) is Padding:
        wide = plan.widen(library, q, k, v)
        out, lse = forward_without_gradient(
            function, library, *wide, plan.options, extras, need_lse
        )
        return plan.narrow(out), lse
    return plan(q, q_, k_, v_, extra_pointers, need_lse)


def explicit_backward(
    function: str,
    tensors: tuple[Array, ...],
    options: tuple,
    extras: Extras,
    deterministic: bool,
    bias_grad: bool,
    dlse: Array | None,
) -> Gradients:
    """`backward` of what a user hands in: (dout, q, k, v, out, lse), on their way past torch.

    torch has to see the call also where a derivative of it is wanted, which is an error.
    """
    options, rest = plain_options(function, options), (bias_grad, dlse)
    if not compiling():
        deterministic = plain_flag(function, "deterministic", deterministic)
        library = library_of(tensors[1])
        given = (*tensors, dlse, *(() if extras is NO_EXTRAS else extras))
        seen = library is not None and library.traced(tensors[1], *given)
        if not (seen or (library is not None and _wants_derivative(library, given))):
            return backward(function, *tensors, options, extras, deterministic, *rest)
        named = dict(zip(TENSORS, tensors)) | ({} if dlse is None else {"dlse": dlse})
        _check_library(function, library, named)
        _require_seed(function, options, extras)
        extras = prepared(function, library, tensors[1], options, extras)
    from . import torch_ops

    return torch_ops.attention_backward(function, *tensors, options, extras, deterministic, *rest)


def _wants_derivative(library: Any, arrays: tuple[Array | None, ...]) -> bool:
    return library.wants_gradient(*arrays)


def backward(
    function: str,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: tuple,
    extras: Extras = NO_EXTRAS,
    deterministic: bool = False,
    bias_grad: bool = False,
    dlse: Array | None = None,
) -> Gradients:
    """Gradients in the library of q: of the sinks if there are any, of the bias if asked for."""
    library = library_of(q)
    if library is None:
        tensors = dict(zip(TENSORS, (dout, q, k, v, out, lse)))
        tensors |= {} if dlse is None else {"dlse": dlse}
        *tensors, extras = _imported(function, tensors, extras)
        dlse = None if dlse is None else tensors.pop()
        found = backward(function, *tensors, options, extras, deterministic, bias_grad, dlse)
        return Gradients(*(None if x is None else to_foreign(x, q) for x in found))
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    lses = {"lse": lse} if dlse is None else {"lse": lse, "dlse": dlse}
    _check_library(function, library, {**tensors, **lses})
    _require_seed(function, options, extras)
    if extras is not NO_EXTRAS:
        extras = prepared(function, library, q, options, extras)
    if library.on_cpu(q):
        problem = _checked(function, library, tensors, options, extras)
        for name, x in lses.items():
            check_lse(function, problem, name, library.view(x))
        check_bias_gradient(function, problem, bias_grad, deterministic)
        tensors = (dout, q, k, v, out, lse)
        return cpu.backward(library, *tensors, Options(*options), extras, bias_grad, dlse)
    switch = "" if deterministic else library.determinism()
    pointer, signature = library.pointer, library.signature
    settings = environment.current()
    aligned = (pointer(q) | pointer(k) | pointer(v) | pointer(dout)) % 16 == 0
    converted, extra_signatures, extra_pointers = _for_kernels(library, extras)
    bias_aligned = extra_pointers[BIAS] % 16 == 0
    signatures = tuple(map(signature, (dout, q, k, v, out, *lses.values())))
    key = (
        signatures, options, aligned, settings.backend, deterministic, switch, bias_grad,
        extra_signatures, bias_aligned,
    )  # fmt: skip
    packed = options[MAX_SEQLENS] is not None
    plans = _packed_backward_plans if packed else _backward_plans
    plan = plans.get(key)
    if plan is None or settings.debug:
        problem = _checked(function, library, tensors, options, extras)
        problem = dataclasses.replace(problem, bias_aligned=bias_aligned)
        for name, x in lses.items():
            check_lse(function, problem, name, library.view(x))
        in_order = deterministic or switch == "error"
        check_bias_gradient(function, problem, bias_grad, in_order)
        if switch == "warn":
            in_order = not (bias_grad and problem.bias_is_broadcast)
        if problem.needs_padding:
            plan = Padding.of(problem, Options(*options))
        else:
            views = {name: library.view(x) for name, x in tensors.items()}
            access, given = problem.access(0 if aligned else 1), Options(*options)
            plan = BackwardPlan(
                function, problem, access, library, views, given, in_order, bias_grad
            )
        plans.add(key, plan)
    if type(plan) is Padding:
        wide = plan.widen(library, dout, q, k, v, out)
        return plan.narrow_gradients(
            backward(function, *wide, lse, plan.options, extras, deterministic, bias_grad, dlse)
        )
    if switch == "warn" and not plan.deterministic:
        name = caller_name(function, "bias")
        warnings.warn(
            f"{function}: the gradient of a {name} that is broadcast has no deterministic order, "
            "as torch.use_deterministic_algorithms(True, warn_only=True) asks to be told",
            stacklevel=2,
        )
    lse, dlse_pointer = library.contiguous(lse), 0
    if dlse is not None:
        dlse = library.contiguous(dlse)
        dlse_pointer = pointer(dlse)
    dq, dk, dv, dbias, dsinks = plan(dout, q, k, v, out, lse, dlse_pointer, extra_pointers)
    if dbias is not None:
        dbias = library.cast(dbias, extras.bias).reshape(extras.bias.shape)
    dsinks = None if dsinks is None else library.cast(dsinks, extras.sinks)
    return Gradients(dq, dk, dv, dbias, dsinks)


def prepared(function: str, library: Any, q: Array, options: tuple, extras: Extras) -> Extras:
    """The optional arrays, all of the library of q, with an array for the seed if there is dropout.

    Raises:
        TypeError: an array of another library, or a seed of another kind.
        ValueError: a seed out of range.
        NotImplementedError: slopes that want a gradient.
    """
    extras = with_seed(function, library, q, options, extras)
    if extras is not NO_EXTRAS:
        _check_library(function, library, _given(extras))
        slopes = extras.alibi_slopes
        if slopes is not None and library.wants_gradient(slopes):
            fact = "alibi_slopes have no gradient (use alibi_slopes.detach())"
            raise NotImplementedError(f"{function}: {fact}, got some that require one")
    return extras


def with_seed(function: str, library: Any, q: Array, options: tuple, extras: Extras) -> Extras:
    """An array for the seed if there is dropout, no seed otherwise."""
    seed, dropout = extras.dropout_seed, Options(*options).dropout_p
    if seed is None and not dropout:
        return extras
    if not dropout and not is_number(seed):
        _check_library(function, library, {"dropout_seed": seed})
    seed = seed_array(function, library, q, seed, dropout)
    extras = extras._replace(dropout_seed=seed)
    return NO_EXTRAS if all(x is None for x in extras) else extras


def _require_seed(function: str, options: tuple, extras: Extras) -> None:
    if Options(*options).dropout_p and extras.dropout_seed is None:
        raise ValueError(f"{function}: dropout_p needs the dropout_seed of the forward, got None")


def _checked(
    function: str, library: Any, tensors: dict[str, Array], options: tuple, extras: Extras
) -> Problem:
    """The `Problem` of a call; reads lengths where that is free or debugging asks for it."""
    options = Options(*options)
    views = {name: library.view(x) for name, x in _given(extras).items()}
    tensor_views = {name: library.view(x) for name, x in tensors.items()}
    problem = check(function, tensor_views, options, views)
    if problem.device < 0 or environment.current().debug:
        _check_lengths(function, library, problem, extras)
    return problem


def _check_lengths(function: str, library: Any, problem: Problem, extras: Extras) -> None:
    """Read the lengths of the sequences, which waits for the GPU, and check them."""
    shape = problem.shape
    for side, total, longest, cu_seqlens, seqused in (
        ("q", problem.total_q, shape.seqlen_q, extras.cu_seqlens_q, extras.seqused_q),
        ("k", problem.total_k, shape.seqlen_k, extras.cu_seqlens_k, extras.seqused_k),
    ):
        ends = None if cu_seqlens is None else library.to_list(cu_seqlens)
        if ends is not None:
            check_cu_seqlens(function, f"cu_seqlens_{side}", ends, total, longest)
        if seqused is not None:
            used = library.to_list(seqused)
            check_seqused(function, f"seqused_{side}", used, longest, ends)


def _given(extras: Extras) -> dict[str, Array]:
    """The optional arrays that are there, by name."""
    return {name: x for name, x in extras._asdict().items() if x is not None}


def _for_kernels(library: Any, extras: Extras) -> tuple[Extras, tuple | None, tuple[int, ...]]:
    """The optional arrays as kernels take them, signatures of those given, pointers of those taken.

    The caller holds the first until the launch: the memory of a converted array is free after it.
    """
    if extras is NO_EXTRAS:
        return NO_EXTRAS, None, NO_POINTERS
    signatures = tuple(None if x is None else library.signature(x) for x in extras)
    if extras.sinks is not None:
        extras = extras._replace(sinks=library.float32(extras.sinks))
    pointers = tuple(0 if x is None else library.pointer(x) for x in extras)
    return extras, signatures, pointers


def _check_library(function: str, library: Any, arrays: dict[str, Array]) -> None:
    for name, x in arrays.items():
        if library_of(x) is not library:
            got = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
            got = got.removeprefix("builtins.")
            name, first = caller_name(function, name), caller_name(function, "q")
            raise TypeError(f"{function}: {name} must be a {library.name} like {first}, got {got}")


def _imported(function: str, arrays: dict[str, Array], extras: Extras) -> list[Any]:
    """Arrays of unknown libraries as NumPy or CuPy arrays on the same memory, extras last."""

    def imported(name: str, x: Array) -> Array:
        if library_of(x):
            return x
        return from_foreign(function, x, caller_name(function, name))

    found = [imported(name, x) for name, x in arrays.items()]
    if extras is not NO_EXTRAS:
        seed = extras.dropout_seed
        given = _given(extras._replace(dropout_seed=None))
        if seed is not None and not isinstance(seed, int | numpy.integer):
            given["dropout_seed"] = seed
        extras = extras._replace(**{name: imported(name, x) for name, x in given.items()})
    return [*found, extras]
