"""From the arrays of a call to the plan that computes it: GPU or CPU, cached or new.

The hot path is one dictionary lookup: shapes, strides, dtypes, devices and options of a call are
the key, and everything that follows from them, checks included, is done once and kept in the plan.
"""

from typing import Any

from . import cpu, environment
from .array import Array, from_foreign, library_of, to_foreign
from .launch import BackwardPlan, ForwardPlan
from .problem import Options, check, check_cu_seqlens, check_lse

MAX_PLANS = 4096  # lengths that change with every call must not fill the memory

_forward_plans: dict[tuple, ForwardPlan] = {}
_backward_plans: dict[tuple, BackwardPlan] = {}


def forward(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    options: tuple,
    alibi_slopes: Array | None = None,
    cu_seqlens: tuple[Array, Array] | None = None,
    deterministic: bool = False,
    need_lse: bool = False,
) -> tuple[Array, Array | None]:
    """(out, lse) in the library of q, with gradients where torch wants them.

    Args:
        options: the fields of `Options`; a plain tuple costs less.
        need_lse: otherwise lse may be None.
    """
    library = library_of(q)
    if library is None:
        q_, *arrays = _imported(function, q, k, v, alibi_slopes, *(cu_seqlens or ()))
        slopes, packed = arrays[2], tuple(arrays[3:]) or None
        results = forward(function, q_, *arrays[:2], options, slopes, packed, need_lse=need_lse)
        return tuple(None if x is None else to_foreign(x, q) for x in results)
    if not type(q) is type(k) is type(v):  # subclasses and strangers
        _check_library(function, library, {"k": k, "v": v})
    if library.wants_gradient(q, k, v):
        from .autograd import attention_with_gradient

        return attention_with_gradient(
            function, q, k, v, options, alibi_slopes, cu_seqlens, deterministic
        )
    return forward_without_gradient(
        function, library, q, k, v, options, alibi_slopes, cu_seqlens, need_lse
    )


def forward_without_gradient(
    function: str,
    library: Any,
    q: Array,
    k: Array,
    v: Array,
    options: tuple,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
    need_lse: bool,
) -> tuple[Array, Array | None]:
    """`forward` of arrays of one known library."""
    if library.on_cpu(q):
        tensors = {"q": q, "k": k, "v": v}
        _checked(function, library, tensors, options, alibi_slopes, cu_seqlens)
        return cpu.forward(library, q, k, v, Options(*options), alibi_slopes, cu_seqlens)
    pointer, signature = library.pointer, library.signature
    settings = environment.current()
    q_, k_, v_ = pointer(q), pointer(k), pointer(v)
    aligned = (q_ | k_ | v_) % 16 == 0
    extras, extra_pointers = _extras(function, library, alibi_slopes, cu_seqlens)
    key = (signature(q), signature(k), signature(v), options, aligned, settings.family, extras)
    plan = _forward_plans.get(key)
    if plan is None or settings.debug:
        tensors = {"q": q, "k": k, "v": v}
        problem = _checked(function, library, tensors, options, alibi_slopes, cu_seqlens)
        access = problem.access(0 if aligned else 1)
        view = library.view(q)
        plan = ForwardPlan(function, problem, access, library, view, Options(*options))
        keep(_forward_plans, key, plan)
    return plan(q, q_, k_, v_, *extra_pointers, need_lse)


