"""The shard of the calls of libraries that cannot be handed one."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .shard import Shard


class Context(NamedTuple):
    """What `context` was given: a shard, and the move of `attention`."""

    shard: Shard
    move: str


# Not a context variable: backward passes run in other threads.
_contexts: list[Context] = []
_seen = False


@contextlib.contextmanager
def context(shard: Shard, *, move: str = "auto") -> Iterator[None]:
    """A block in which attention functions of the integrations attend over the tokens of a shard.

    Run the backward pass in it, too: a checkpoint computes the forward of a layer again there.

    Args:
        move: as in `attention`.
    """
    global _seen
    _seen = True
    _contexts.append(Context(shard, move))
    try:
        yield
    finally:
        _contexts.pop()


def current(function: str) -> Context | None:
    """The innermost context, or None.

    Raises:
        RuntimeError: a checkpoint computes a forward again outside of all contexts.
    """
    if _contexts:
        return _contexts[-1]
    if _seen and torch._C._current_graph_task_id() != -1:
        fact = "a checkpoint computes attention again outside of cupyflash.parallel.context"
        raise RuntimeError(f"{function}: {fact}; call backward in the block, too")
    return None
