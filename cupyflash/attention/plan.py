"""From a checked problem to launches: a plan is everything that equal-shaped calls share.

A plan knows no backend. It asks the one of its problem for a `Pass`, with the loaded kernels, the
grids and the bytes of the parameter struct behind its leading pointers. A call then allocates its
results, puts the pointers in front and launches.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from ..runtime.array import Array, View, dense_strides
from ..runtime.gpu import card_of
from ..runtime.operation import Plan
from ..runtime.structs import header
from . import tuning
from .backends import BACKENDS, choose
from .kernels import Tile
from .options import BIAS, KEY_MASK, Options, caller_name
from .passes import Pass, Wanted
from .problem import Problem, bias_strides, canonical_strides

structs = header("attention/params.cuh")

NO_POINTERS = (0,) * KEY_MASK  # of the optional arrays that the kernels take


class ForwardPlan(Plan):
    """The forward kernel for one problem; ``library`` allocates out and LSE.

    With ``tile``, that one of its candidates.
    """

    def __init__(
        self,
        function: str,
        problem: Problem,
        library: Any,
        q: View,
        options: Options,
        tile: Tile | None = None,
    ) -> None:
        super().__init__(problem.device)
        self.library = library
        shape = problem.shape
        # Where v has fewer columns than q, out lies in memory of as many, like that of a v that is
        # padded. So its strides do not depend on the kernel.
        self.columns_v = problem.head_dims[1] if problem.needs_padding else None
        self.out_shape, self.lse_shape = q.shape, problem.lse_shape
        self.out_strides = library.strides_of_empty(q.shape, q)
        self.lengths = problem.extras.lengths
        self.empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q)
        if self.empty:
            return
        out = View(q.shape, self.out_strides, q.dtype, q.device)
        strides = {**problem.strides, "out": canonical_strides("out", out, options)}
        problem = dataclasses.replace(problem, strides=strides)
        self.work = pass_of(function, problem, tile=tile)

    def run(self, like: Array, pointers: list[int], need_lse: bool) -> tuple[Array, Array | None]:
        """Out and LSE, allocated as ``like`` is; pointers of q, k, v and perhaps of `Extras`."""
        library = self.library
        out = library.empty(self.out_shape, self.out_strides, like)
        lse = library.empty_float32(self.lse_shape, like) if need_lse else None
        if self.lengths:  # rows that the kernels leave alone
            library.fill(out, 0)
            if need_lse:
                library.fill(lse, -math.inf)
        if not self.empty:
            (q, k, v), extras = pointers[:3], pointers[3:]
            results = (library.pointer(out), library.pointer(lse) if need_lse else 0)
            run_pass(library, self.device_id, self.work, like, (q, k, v, *results), extras)
        return out if self.columns_v is None else out[..., : self.columns_v], lse


class BackwardPlan(Plan):
    """The backward kernels for one problem; the gradients are like q, k and v."""

    def __init__(
        self,
        function: str,
        problem: Problem,
        library: Any,
        views: dict[str, View],
        options: Options,
        deterministic: str,
        bias_grad: bool,
        tile: Tile | None = None,
    ) -> None:
        """``deterministic`` is "error" or "warn" where a fixed order is asked for, else ""."""
        super().__init__(problem.device)
        self.library = library
        shape, extras = problem.shape, problem.extras
        self.lengths = extras.lengths
        self.dsinks_shape = (shape.heads_q,) if extras.sinks else None
        self.dbias_shape = extras.bias.shape if bias_grad else None
        # Where v has fewer columns than q and k, its gradient lies in memory of as many, like that
        # of a v that is padded. So its strides do not depend on the kernel, and the one that adds
        # up shares may write all columns.
        self.columns_v = problem.head_dims[1] if problem.needs_padding else None
        self.gradients = [  # shape and strides
            ((*x.shape[:-1], shape.head_dim), result_strides(library, shape.head_dim, x))
            for x in map(views.__getitem__, "qkv")
        ]
        # Keys that no query sees get a gradient of zero from the kernel; without queries there is
        # nothing to launch, and without keys only what finds the gradient of the sinks.
        self.no_keys = shape.seqlen_k == 0
        self.empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q)
        self.empty |= self.no_keys and not extras.sinks
        self.work = Pass(())
        if not self.empty:
            wanted = self._wanted(views, options, deterministic)
            self.work = pass_of(function, problem, wanted, tile)
        self.skips_tiles = problem.features.masked  # which a stored gradient must have as zeros
        self.dbias_has_no_order = (
            bias_grad
            and not (self.empty or self.no_keys or self.work.bias_gradient)
            and problem.bias_is_broadcast
        )
        if self.dbias_has_no_order and deterministic == "error":
            refuse_order(function, problem)

    def _wanted(self, views: dict[str, View], options: Options, deterministic: str) -> Wanted:
        strides = {}
        for name, (sizes, steps) in zip("qkv", self.gradients):
            like = View(sizes, steps, views[name].dtype, views[name].device)
            strides[f"d{name}_strides"] = canonical_strides(name, like, options)
        dbias = None
        if self.dbias_shape is not None:
            self.dbias_strides = dense_strides(self.dbias_shape, range(4))
            dbias = bias_strides(self.dbias_shape, self.dbias_strides)
        return Wanted(strides, dbias, bool(deterministic))

    def run(self, q: Array, k: Array, v: Array, pointers: list[int]) -> tuple[Array | None, ...]:
        """(dq, dk, dv, dbias, dsinks), the last two in float32 or None.

        Args:
            pointers: of dout, q, k, v, out, lse, dlse or 0, and perhaps of `Extras`.
        """
        library, pointer = self.library, self.library.pointer
        dbias = self._allocate_dbias(q)
        dsinks = _zeros_float32(library, self.dsinks_shape, q)
        if self.empty:
            return *(library.zeros_like(x) for x in (q, k, v)), dbias, dsinks
        gradients = tuple(library.empty(*shape, x) for shape, x in zip(self.gradients, (q, k, v)))
        if self.lengths or self.no_keys:  # rows that the kernels leave alone
            for gradient in gradients:
                library.fill(gradient, 0)
        sizes = self.work.scratch
        scratch = library.empty_float32((sum(sizes[:-1]) // 4,), q)
        semaphores = library.zeros_int32(sizes.semaphores, q) if sizes.semaphores else None
        (*inputs, dlse), extras = pointers[:7], pointers[7:]
        parts = itertools.accumulate(sizes[:-2], initial=pointer(scratch))
        arguments = (
            *inputs,
            *map(pointer, gradients),
            dlse,
            *parts,
            0 if semaphores is None else pointer(semaphores),
        )
        of_options = [0 if x is None else pointer(x) for x in (dbias, dsinks)]
        run_pass(library, self.device_id, self.work, q, arguments, extras, of_options)
        if self.columns_v is not None:
            dq, dk, dv = gradients
            gradients = (dq, dk, dv[..., : self.columns_v])
        return *gradients, dbias, dsinks

    def _allocate_dbias(self, q: Array) -> Array | None:
        """Memory for the gradient of the bias, if it is wanted; zeros unless all is written."""
        library = self.library
        if self.work.stores_dbias:
            dbias = library.empty(self.dbias_shape, self.dbias_strides, q)
            if self.skips_tiles:
                library.fill(dbias, 0)
            return dbias
        if self.work.bias_gradient:
            return library.empty_float32(self.dbias_shape, q)
        return _zeros_float32(library, self.dbias_shape, q)


def pass_of(
    function: str, problem: Problem, wanted: Wanted | None = None, tile: Tile | None = None
) -> Pass:
    """The launches of the backend that serves a problem, of the backward if it is ``wanted``.

    They have this tile, else that of the tuning file or the built-in one.
    """
    card, backward = card_of(problem.device), wanted is not None
    kind = problem.kind(card.capability)
    name = choose(function, kind, problem.access, backward=backward)
    tile = tile or tuning.tile_of(name, kind, problem.device, backward=backward)
    if wanted is None:
        return BACKENDS[name].forward(problem, kind, card, tile)
    return BACKENDS[name].backward(problem, kind, card, wanted, tile)


def run_pass(
    library: Any,
    device: int,
    work: Pass,
    like: Array,
    arguments: tuple[int, ...],
    extras: list[int],
    results: Sequence[int] = (),
) -> None:
    """Launches the kernels of a pass.

    Args:
        arguments: the addresses before those of the optional arrays.
        extras: those of `Extras`, or none.
        results: the addresses behind them, in the backward: of dbias and dsinks, or 0.
    """
    stream, record = library.stream(device), None
    bias = extras[BIAS] if extras else 0
    if work.key_mask:
        record, bias = work.key_mask(library, stream, like, extras)
    elif extras and not bias:  # kernels without kinds of their own for it read a key mask as a bias
        extras[BIAS] = extras[KEY_MASK]
    arguments = (*arguments, *(extras[:KEY_MASK] or NO_POINTERS))
    of_all = results
    if work.bias_gradient:  # its kernels alone write the gradient of the bias
        of_all = (0, *results[1:])
    for launch in work.launches:
        size = launch.workspace_size
        workspace = library.empty_float32((size,), like) if size else None
        address = 0 if workspace is None else library.pointer(workspace)
        launch(stream, (*arguments, *of_all), address, bias)
    for launch in work.bias_gradient:
        launch.start(stream, launch.argument(*arguments, *results))
    del record  # the kernels that read it have been launched


def refuse_order(function: str, problem: Problem) -> NoReturn:
    fact = f"the gradient of a {caller_name(function, 'bias')} that is broadcast has a "
    fact += "deterministic sum only where tensor cores compute the backward pass"
    got = f"{problem.dtype}, head_dim {problem.head_dims[0]}"
    raise NotImplementedError(f"{function}: {fact}, got {got}")


def _zeros_float32(library: Any, shape: tuple[int, ...] | None, like: Array) -> Array | None:
    if shape is None:
        return None
    zeros = library.empty_float32(shape, like)
    library.fill(zeros, 0)
    return zeros


def result_strides(library: Any, width: int, like: View) -> tuple[int, ...]:
    """The strides of a result in memory of ``width`` columns that is allocated like an input."""
    wide = (*like.shape[:-1], width)
    strides = like.strides
    if like.shape[-1] != width:  # the input itself is copied first
        strides = library.strides_of_empty(wide, like)
    return library.strides_of_empty(wide, like._replace(shape=wide, strides=strides))
