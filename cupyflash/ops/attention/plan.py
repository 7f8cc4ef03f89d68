"""The plan of a checked problem: the launches and all else that equal-shaped calls share.

A plan knows no backend. It gets the `Pass` of the one that serves its problem (planning.py), with
the loaded kernels, the grids and the bytes of the parameter struct behind its leading pointers. A
call then allocates its results, puts the pointers in front and launches.
"""

import itertools
import math
from typing import Any

from ...runtime.array import Array, Empty, View, dense_strides
from ...runtime.operation import Plan
from .options import BIAS, KEY_MASK
from .passes import Pass, Wanted, zeros_for
from .problem import Problem

Prepared = tuple[Array, tuple, tuple[int, ...], list[int], tuple[int, ...], Any]  # of a call
NO_POINTERS = (0,) * KEY_MASK  # null for the optional arrays that the kernels take


class PassPlan(Plan):
    """The launches of a pass for one problem. A subclass allocates what they write."""

    def __init__(self, problem: Problem, library: Any, work: Pass) -> None:
        super().__init__(problem.device)
        self.library, self.work = library, work
        own = any(launch.workspace_size for launch in work.launches)
        own = own or problem.pages is not None
        # Calls without optional arrays pack the pointers once, for all launches.
        self.is_plain = not (own or work.key_mask or work.bias_gradient or work.mask_tiles)
        self.pack = work.launches[0].pack if work.launches else None

    def run(self, *call: Any) -> tuple[Array | None, ...]:
        """Allocates the results of a call, launches the kernels, and returns the results."""
        like, results, arguments, extras, option_gradients, held = self.prepared(*call)
        library, work = self.library, self.work
        if not work.launches:
            return results
        stream, record = library.stream(self.device_id), None
        if self.is_plain and not extras:
            packed = self.pack(*arguments, *NO_POINTERS, *option_gradients)
            for launch in work.launches:
                launch.start(stream, launch.plain_argument(packed, arguments, stream))
            return results
        captures, tiles = work.of_text(library, stream, like, extras)
        bias = extras[BIAS] if extras else 0
        if work.key_mask:
            record, bias = work.key_mask(library, stream, like, extras)
        elif extras and not bias:  # kernels without kinds of their own for it: a bool bias
            extras[BIAS] = extras[KEY_MASK]
        arguments = (*arguments, *(extras[:KEY_MASK] or NO_POINTERS))
        # Where there are kernels of ``bias_gradient``, they alone write the gradient of the bias.
        in_all = (0, *option_gradients[1:]) if work.bias_gradient else option_gradients
        for launch in work.launches:
            size = launch.workspace_size
            workspace = library.empty_float32((size,), like) if size else None
            place = 0 if workspace is None else library.pointer(workspace)
            argument = launch.argument(
                *arguments, *in_all, stream=stream, workspace=place, bias=bias
            )
            launch.start(stream, launch.with_captures(argument, captures))
        for launch in work.bias_gradient:
            launch.start(stream, launch.argument(*arguments, *option_gradients))
        if work.capture_gradients:
            arguments += option_gradients
            results += work.capture_gradients(library, stream, like, arguments, extras)
        del record, tiles, held  # the kernels that use this memory have been launched
        return results

    def prepared(self, *call: Any) -> Prepared:
        """Allocates what a call needs.

        Returns:
            An array of the call; the results; the addresses that the kernels get before those of
            the optional arrays; the addresses of `Extras` (and captures), or none; in the backward
            those of dbias and dsinks, or 0, which come last; memory that lives until the launches.
        """
        raise NotImplementedError


class ForwardPlan(PassPlan):
    """The forward of one problem; ``library`` allocates out and LSE."""

    def __init__(
        self, problem: Problem, library: Any, q: View, out_strides: tuple[int, ...], work: Pass
    ) -> None:
        super().__init__(problem, library, work)
        # Where v has fewer columns than q, out lies in memory of as many, like that of a v that is
        # padded. So its strides do not depend on the kernel.
        self.columns_v = problem.head_dims[1] if problem.needs_padding else None
        out, lse = Empty(q.shape, out_strides, q), _float32(problem.lse_shape, q)
        self.empty_out, self.empty_both = library.allocator(out), library.allocator(out, lse)
        self.lengths = problem.extras.lengths

    def prepared(self, like: Array, pointers: list[int], need_lse: bool) -> Prepared:
        """Out and LSE, allocated as ``like`` is; pointers of q, k, v and perhaps of `Extras`."""
        if need_lse:
            (out, lse), made = self.empty_both(like)
        else:
            (out,), made = self.empty_out(like)
            lse, made = None, (*made, 0)
        if self.lengths:  # rows that the kernels leave alone
            self.library.fill(out, 0)
            if need_lse:
                self.library.fill(lse, -math.inf)
        arguments = (*pointers[:3], *made)
        seen = out if self.columns_v is None else out[..., : self.columns_v]
        return like, (seen, lse), arguments, pointers[3:], (), None


