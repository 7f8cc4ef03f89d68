"""Stacks of transformer blocks from arrays to plans; a call of known signature is one look-up."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy

from ..decode.kv_cache import CACHES
from ..decode.sampling_reference import greedy_row
from ..runtime.array import Array, compiling, library_of
from ..runtime.checks import plain_flag, require_plain, short
from ..runtime.operation import Plans
from ..runtime.overlap import Written
from . import cpu
from .checks import StackShape, check_call, check_stack, require_aligned
from .plan import StackPlan, pointer_table, require_gpu

ENDS = ("final_weight", "final_bias", "head_weight", "token_embedding", "position_embedding")


class Stack:
    """Checked weights, and the plans of the calls that they have had.

    Args:
        blocks: of `BlockWeights`.
        ends: by the names in `ENDS`; all None without a head.
    """

    def __init__(
        self,
        function: str,
        blocks: Sequence[Any],
        ends: Mapping[str, Array | None],
        heads: int,
        eps: float,
    ) -> None:
        self.blocks, self.ends = block_list(function, blocks), dict(ends)
        self.library = library = weights_library(function, self.blocks)
        self.shape: StackShape = check_stack(function, library, self.blocks, ends, heads, eps)
        weights = [y for block in self.blocks for y in block]
        self.weights = [*weights, *(y for y in ends.values() if y is not None)]
        if got := library.what_follows(*self.weights, gradients=False):
            fact = "weights must be arrays with memory of their own"
            raise NotImplementedError(f"{function}: {fact}, got {got}")
        self.on_cpu = library.on_cpu(self.weights[0])
        self.plans = Plans()
        self._take_pointers(function)

    def hold_weakly(self, forget: Callable[[Any], object]) -> None:
        """Keep the addresses of the weights only; ``forget`` is called when memory of one is gone.

        For stacks on a GPU, whose kernel needs no more.
        """
        owner = self.library.owner
        self.owners = [weakref.ref(owner(y), forget) for y in self.weights]
        self.blocks, self.ends, self.weights = [], {}, []

    def forward(
        self, function: str, x: Array, k_cache: Array, v_cache: Array, lengths: Array, stacked: bool
    ) -> Array:
        """x after all blocks; ``stacked`` caches have an axis of layers."""
        library, caches = self.library, {"k_cache": k_cache, "v_cache": v_cache}
        plan = self._plan(function, {"x": x, **caches}, {"lengths": lengths}, CACHES, stacked)
        if self.on_cpu:
            caches = [y if stacked else y[None] for y in (k_cache, v_cache)]
            return library.from_numpy(cpu.run(self, library.to_numpy(x), *caches, lengths), x)
        out = library.empty(x.shape, (self.shape.width, 1), x)
        if plan is not None:
            arrays = (x, None, k_cache, v_cache, lengths, out, None, None)
            plan(x, self._pointers(arrays, False))
            library.wrote(k_cache, v_cache)
        return out

    def logits(
        self, function: str, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array
    ) -> Array:
        """float32 (batch, vocab)."""
        self._require_ends(function)
        library, floats = self.library, {"k_cache": k_cache, "v_cache": v_cache}
        integers = {"tokens": tokens, "lengths": lengths}
        plan = self._plan(function, floats, integers, CACHES)
        if self.on_cpu:
            found = cpu.logits(self, tokens, k_cache, v_cache, lengths)
            return library.from_numpy(found.astype("float32"))
        out = library.empty_float32((tokens.shape[0], self.shape.vocab), tokens)
        if plan is not None:
            arrays = (None, tokens, k_cache, v_cache, lengths, None, out, None)
            plan(tokens, self._pointers(arrays, True))
            library.wrote(k_cache, v_cache)
        return out

    def step(
        self,
        function: str,
        tokens: Array,
        k_cache: Array,
        v_cache: Array,
        lengths: Array,
        out: Array,
        advance: bool,
    ) -> Array:
        """The next tokens go to ``out``, -1 where there is none."""
        self._require_ends(function)
        advance = plain_flag(function, "advance", advance)
        library, floats = self.library, {"k_cache": k_cache, "v_cache": v_cache}
        integers = {"tokens": tokens, "lengths": lengths}
        written = [*CACHES, *(["lengths"] if advance else [])]
        if out is tokens:
            written.append("tokens")
        else:
            integers["out"] = out
            written.append("out")
        plan = self._plan(function, floats, integers, written)
        if self.on_cpu:
            logits = cpu.logits(self, tokens, k_cache, v_cache, lengths)
            lost = cpu.lost(self, tokens, k_cache, lengths)
            found = [-1 if none else greedy_row(row) for none, row in zip(lost, logits)]
            out[...] = library.from_numpy(numpy.array(found, "int32"))
            if advance:
                lengths += library.from_numpy((~lost).astype("int32"))
        elif plan is not None:
            arrays = (None, tokens, k_cache, v_cache, lengths, None, None, out)
            plan(tokens, self._pointers(arrays, True))
            named = floats | integers
            library.wrote(*(named[name] for name in written))
        return out

    def _plan(
        self,
        function: str,
        floats: dict[str, Array],
        integers: dict[str, Array],
        written: Sequence[str],
        stacked: bool = True,
    ) -> StackPlan | None:
        """Checked; None on the CPU and for a batch of none.

        Args:
            written: the names of the arrays that the call changes.
        """
        library, shape, named = self.library, self.shape, floats | integers
        arrays = tuple(named.values())
        check = lambda: check_call(function, library, shape, floats, integers, stacked)  # noqa: E731
        if any(library_of(y) is not library for y in arrays):
            check()
        if library.wants_gradient(*self.weights):
            require_plain(function, library, self.weights)
        if self.on_cpu or library.followed(*arrays):
            require_plain(function, library, arrays)
        pointers = [library.pointer(y) for y in arrays]
        key = (tuple(map(library.signature, arrays)), tuple(named), tuple(written), stacked)
        if key not in self.plans:
            views = check()
            batch, plan = len(arrays[-1]), None
            if batch:
                found = Written(function, views, written)
                if not self.on_cpu:
                    advance = "lengths" in written
                    plan = StackPlan(function, library, shape, views, batch, advance)
                self.plans.add(key, (plan, found))
            else:
                self.plans.add(key, None)
        if self.plans[key] is None:
            return None
        plan, overlap = self.plans[key]
        aligned = {name: library.pointer(floats[name]) for name in CACHES}
        if any(address % 16 for address in aligned.values()):
            require_aligned(function, aligned)
        overlap.check(pointers)
        return plan

    def _take_pointers(self, function: str) -> None:
        """What the kernel reads of the weights; only the checks on the CPU."""
        if not self.on_cpu:
            require_gpu(function, self.shape)
        pointer = self.library.pointer
        blocks = [{name: pointer(y) for name, y in x._asdict().items()} for x in self.blocks]
        ends = {name: 0 if y is None else pointer(y) for name, y in self.ends.items()}
        for named in (*blocks, ends):
            require_aligned(function, named)
        if self.on_cpu:
            return
        pointers = [tuple(named.values()) for named in blocks]
        self.table = pointer_table(self.library, pointers, self.weights[0])
        self.end_pointers = tuple(ends[name] for name in ENDS)

    def _pointers(self, arrays: tuple[Array | None, ...], with_ends: bool) -> tuple[int, ...]:
        """Of the arrays of a call and of the weights, as the kernel wants them."""
        pointer = self.library.pointer
        ends = self.end_pointers if with_ends else (0,) * len(ENDS)
        return (*(0 if y is None else pointer(y) for y in arrays), pointer(self.table), *ends)

    def _require_ends(self, function: str) -> None:
        if not self.shape.vocab:
            raise ValueError(f"{function}: needs a stack with {', '.join(ENDS)}, got none of them")


def block_list(function: str, blocks: Any) -> list[Any]:
    """The blocks, if they are some."""
    if not isinstance(blocks, Iterable) or isinstance(blocks, str | bytes | dict):
        fact = "blocks must be a sequence of BlockWeights"
        raise TypeError(f"{function}: {fact}, got {short(blocks)}")
    blocks = list(blocks)
    if not blocks:
        raise ValueError(f"{function}: there must be at least one block, got none")
    for block in blocks:
        if not hasattr(block, "ln1_weight") or isinstance(block, type):
            fact = "weights must be BlockWeights"
            raise TypeError(f"{function}: {fact}, got {type(block).__name__}")
    return blocks


def weights_library(function: str, blocks: Sequence[Any]) -> Any:
    """The library of the weights; a TypeError where there is none."""
    library = library_of(blocks[0].ln1_weight)
    if library is None:
        kind = type(blocks[0].ln1_weight).__name__
        fact = "weights must be NumPy, CuPy or torch arrays"
        raise TypeError(f"{function}: {fact}, got {kind} as ln1_weight")
    return library


def eager(function: Callable, *arguments: Any) -> Any:
    """A call, outside of the graph where torch.compile traces the caller."""
    if compiling():
        from ..runtime.torch_calls import eagerly

        return eagerly(function, *arguments)
    return function(*arguments)