def backward(
    function: str,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: tuple,
    alibi_slopes: Array | None = None,
    cu_seqlens: tuple[Array, Array] | None = None,
    deterministic: bool = False,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in the library of q."""
    library = library_of(q)
    if library is None:
        tensors = _imported(function, dout, q, k, v, out, lse, alibi_slopes, *(cu_seqlens or ()))
        packed = tuple(tensors[7:]) or None
        results = backward(function, *tensors[:6], options, tensors[6], packed, deterministic)
        return tuple(to_foreign(x, q) for x in results)
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    _check_library(function, library, {**tensors, "lse": lse})
    if library.on_cpu(q):
        problem = _checked(function, library, tensors, options, alibi_slopes, cu_seqlens)
        check_lse(function, problem, library.view(lse))
        tensors = (dout, q, k, v, out, lse)
        return cpu.backward(library, *tensors, Options(*options), alibi_slopes, cu_seqlens)
    pointer, signature = library.pointer, library.signature
    settings = environment.current()
    aligned = (pointer(q) | pointer(k) | pointer(v) | pointer(dout)) % 16 == 0
    extras, extra_pointers = _extras(function, library, alibi_slopes, cu_seqlens)
    signatures = tuple(map(signature, (dout, q, k, v, out, lse)))
    key = (signatures, options, aligned, settings.family, deterministic, extras)
    plan = _backward_plans.get(key)
    if plan is None or settings.debug:
        problem = _checked(function, library, tensors, options, alibi_slopes, cu_seqlens)
        check_lse(function, problem, library.view(lse))
        views = {name: library.view(x) for name, x in tensors.items()}
        access = problem.access(0 if aligned else 1)
        plan = BackwardPlan(
            function, problem, access, library, views, Options(*options), deterministic
        )
        keep(_backward_plans, key, plan)
    lse = library.contiguous(lse)
    return plan(dout, q, k, v, out, lse, *extra_pointers)


def _checked(
    function: str,
    library: Any,
    tensors: dict[str, Array],
    options: tuple,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
) -> Any:
    """The `Problem` of a call; reads cu_seqlens where that is free or debugging asks for it."""
    options = Options(*options)
    extras = _named_extras(function, library, alibi_slopes, cu_seqlens)
    views = {name: library.view(x) for name, x in extras.items()}
    alibi = views.pop("alibi_slopes", None)
    tensor_views = {name: library.view(x) for name, x in tensors.items()}
    problem = check(function, tensor_views, options, alibi, views)
    if cu_seqlens is not None and (problem.device < 0 or environment.current().debug):
        for (name, _), x, y, longest in zip(
            views.items(), cu_seqlens, (tensors["q"], tensors["k"]), options.max_seqlens
        ):
            check_cu_seqlens(function, name, library.to_list(x), y.shape[0], longest)
    return problem


def keep(plans: dict[tuple, Any], key: tuple, plan: Any) -> None:
    """Put a plan into a cache of at most `MAX_PLANS`."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


def _named_extras(
    function: str,
    library: Any,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
) -> dict[str, Array]:
    """The optional arrays that are there, all of them of the library of q."""
    extras = {"alibi_slopes": alibi_slopes} if alibi_slopes is not None else {}
    if cu_seqlens is not None:
        extras |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens))
    _check_library(function, library, extras)
    return extras


def _extras(
    function: str,
    library: Any,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
) -> tuple[tuple | None, tuple[int, int, int]]:
    """The signature of the optional arrays, and (cu_seqlens_q, cu_seqlens_k, slopes) pointers."""
    if alibi_slopes is None and cu_seqlens is None:
        return None, (0, 0, 0)
    _named_extras(function, library, alibi_slopes, cu_seqlens)
    alibi = None if alibi_slopes is None else library.signature(alibi_slopes)
    packed = None if cu_seqlens is None else tuple(map(library.signature, cu_seqlens))
    pointers = (0, 0) if cu_seqlens is None else map(library.pointer, cu_seqlens)
    slopes = 0 if alibi_slopes is None else library.pointer(alibi_slopes)
    return (alibi, packed), (*pointers, slopes)


def _check_library(function: str, library: Any, arrays: dict[str, Array]) -> None:
    for name, x in arrays.items():
        if library_of(x) is not library:
            got = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
            got = got.removeprefix("builtins.")
            raise TypeError(f"{function}: {name} must be a {library.name} like q, got {got}")


def _imported(function: str, *arrays: Array | None) -> list[Array | None]:
    """Arrays of unknown libraries as NumPy or CuPy arrays on the same memory."""
    return [x if x is None or library_of(x) else from_foreign(function, x) for x in arrays]