class BackwardPlan(PassPlan):
    """The backward of one problem; the gradients are like q, k and v.

    Args:
        gradients: dq, dk and dv.
        wanted: what the launches were made for.
    """

    def __init__(
        self,
        problem: Problem,
        library: Any,
        q: View,
        gradients: list[Empty],
        wanted: Wanted,
        work: Pass,
    ) -> None:
        super().__init__(problem, library, work)
        shape, extras = problem.shape, problem.extras
        *sizes, self.semaphores = work.scratch  # one allocation, and one of zeros if need be
        # A gradient has memory of its own, as one of them may outlive the others.
        self.empty = library.allocator(*gradients, _float32((sum(sizes) // 4,), q))
        self.offsets = tuple(itertools.accumulate(sizes[:-1], initial=0))
        self.dsinks_shape = (shape.heads_q,) if extras.sinks else None
        self.dbias_shape = None if wanted.bias is None else extras.bias.shape
        # Where v has fewer columns than q and k, its gradient lies in memory of as many, like that
        # of a v that is padded. So its strides do not depend on the kernel, and the one that adds
        # up shares may write all columns.
        self.columns_v = problem.head_dims[1] if problem.needs_padding else None
        # Rows that the kernels leave alone. Keys that no query sees get a gradient of zero.
        self.fills = extras.lengths or shape.seqlen_k == 0
        self.skips_tiles = problem.features.masked  # a stored gradient must be zero there
        self.learned = problem.learned
        self.dbias_has_no_order = has_no_order(problem, wanted, work)

    def prepared(self, q: Array, k: Array, v: Array, pointers: list[int]) -> Prepared:
        """(dq, dk, dv, dbias, dsinks), the last two in float32 or None; then those of captures.

        Args:
            pointers: of dout, q, k, v, out, lse, dlse or 0, and perhaps of `Extras`.
        """
        library, pointer = self.library, self.library.pointer
        dbias = None if self.dbias_shape is None else self._allocate_dbias(q)
        dsinks = None
        if self.dsinks_shape is not None:
            dsinks = _zeros_float32(library, self.dsinks_shape, q)
        if not self.work.launches:
            zeros = [library.zeros_like(x) for x in (q, k, v)]
            zeros += [dbias, dsinks, *zeros_for(library, self.learned, q)]
            return q, tuple(zeros), (), [], (), None
        (dq, dk, dv, scratch), (*made, start) = self.empty(q)
        if self.fills:
            for gradient in (dq, dk, dv):
                library.fill(gradient, 0)
        semaphores = library.zeros_int32(self.semaphores, q) if self.semaphores else None
        lse_log2, delta, dq_accum, partial = self.offsets
        arguments = (
            *pointers[:6],
            *made,
            pointers[6],
            start + lse_log2,
            start + delta,
            start + dq_accum,
            start + partial,
            0 if semaphores is None else pointer(semaphores),
        )
        option_gradients = (
            0 if dbias is None else pointer(dbias),
            0 if dsinks is None else pointer(dsinks),
        )
        if self.columns_v is not None:
            dv = dv[..., : self.columns_v]
        results = (dq, dk, dv, dbias, dsinks)
        return q, results, arguments, pointers[7:], option_gradients, (scratch, semaphores)

    def _allocate_dbias(self, q: Array) -> Array:
        """Memory for the gradient of the bias; zeros unless all is written."""
        library, shape = self.library, self.dbias_shape
        if self.work.stores_dbias:
            dbias = library.empty(shape, dense_strides(shape, range(4)), q)
            if self.skips_tiles:
                library.fill(dbias, 0)
            return dbias
        if self.work.bias_gradient:
            return library.empty_float32(shape, q)
        return _zeros_float32(library, shape, q)


def has_no_order(problem: Problem, wanted: Wanted, work: Pass) -> bool:
    """Whether the gradient of a bias is a sum of atomics."""
    added = wanted.bias is not None and work.launches and not work.bias_gradient
    return bool(added and problem.shape.seqlen_k and problem.bias_is_broadcast)


def _float32(shape: tuple[int, ...], like: View) -> Empty:
    return Empty(shape, dense_strides(shape, range(len(shape))), like, float32=True)


def _zeros_float32(library: Any, shape: tuple[int, ...], like: Array) -> Array:
    zeros = library.empty_float32(shape, like)
    library.fill(zeros, 0)
    return zeros
