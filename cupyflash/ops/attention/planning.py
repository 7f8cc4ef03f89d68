"""Plans of checked problems: the backend is chosen, and says what its kernels do."""

import dataclasses
from typing import Any

from ...runtime.array import Empty, View, dense_strides
from ...runtime.gpu import Card, card_of
from . import tuning
from .backends import BACKENDS, Backend, choose, pads
from .kernels import Tile
from .kind import Access, Kind
from .names import caller_name
from .options import Options
from .passes import Pass, Wanted
from .plan import BackwardPlan, ForwardPlan, has_no_order
from .problem import Problem, bias_strides, canonical_strides


def forward_plan(
    function: str,
    problem: Problem,
    library: Any,
    q: View,
    options: Options,
    tile: Tile | None = None,
) -> ForwardPlan:
    """The plan of a forward, by the backend that serves the problem.

    Args:
        tile: this one of its candidates, not that of the tuning file or the built-in one.
    """
    shape = problem.shape
    out = View(q.shape, library.strides_of_empty(q.shape, q), q.dtype, q.device)
    work = Pass(())
    if 0 not in (shape.batch, shape.heads_q, shape.seqlen_q):
        strides = {**problem.strides, "out": canonical_strides("out", out, options)}
        problem = dataclasses.replace(problem, strides=strides)
        backend, kind, card, tile = _serving(function, problem, tile, backward=False)
        work = backend.forward(problem, kind, card, tile)
    return ForwardPlan(problem, library, q, out.strides, work)


def backward_plan(
    function: str,
    problem: Problem,
    library: Any,
    views: dict[str, View],
    options: Options,
    deterministic: str,
    bias_grad: bool,
    tile: Tile | None = None,
) -> BackwardPlan:
    """The plan of a backward.

    Args:
        deterministic: "error" or "warn" where a fixed order is asked for, else "".
        tile: as in `forward_plan`.
    """
    shape, extras, gradients, strides = problem.shape, problem.extras, [], {}
    for name in "qkv":
        x = views[name]
        wide = (*x.shape[:-1], shape.head_dim)
        dense = result_strides(library, shape.head_dim, x)
        gradients.append(Empty(wide, dense, x))
        like = View(wide, dense, x.dtype, x.device)
        strides[f"d{name}_strides"] = canonical_strides(name, like, options)
    dbias = None
    if bias_grad:
        dbias = bias_strides(extras.bias.shape, dense_strides(extras.bias.shape, range(4)))
    wanted, work = Wanted(strides, dbias, bool(deterministic)), Pass(())
    # Without queries there is nothing to launch, and without keys only what finds the gradient of
    # the sinks.
    without_keys = shape.seqlen_k == 0 and not extras.sinks
    if not (without_keys or 0 in (shape.batch, shape.heads_q, shape.seqlen_q)):
        backend, kind, card, tile = _serving(function, problem, tile, backward=True)
        work = backend.backward(problem, kind, card, wanted, tile)
        refuse_unordered(function, problem, wanted, work, deterministic)
    return BackwardPlan(problem, library, views["q"], gradients, wanted, work)


def refuse_unordered(
    function: str, problem: Problem, wanted: Wanted, work: Pass, deterministic: str
) -> None:
    """Raise NotImplementedError if a backward pass lacks a sum that has an order."""
    if deterministic == "error" and has_no_order(problem, wanted, work):
        fact = f"the gradient of a {caller_name(function, 'bias')} that is broadcast has a "
        fact += "deterministic sum only where tensor cores compute the backward pass"
        got = f"{problem.dtype}, head_dim {problem.head_dims[0]}"
        raise NotImplementedError(f"{function}: {fact}, got {got}")


def backend_of(function: str, problem: Problem, *, backward: bool) -> str:
    """The name of the backend that computes a problem, or copies of it with more columns.

    Raises:
        As `choose`.
    """
    card = card_of(problem.device)
    copied = pads(problem, card, backward=backward)
    access = Access.TENSOR_MAP if copied else problem.access
    return choose(function, problem.kind(card.capability), access, backward=backward)


def _serving(
    function: str, problem: Problem, tile: Tile | None, *, backward: bool
) -> tuple[Backend, Kind, Card, Tile | None]:
    """The backend that serves a problem, and what it is to be asked with."""
    card = card_of(problem.device)
    kind = problem.kind(card.capability)
    name = backend_of(function, problem, backward=backward)
    tile = tile or tuning.tile_of(name, kind, problem.device, backward=backward)
    return BACKENDS[name], kind, card, tile


def result_strides(library: Any, width: int, like: View) -> tuple[int, ...]:
    """The strides of a result in memory of ``width`` columns that is allocated like an input."""
    wide = (*like.shape[:-1], width)
    strides = like.strides
    if like.shape[-1] != width:  # the input itself is copied first
        strides = library.strides_of_empty(wide, like)
    return library.strides_of_empty(wide, like._replace(shape=wide, strides=strides))
