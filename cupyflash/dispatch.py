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
    options: Options,
    alibi_slopes: Array | None = None,
    cu_seqlens: tuple[Array, Array] | None = None,
    deterministic: bool = False,
) -> tuple[Array, Array]:
    """(out, lse) in the library of q, with gradients where torch wants them."""
    library = library_of(q)
    if library is None:
        arrays = [
            _imported(function, name, x) for name, x in _named(q, k, v, alibi_slopes, cu_seqlens)
        ]
        results = forward(function, *arrays[:3], options, *_optional(arrays, cu_seqlens))
        return tuple(to_foreign(x, q) for x in results)
    if library_of(k) is not library or library_of(v) is not library:
        _reject_library_mix(function, library, {"k": k, "v": v})
    if library.wants_gradient(q, k, v):
        from .autograd import attention_with_gradient

        return attention_with_gradient(
            function, q, k, v, options, alibi_slopes, cu_seqlens, deterministic
        )
    return forward_without_gradient(function, library, q, k, v, options, alibi_slopes, cu_seqlens)


def forward_without_gradient(
    function: str,
    library: Any,
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """`forward` of arrays of one known library."""
    if library.on_cpu(q):
        _checked(function, library, {"q": q, "k": k, "v": v}, options, alibi_slopes, cu_seqlens)
        return cpu.forward(library, q, k, v, options, alibi_slopes, cu_seqlens)
    pointer = library.pointer
    settings = environment.current()
    aligned = (pointer(q) | pointer(k) | pointer(v)) % 16 == 0
    signature = library.signature
    key = (
        signature(q), signature(k), signature(v), options, aligned, settings.family,
        *_signatures(library, alibi_slopes, cu_seqlens),
    )  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None or settings.debug:
        tensors = {"q": q, "k": k, "v": v}
        problem = _checked(function, library, tensors, options, alibi_slopes, cu_seqlens)
        all_aligned = problem.aligned(0 if aligned else 1)
        plan = ForwardPlan(function, problem, all_aligned, library, library.view(q), options)
        _keep(_forward_plans, key, plan)
    return plan(q, k, v, *_pointers(library, alibi_slopes, cu_seqlens))


def backward(
    function: str,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: Options,
    alibi_slopes: Array | None = None,
    cu_seqlens: tuple[Array, Array] | None = None,
    deterministic: bool = False,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in the library of q."""
    library = library_of(q)
    if library is None:
        arrays = [
            _imported(function, name, x) for name, x in _named(q, k, v, alibi_slopes, cu_seqlens)
        ]
        rest = [
            from_foreign(function, n, x) for n, x in (("dout", dout), ("out", out), ("lse", lse))
        ]
        results = backward(
            function, rest[0], *arrays[:3], *rest[1:], options, *_optional(arrays, cu_seqlens),
            deterministic,
        )  # fmt: skip
        return tuple(to_foreign(x, q) for x in results)
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    if any(library_of(x) is not library for x in (dout, k, v, out, lse)):
        _reject_library_mix(function, library, {**tensors, "lse": lse})
    if library.on_cpu(q):
        problem = _checked(function, library, tensors, options, alibi_slopes, cu_seqlens)
        check_lse(function, problem, library.view(lse))
        return cpu.backward(library, dout, q, k, v, out, lse, options, alibi_slopes, cu_seqlens)
    pointer, signature = library.pointer, library.signature
    settings = environment.current()
    aligned = (pointer(q) | pointer(k) | pointer(v) | pointer(dout) | pointer(out)) % 16 == 0
    key = (
        *map(signature, (dout, q, k, v, out, lse)), options, aligned, settings.family,
        deterministic, *_signatures(library, alibi_slopes, cu_seqlens),
    )  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None or settings.debug:
        problem = _checked(function, library, tensors, options, alibi_slopes, cu_seqlens)
        check_lse(function, problem, library.view(lse))
        views = {name: library.view(x) for name, x in tensors.items()}
        all_aligned = problem.aligned(0 if aligned else 1)
        plan = BackwardPlan(function, problem, all_aligned, library, views, options, deterministic)
        _keep(_backward_plans, key, plan)
    lse = library.contiguous(lse)
    return plan(dout, q, k, v, out, lse, *_pointers(library, alibi_slopes, cu_seqlens))


def _checked(
    function: str,
    library: Any,
    tensors: dict[str, Array],
    options: Options,
    alibi_slopes: Array | None,
    cu_seqlens: tuple[Array, Array] | None,
) -> Any:
    """The `Problem` of a call; reads cu_seqlens where that is free or debugging asks for it."""
    extras = {"alibi_slopes": alibi_slopes} if alibi_slopes is not None else {}
    if cu_seqlens is not None:
        extras |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens))
    if any(library_of(x) is not library for x in extras.values()):
        _reject_library_mix(function, library, extras)
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


def _keep(plans: dict[tuple, Any], key: tuple, plan: Any) -> None:
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


def _signatures(
    library: Any, alibi_slopes: Array | None, cu_seqlens: tuple[Array, Array] | None
) -> tuple:
    alibi = None if alibi_slopes is None else library.signature(alibi_slopes)
    return (alibi, None if cu_seqlens is None else tuple(map(library.signature, cu_seqlens)))


def _pointers(
    library: Any, alibi_slopes: Array | None, cu_seqlens: tuple[Array, Array] | None
) -> tuple[int, tuple[int, int]]:
    alibi = 0 if alibi_slopes is None else library.pointer(alibi_slopes)
    return (alibi, (0, 0) if cu_seqlens is None else tuple(map(library.pointer, cu_seqlens)))


def _reject_library_mix(function: str, library: Any, arrays: dict[str, Array]) -> None:
    for name, x in arrays.items():
        if library_of(x) is not library:
            got = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
            got = got.removeprefix("builtins.")
            raise TypeError(f"{function}: {name} must be a {library.name} like q, got {got}")


def _named(
    q: Array, k: Array, v: Array, alibi_slopes: Array | None, cu_seqlens: tuple | None
) -> list[tuple[str, Array]]:
    cu_seqlens_q, cu_seqlens_k = cu_seqlens or (None, None)
    return [
        ("q", q), ("k", k), ("v", v), ("alibi_slopes", alibi_slopes),
        ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k),
    ]  # fmt: skip


def _imported(function: str, name: str, x: Array | None) -> Array | None:
    return x if x is None or library_of(x) else from_foreign(function, name, x)


def _optional(arrays: list, cu_seqlens: tuple | None) -> tuple:
    return (arrays[3], None if cu_seqlens is None else (arrays[4], arrays[5]))
