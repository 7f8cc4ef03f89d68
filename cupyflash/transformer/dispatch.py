"""Stacks of transformer blocks from arrays to plans; a call of known signature is one look-up."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ..array import Array, library_of
from ..decode.sampling_reference import greedy_row
from ..kernel_launch import keep
from . import reference
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
        self.library = library = weights_library(function, blocks)
        self.blocks, self.ends = list(blocks), dict(ends)
        self.shape: StackShape = check_stack(function, library, self.blocks, ends, heads, eps)
        weights = [y for block in self.blocks for y in block]
        self.weights = [*weights, *(y for y in ends.values() if y is not None)]
        self.on_cpu = library.on_cpu(self.weights[0])
        self.plans: dict[tuple, StackPlan] = {}
        if not self.on_cpu:
            require_gpu(function, self.shape)
            self._take_pointers(function)

    def forward(
        self, function: str, x: Array, k_cache: Array, v_cache: Array, lengths: Array, stacked: bool
    ) -> Array:
        """x after all blocks; ``stacked`` caches have an axis of layers."""
        library, caches = self.library, {"k_cache": k_cache, "v_cache": v_cache}
        plan = self._plan(function, {"x": x, **caches}, {"lengths": lengths}, stacked, False, x)
        if self.on_cpu:
            caches = [y if stacked else y[None] for y in (k_cache, v_cache)]
            return library.from_numpy(self._blocks(library.to_numpy(x), *caches, lengths), x)
        out = library.empty(x.shape, (self.shape.width, 1), x)
        if plan is not None:
            arrays = (x, None, k_cache, v_cache, lengths, out, None, None)
            plan(x, self._pointers(arrays, False))
        return out

    def logits(
        self, function: str, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array
    ) -> Array:
        """float32 (batch, vocab)."""
        self._require_ends(function)
        library, floats = self.library, {"k_cache": k_cache, "v_cache": v_cache}
        integers = {"tokens": tokens, "lengths": lengths}
        plan = self._plan(function, floats, integers, True, False, tokens)
        if self.on_cpu:
            found = self._logits(tokens, k_cache, v_cache, lengths)
            return library.from_numpy(found.astype("float32"))
        out = library.empty_float32((tokens.shape[0], self.shape.vocab), tokens)
        if plan is not None:
            arrays = (None, tokens, k_cache, v_cache, lengths, None, out, None)
            plan(tokens, self._pointers(arrays, True))
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
        library, floats = self.library, {"k_cache": k_cache, "v_cache": v_cache}
        integers = {"tokens": tokens, "lengths": lengths, "out": out}
        plan = self._plan(function, floats, integers, True, bool(advance), tokens)
        if self.on_cpu:
            logits = self._logits(tokens, k_cache, v_cache, lengths)
            lost = self._lost(tokens, k_cache, lengths)
            found = [-1 if none else greedy_row(row) for none, row in zip(lost, logits)]
            out[...] = library.from_numpy(numpy.array(found, "int32"))
            if advance:
                lengths += library.from_numpy((~lost).astype("int32"))
        elif plan is not None:
            arrays = (None, tokens, k_cache, v_cache, lengths, None, None, out)
            plan(tokens, self._pointers(arrays, True))
        return out

    def _plan(
        self,
        function: str,
        floats: dict[str, Array],
        integers: dict[str, Array],
        stacked: bool,
        advance: bool,
        first: Array,
    ) -> StackPlan | None:
        """None on the CPU and for a batch of none; ``first`` says how many sequences there are."""
        library, pointer = self.library, self.library.pointer if not self.on_cpu else None
        if library.wants_gradient(*self.weights) or (
            library_of(first) is library and library.wants_gradient(first)
        ):
            raise NotImplementedError(f"{function}: has no backward; call it under torch.no_grad()")
        arrays = (*floats.values(), *integers.values())
        if self.on_cpu or any(library_of(y) is not library for y in arrays):
            check_call(function, library, self.shape, floats, integers, stacked)
            return None
        signatures = tuple(map(library.signature, arrays))
        key = (signatures, tuple(floats), tuple(integers), stacked, advance)
        aligned = {name: pointer(floats[name]) for name in ("k_cache", "v_cache")}
        if any(address % 16 for address in aligned.values()) and first.shape[0]:
            require_aligned(function, aligned)
        if key not in self.plans:
            views = check_call(function, library, self.shape, floats, integers, stacked)
            batch, shape = first.shape[0], self.shape
            plan = StackPlan(function, library, shape, views, batch, advance) if batch else None
            keep(self.plans, key, plan)
        return self.plans[key]

    def _take_pointers(self, function: str) -> None:
        pointer = self.library.pointer
        blocks = [{name: pointer(y) for name, y in x._asdict().items()} for x in self.blocks]
        ends = {name: 0 if y is None else pointer(y) for name, y in self.ends.items()}
        for named in (*blocks, ends):
            require_aligned(function, named)
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

    def _blocks(self, x: numpy.ndarray, k_cache: Array, v_cache: Array, lengths: Array) -> Any:
        """`reference.stack`, the new keys and values written into the caches."""
        library, shape = self.library, self.shape
        blocks = [type(block)(*map(library.to_numpy, block)) for block in self.blocks]
        caches = [library.to_numpy(y) for y in (k_cache, v_cache)]
        lengths = library.to_numpy(lengths)
        out, *new = reference.stack(x, blocks, *caches, lengths, shape.eps)
        room = (lengths >= 0) & (lengths < k_cache.shape[2]) & ~numpy.isnan(x).all(-1)
        for b in numpy.flatnonzero(room):
            for cache, values in zip((k_cache, v_cache), new):
                cache[:, b, int(lengths[b])] = library.from_numpy(
                    numpy.ascontiguousarray(values[:, b])
                )
        return out.astype(x.dtype)

    def _logits(self, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array) -> Any:
        library, shape = self.library, self.shape
        ends = {name: library.to_numpy(y) for name, y in self.ends.items()}
        tables = (ends["token_embedding"], ends["position_embedding"])
        x = reference.embed(library.to_numpy(tokens), library.to_numpy(lengths), *tables)
        x = self._blocks(x, k_cache, v_cache, lengths)
        last = (ends["final_weight"], ends["final_bias"], ends["head_weight"])
        return reference.head(x, *last, shape.eps)

    def _lost(self, tokens: Array, k_cache: Array, lengths: Array) -> numpy.ndarray:
        """Which sequences have no next token."""
        tokens, lengths = map(self.library.to_numpy, (tokens, lengths))
        most = min(k_cache.shape[2], self.shape.positions)
        known = (tokens >= 0) & (tokens < self.shape.vocab)
        return ~(known & (lengths >= 0) & (lengths < most))


def weights_library(function: str, blocks: Sequence[Any]) -> Any:
    """The library of the weights; a TypeError where there is none."""
    if len(blocks) == 0:
        raise ValueError(f"{function}: there must be at least one block, got none")
    for block in blocks:
        if not hasattr(block, "ln1_weight"):
            kind = type(block).__name__
            raise TypeError(f"{function}: weights must be BlockWeights, got {kind}")
    library = library_of(blocks[0].ln1_weight)
    if library is None:
        kind = type(blocks[0].ln1_weight).__name__
        raise TypeError(f"{function}: weights must be NumPy, CuPy or torch arrays, got {kind}")
    return library


_stacks: dict[tuple, Stack] = {}


def block(
    function: str,
    x: Array,
    weights: Any,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    heads: int,
    eps: float,
) -> Array:
    """A stack of one block, kept by the pointers and signatures of its weights."""
    library = weights_library(function, [weights])
    if library.on_cpu(weights.ln1_weight):
        stack = Stack(function, [weights], dict.fromkeys(ENDS), heads, eps)
        return stack.forward(function, x, k_cache, v_cache, lengths, False)
    try:
        pointers = tuple(map(library.pointer, weights))
        signatures = tuple(map(library.signature, weights))
        key = (type(library), pointers, signatures, heads, eps)
        stack = _stacks.get(key)
    except (AttributeError, TypeError):  # a weight of another library, heads that are no number
        stack = None
    if stack is None:
        stack = Stack(function, [weights], dict.fromkeys(ENDS), heads, eps)
        keep(_stacks, key, stack)
    return stack.forward(function, x, k_cache, v_cache, lengths, False)
