"""Scores of the caller's own that are an option, whose kernels are faster and compiled before."""

from collections.abc import Sequence
from typing import Any

from ..kind import MAX_FAST_SOFTCAP
from ..options import LEAST_FACTOR
from .capture import Capture
from .tree import Node


def softcap_of(score: Node, captures: Sequence[Capture], values: Sequence[Any]) -> float | None:
    """The cap of a score ``cap * tanh(score / cap)``, or None where it is another one.

    A cap that the option would give to other kernels does not count.

    Args:
        values: of the captures, arrays or numbers.
    """
    numbers = {of.name: x for of, x in zip(captures, values) if of.is_number}

    def number(x: Node) -> Any:
        if x.op == "as float":
            return number(x.args[0])
        return x.value if x.op == "literal" else numbers.get(getattr(x.value, "name", None))

    if score.op != "*":
        return None
    for outer, tanh in (score.args, score.args[::-1]):
        if tanh.op == "tanh" and tanh.args[0].op == "/":
            x, inner = tanh.args[0].args
            cap = number(outer)
            if x.op == "name" and x.value == "score" and cap is not None and cap == number(inner):
                return float(cap) if LEAST_FACTOR <= cap <= MAX_FAST_SOFTCAP else None
    return None
