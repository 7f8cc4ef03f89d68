"""The value of a tree in NumPy or CuPy, and what its derivatives make of a gradient.

Every node is computed for all places of a tile at once, in int64 and in the dtype of the scores.
Derivatives go backwards over the recorded steps, once for the score and all captures together.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ....runtime.array import Array, array_namespace
from .functions import FUNCTIONS
from .tree import COMPARISONS, Capture, Kind, Node

Partial = tuple[int, Callable[[Array], Array]]  # a step, and its part of a gradient


class Evaluation:
    """The value of a tree for the places of a tile.

    Args:
        tree: of a score or a mask.
        variables: "score", of any shape, and "batch", "head", "query" and "key", integers that
            broadcast to it; a mask needs no score, and ``dtype`` instead.
        captures: by their names, arrays and Python numbers.
        learned: the names of the captures that have a gradient.

    Attributes:
        value: what broadcasts to the shape of the score, in its dtype; bool of a mask.

    Raises:
        IndexError: an index outside of a capture, where no ``&&``, ``||`` or ``where`` hides it.
    """

    def __init__(
        self,
        tree: Node,
        variables: dict[str, Array],
        captures: dict[str, Any],
        learned: Sequence[str] = (),
        dtype: Any = None,
    ) -> None:
        self.xp = array_namespace(variables["query"])
        self.dtype = variables["score"].dtype if dtype is None else self.xp.dtype(dtype)
        self.variables, self.captures, self.learned = variables, captures, learned
        self.values: list[Array] = []
        self.partials: list[list[Partial]] = []  # of each step, empty if nothing has a gradient
        self.leaves: dict[int, str] = {}  # steps whose gradient is asked for
        self.gathered: dict[int, Array] = {}  # flat indices of the captures that learn
        self.steps: dict[tuple[int, int], int] = {}
        self.held: list[Array] = []  # conditions, whose ids are keys of steps
        with self.xp.errstate(all="ignore") if hasattr(self.xp, "errstate") else _Nothing():
            self.root = self.visit(tree, None)
        self.value = self.values[self.root]

    def visit(self, node: Node, seen: Array | None) -> int:
        """The step of a node; ``seen`` is where its value counts, None: everywhere."""
        key = (id(node), id(seen) if node.reads else 0)
        if key not in self.steps:
            self.steps[key] = self.compute(node, seen)
        return self.steps[key]

    def compute(self, node: Node, seen: Array | None) -> int:
        if node.op == "literal":
            return self.add(self.number(node.value, node.kind))
        if node.op == "name":
            return self.add(self.variables[node.value], leaf=node.value)
        if node.op == "capture":
            indices = [self.values[self.visit(x, seen)] for x in node.args]
            return self.read(node.value, indices, seen)
        steps = [self.visit(node.args[0], seen)]
        first = self.values[steps[0]]
        if node.op in ("&&", "||", "where"):
            first = first.astype(bool)
            for i, x in enumerate(node.args[1:]):
                on_true = node.op == "&&" or (node.op == "where" and i == 0)
                steps.append(self.visit(x, self.narrowed(x, seen, first if on_true else ~first)))
        else:
            steps += [self.visit(x, seen) for x in node.args[1:]]
        args = [self.values[x] for x in steps]
        if node.op == "where":
            value = self.xp.where(first, *args[1:])
            return self.add(
                value,
                (steps[1], lambda g: self.xp.where(first, g, 0)),
                (steps[2], lambda g: self.xp.where(first, 0, g)),
            )
        if node.op in FUNCTIONS:
            return self.call(node, steps, args)
        return self.operate(node, steps, args)

    def narrowed(self, node: Node, seen: Array | None, condition: Array) -> Array | None:
        """``seen`` and the condition, if the node reads a capture at all."""
        if not node.reads:
            return seen
        self.held.append(condition if seen is None else condition & seen)
        return self.held[-1]

    def number(self, value: Any, kind: Kind) -> Array:
        types = {Kind.BOOL: bool, Kind.INT: "int64", Kind.FLOAT: self.dtype}
        return self.xp.asarray(value, dtype=types[kind])

    def read(self, capture: Capture, indices: list[Array], seen: Array | None) -> int:
        x = self.captures[capture.name]
        if capture.is_number:
            return self.add(self.number(x, capture.kind))
        flat, inside = self.xp.zeros((), "int64"), []
        for axis, (index, size) in enumerate(zip(indices, x.shape)):
            outside = (index < 0) | (index >= size)
            outside = outside if seen is None else outside & seen
            if outside.any():
                places = self.xp.broadcast_to(index, outside.shape)[outside]
                fact = f"{capture.name} is read outside of its axis {axis} of {size}"
                raise IndexError(f"cupyflash: {fact}, got index {int(places[0])}")
            inside.append(self.xp.clip(index, 0, max(0, size - 1)))
            flat = flat * size + inside[-1]
        value = x[tuple(inside)] if x.size else self.xp.zeros(flat.shape, x.dtype)
        value = (
            value.astype(bool if capture.kind == Kind.BOOL else "int64")
            if (capture.kind != Kind.FLOAT)
            else value.astype(self.dtype)
        )
        learns = capture.name in self.learned
        step = self.add(value, leaf=capture.name if learns else "")
        if learns:
            self.gathered[step] = flat
        return step

    def call(self, node: Node, steps: list[int], args: list[Array]) -> int:
        function = FUNCTIONS[node.op]
        value = function.value(self.xp, *args)
        parts = []
        for step, partial in zip(steps, function.partials):
            parts.append((step, lambda g, p=partial: g * p(self.xp, value, *args)))
        return self.add(value, *(parts if node.kind == Kind.FLOAT else ()))

    def operate(self, node: Node, steps: list[int], args: list[Array]) -> int:
        """An operator or a cast."""
        op = node.op
        if op in ("as float", "float"):
            return self.add(args[0].astype(self.dtype))
        if op in ("int", "bool"):
            return self.add(args[0].astype("int64" if op == "int" else bool))
        if node.kind == Kind.INT:
            args = [x.astype("int64") for x in args]
        value = OPERATORS[op](self.xp, *args)
        if node.kind != Kind.FLOAT or op in COMPARISONS:
            return self.add(value)
        a, b = (*args, None)[:2]
        partials = {
            "neg": (lambda g: -g,),
            "+": (lambda g: g, lambda g: g),
            "-": (lambda g: g, lambda g: -g),
            "*": (lambda g: g * b, lambda g: g * a),
            "/": (lambda g: g / b, lambda g: -g * value / b),
        }
        return self.add(value, *zip(steps, partials[op]))

    def add(self, value: Array, *partials: Partial, leaf: str = "") -> int:
        step = len(self.values)
        if leaf == "score" or (leaf and leaf in self.learned):
            self.leaves[step] = leaf
        moving = [(x, f) for x, f in partials if x in self.leaves or self.partials[x]]
        self.values.append(value)
        self.partials.append(moving)
        return step

    def pull(self, gradient: Array) -> tuple[Array, dict[str, Array]]:
        """The gradient by the score, and those by the captures that learn, in float64.

        Args:
            gradient: by the value, of the shape of the score.
        """
        xp, of_score = self.xp, self.xp.zeros(gradient.shape, gradient.dtype)
        of_captures = {x: xp.zeros(self.captures[x].size, "float64") for x in self.learned}
        waiting = {self.root: gradient}
        with xp.errstate(all="ignore") if hasattr(xp, "errstate") else _Nothing():
            for step in range(self.root, -1, -1):
                g = waiting.pop(step, None)
                if g is None:
                    continue
                name = self.leaves.get(step)
                if name == "score":
                    of_score += g
                elif name:
                    sums = of_captures[name]
                    g, flat = xp.broadcast_arrays(g, self.gathered[step])
                    sums += xp.bincount(flat.ravel(), g.ravel(), sums.size)[: sums.size]
                for before, partial in self.partials[step]:
                    part = xp.where(g == 0, 0, partial(g))  # 0 times an infinite slope is 0
                    part = _sum_to(part, self.values[before].shape)
                    waiting[before] = waiting[before] + part if before in waiting else part
        shaped = {x: sums.reshape(self.captures[x].shape) for x, sums in of_captures.items()}
        return of_score, shaped


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of this shape has been broadcast to x."""
    extra = x.ndim - len(shape)
    axes = [*range(extra)]
    axes += [i + extra for i, size in enumerate(shape) if size == 1 and x.shape[i + extra] != 1]
    return x.sum(axis=tuple(axes), keepdims=True).reshape(shape) if axes else x


