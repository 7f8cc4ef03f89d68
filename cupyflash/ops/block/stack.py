"""Stacks of transformer blocks: their checked weights, and calls from arrays to plans.

A call of known signature is one look-up in the plans of its stack. `transformer_block` looks up the
stack of its weights before that.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...runtime.array import Array, View
from ...runtime.checks import integer_within, plain_real, require_plain
from ...runtime.operation import Operation, Plans, is_followed
from ...runtime.overlap import Written
from . import reference as reference
from .checks import (
    CACHES,
    ENDS,
    check_call,
    check_stack,
    require_aligned,
    require_blocks,
    weights_library,
)
from .plan import StackPlan, pointer_table, require_gpu

# The stacks that `transformer_block` has made, each kept as long as its weights live.
_stacks: dict[tuple, "Stack"] = {}


class Call(NamedTuple):
    """One of the ways to call a stack.

    Attributes:
        result: what it returns: x after all blocks as "out", "logits", or "tokens".
        names: of the arrays: the caches, lengths, x or tokens, and where new tokens go if that is
            another array.
        written: those that the call changes.
        stacked: the caches have an axis of layers in front.
    """

    result: str
    names: tuple[str, ...]
    written: tuple[str, ...] = CACHES
    stacked: bool = True


FORWARD = Call("out", (*CACHES, "lengths", "x"))
ONE_BLOCK = FORWARD._replace(stacked=False)
LOGITS = Call("logits", (*CACHES, "lengths", "tokens"))
NEXT_TOKENS = {  # keys: do lengths advance, and do new tokens have an array of their own?
    (advance, apart): Call(
        "tokens",
        LOGITS.names + ("out",) * apart,
        (*CACHES, *("lengths",) * advance, "out" if apart else "tokens"),
    )
    for advance in (False, True)
    for apart in (False, True)
}


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
        self.blocks, self.ends = require_blocks(function, blocks), dict(ends)
        self.library = weights_library(function, self.blocks)
        self.shape = check_stack(function, self.library, self.blocks, ends, heads, eps)
        weights = [y for block in self.blocks for y in block]
        self.weights = [*weights, *(y for y in ends.values() if y is not None)]
        self.on_cpu = self.library.on_cpu(self.weights[0])
        self.plans = Plans()
        if not self.on_cpu:
            require_gpu(function, self.shape)
        pointer = self.library.pointer
        named = [{name: pointer(y) for name, y in x._asdict().items()} for x in self.blocks]
        pointers = {name: 0 if ends[name] is None else pointer(ends[name]) for name in ENDS}
        for addresses in (*named, pointers):
            require_aligned(function, addresses)
        if not self.on_cpu:
            table = [tuple(addresses.values()) for addresses in named]
            self.table = pointer_table(self.library, table, self.weights[0])
            self.end_pointers = tuple(pointers.values())

    def __getstate__(self) -> dict[str, Any]:
        """The arguments of `BlockStack`: a copy has addresses and plans of its own."""
        sizes = {"heads": self.shape.heads, "eps": self.shape.eps}
        return {"function": "BlockStack", "blocks": self.blocks, "ends": self.ends, **sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Stack.__init__(self, **state)

    def hold_weakly(self, forget: Callable[[Any], object]) -> None:
        """Keep the addresses of the weights only; ``forget`` is called when memory of one is gone.

        For stacks on a GPU, whose kernel needs no more.
        """
        owner = self.library.owner
        self.owners = [weakref.ref(owner(y), forget) for y in self.weights]
        self.blocks, self.ends, self.weights = [], {}, []

    def require_ends(self, function: str) -> None:
        """ValueError where there is no head."""
        if not self.shape.vocab:
            raise ValueError(f"{function}: needs a stack with {', '.join(ENDS)}, got none of them")


def run(
    function: str, _: Any, arrays: tuple[Array, ...], options: tuple[Stack, Call]
) -> tuple[Array]:
    """A call of a stack."""
    stack, call = options
    library, shape = stack.library, stack.shape

    def check() -> dict[str, View]:
        named = dict(zip(call.names, arrays))
        views = check_call(function, library, shape, named, call.stacked)
        if views["lengths"].shape[0]:
            require_aligned(function, {name: library.pointer(named[name]) for name in CACHES})
        return views

    if library.wants_gradient(*stack.weights):
        require_plain(function, library, stack.weights)
    if stack.on_cpu:
        views = check()
        if views["lengths"].shape[0]:
            written = Written(function, views, call.written)
            written.check([library.pointer(y) for y in arrays])
        return (_on_cpu(stack, call, *arrays),)
    if is_followed(library, arrays):
        check()
    key, pointers = stack.plans.key(library, arrays, call)
    plan = stack.plans.get(key)
    if plan is None:
        plan = StackPlan(function, library, shape, check(), call.written)
        stack.plans.add(key, plan)
    plan.written.check(pointers)
    k_cache, v_cache, lengths, first, *apart = pointers
    like, pointer = arrays[3], library.pointer
    if call.result == "out":
        out = library.empty(like.shape, (shape.width, 1), like)
        values = (first, 0, k_cache, v_cache, lengths, pointer(out), 0, 0)
    elif call.result == "logits":
        out = library.empty_float32((like.shape[0], shape.vocab), like)
        values = (0, first, k_cache, v_cache, lengths, 0, pointer(out), 0)
    else:
        out = arrays[-1]
        values = (0, first, k_cache, v_cache, lengths, 0, 0, *(apart or (first,)))
    ends = (0,) * len(ENDS) if call.result == "out" else stack.end_pointers
    plan(like, (*values, pointer(stack.table), *ends))
    library.wrote(*(y for name, y in zip(call.names, arrays) if name in call.written))
    return (out,)


def run_block(
    function: str, _: Any, arrays: tuple[Array, ...], options: tuple[Any, int, float]
) -> tuple[Array]:
    """One block: a stack that is kept by the pointers and signatures of its weights."""
    weights, heads, eps = options
    require_blocks(function, [weights])
    library = weights_library(function, [weights])
    heads = integer_within(function, "heads", heads, 1, 2**31 - 1)
    eps = plain_real(function, "eps", eps)
    make = lambda: Stack(function, [weights], dict.fromkeys(ENDS), heads, eps)  # noqa: E731
    if library.on_cpu(weights.ln1_weight):
        return run(function, library, arrays, (make(), ONE_BLOCK))
    try:
        if is_followed(library, weights):
            make()
            require_plain(function, library, weights)
        pointers = tuple(map(library.pointer, weights))
        signatures = tuple(map(library.signature, weights))
    except (AttributeError, TypeError):  # a weight of another library
        make()
        raise
    key = (type(library), pointers, signatures, heads, eps)
    stack = _stacks.get(key)
    if stack is None:
        stack = make()
        stack.hold_weakly(lambda _: _stacks.pop(key, None))
        _stacks[key] = stack
    return run(function, library, arrays, (stack, ONE_BLOCK))


BLOCK = Operation(run_block, first=3, native="x")
BLOCKS = Operation(run, first=3, native="x")
TOKENS = Operation(run, first=3, native="tokens")


def _on_cpu(
    stack: Stack,
    call: Call,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    first: Array,
    *apart: Array,
) -> Array:
    """``first`` is x or the tokens, ``apart`` where new tokens go if not there."""
    library = stack.library
    if not call.stacked:
        k_cache, v_cache = k_cache[None], v_cache[None]
    arrays = (k_cache, v_cache, lengths)
    if call.result == "out":
        found = reference.stack_on_cpu(stack, library.to_numpy(first), *arrays)
        return library.from_numpy(found, first)
    if call.result == "logits":
        found = reference.logits_on_cpu(stack, first, *arrays)
        return library.from_numpy(found.astype("float32"))
    tokens, goes_on = reference.next_on_cpu(stack, first, *arrays)
    out = apart[0] if apart else first
    out[...] = library.from_numpy(tokens)
    if "lengths" in call.written:
        lengths += library.from_numpy(goes_on)
    return out
