"""The torch operators ``cupyflash::attention_with_cache`` and ``cache_append``.

They change their caches. Calls take them where torch has to see them: under torch.compile and
dispatch modes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime.array import compiling
from ...runtime.lookup import library_of
from ...runtime.torch_calls import promised_strides, refuse_transforms, require_one_device
from ...runtime.torch_operator import operator, register_fake
from . import append_dispatch, dispatch
from .cached import ARRAYS, CachedOptions

LIBRARY = library_of(torch.empty(0))
CHANGED = {"k_cache": "a", "v_cache": "b", "k_scale": "c", "v_scale": "d", "out": "e"}
NEEDED = ("q", "k_cache", "v_cache", "positions")
NEEDED_TO_APPEND = ("k", "v", "k_cache", "v_cache")


def _declared(names: Iterable[str], needed: Sequence[str]) -> str:
    """The declaration of arrays in the schema of an operator."""
    changed = {name: f"({CHANGED[name]}!)" if name in CHANGED else "" for name in names}
    return ", ".join(f"Tensor{changed[x]}{'' if x in needed else '?'} {x}" for x in names)


class Cached:
    """`attention_with_cache` for torch."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor | None]:
        """(out, lse) by the operator, for torch.compile and dispatch modes."""
        _refuse_gradients(function, arrays)
        if not compiling():
            refuse_transforms(function)
        (scale, causal, window, softcap, num_splits, return_lse), longest, counted = options
        window = None if window is None else [-1 if x is None else x for x in window]
        out, lse = _attention_with_cache(
            *arrays, function, scale, bool(causal), window, softcap, num_splits, return_lse,
            longest, counted,
        )  # fmt: skip
        return out if arrays[-1] is None else arrays[-1], lse if return_lse else None

    @staticmethod
    def called(function: str, arrays: tuple, options: tuple) -> tuple[Tensor, Tensor | None]:
        """The call itself under autocast: the dtype is that of the cache. No gradients."""
        _refuse_gradients(function, arrays)
        return dispatch.run(function, LIBRARY, arrays, options)


class Appended:
    """`cache_append` for torch."""

    @staticmethod
    def traced(function: str, arrays: tuple, options: tuple) -> tuple:
        """The operator, for torch.compile and dispatch modes."""
        _refuse_gradients(function, arrays)
        if not compiling():
            refuse_transforms(function)
        _cache_append(*arrays)
        return ()

    @staticmethod
    def called(function: str, arrays: tuple, options: tuple) -> tuple:
        """The call itself under autocast: the dtype is that of the cache. No gradients."""
        _refuse_gradients(function, arrays)
        return append_dispatch.run(function, LIBRARY, arrays, options)


def _refuse_gradients(function: str, arrays: tuple) -> None:
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in arrays):
        fact = "has no backward and runs as it is"
        got = "inputs that require a gradient (use torch.no_grad())"
        raise NotImplementedError(f"{function}: {fact}, got {got}")


@operator(
    f"attention_with_cache({_declared(ARRAYS, NEEDED)}, str function, float? scale, "
    "bool causal, SymInt[]? window, float softcap, int num_splits, bool return_lse, "
    "SymInt? max_seqlen_q, bool counted) -> (Tensor out, Tensor lse)"
)
def _attention_with_cache(*arguments: Any) -> tuple[Tensor, Tensor]:
    """New tensors, empty ones for an ``out`` that the caller has and an LSE that nobody wants."""
    arrays, function, options = _decoded(arguments)
    out, lse = dispatch.run(function, LIBRARY, arrays, options)
    empty = lambda dtype: arrays[0].new_empty(0, dtype=dtype)  # noqa: E731
    return (
        out if arrays[-1] is None else empty(out.dtype),
        empty(torch.float32) if lse is None else lse,
    )


@register_fake(_attention_with_cache)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    arrays, function, (options, _, _) = _decoded(arguments)
    q, *others, out = arrays
    require_one_device(function, q, *others, out)
    if q.dim() not in (3, 4):
        fact = "q must have 3 (packed) or 4 dimensions"
        raise ValueError(f"{function}: {fact}, got {q.dim()}: {tuple(q.shape)}")
    axes = (1, 0) if q.dim() == 3 else (0, 2, 1)
    shape = [q.shape[axis] for axis in axes] if options.return_lse else [0]
    lse = q.new_empty(shape, dtype=torch.float32)
    if out is not None:
        return q.new_empty(0), lse
    rule = lambda view: LIBRARY.strides_of_empty(view.shape, view)  # noqa: E731
    return q.new_empty_strided(q.shape, promised_strides(LIBRARY.view(q), rule)), lse


def _decoded(arguments: tuple) -> tuple[tuple[Tensor | None, ...], str, tuple]:
    """(arrays, function, options) of the operator's arguments."""
    arrays, (function, *options, longest, counted) = (
        arguments[: len(ARRAYS)],
        arguments[len(ARRAYS) :],
    )
    found = CachedOptions(*options)
    window = None if found.window is None else tuple(found.window)
    return arrays, function, (found._replace(window=window), longest, counted)


@operator(f"cache_append({_declared(append_dispatch.SPECS, NEEDED_TO_APPEND)}) -> ()")
def _cache_append(*arrays: Tensor | None) -> None:
    append_dispatch.run(append_dispatch.FUNCTION, LIBRARY, arrays, ())


@register_fake(_cache_append)
def _(*arrays: Tensor | None) -> None:
    require_one_device(append_dispatch.FUNCTION, *arrays)