def _truncated(xp: Any, a: Array, b: Array) -> Array:
    """a / b of integers as C++ divides, towards zero."""
    quotient = abs(a) // xp.where(b == 0, 1, abs(b))
    return xp.sign(a) * xp.sign(b) * quotient


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _divide(xp: Any, a: Array, b: Array) -> Array:
    return a / b if a.dtype.kind == "f" else _truncated(xp, a, b)


OPERATORS: dict[str, Callable[..., Array]] = {
    "+": lambda xp, a, b: a + b,
    "-": lambda xp, a, b: a - b,
    "*": lambda xp, a, b: a * b,
    "/": _divide,
    "%": lambda xp, a, b: a - b * _truncated(xp, a, b),
    "neg": lambda xp, a: -a,
    "!": lambda xp, a: a == 0,
    "~": lambda xp, a: ~a,
    "&&": lambda xp, a, b: (a != 0) & (b != 0),
    "||": lambda xp, a, b: (a != 0) | (b != 0),
    "&": lambda xp, a, b: a & b,
    "|": lambda xp, a, b: a | b,
    "^": lambda xp, a, b: a ^ b,
    "<<": lambda xp, a, b: a << b,
    ">>": lambda xp, a, b: a >> b,
    "==": lambda xp, a, b: a == b,
    "!=": lambda xp, a, b: a != b,
    "<": lambda xp, a, b: a < b,
    "<=": lambda xp, a, b: a <= b,
    ">": lambda xp, a, b: a > b,
    ">=": lambda xp, a, b: a >= b,
}
