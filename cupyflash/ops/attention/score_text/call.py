"""A text with the arrays of one call, as the reference computes it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ....runtime.array import Array, array_namespace
from ....runtime.philox import FirstWeight
from .capture import FIRST_HEAD, HEADS, KEY, PIECES, QUERY, SEQUENCE
from .text import Text


class TextCall(NamedTuple):
    """A text, and what it reads.

    Attributes:
        captures: arrays and numbers in the order of those of the text.
        first_batch: the number of the first sequence of the arrays.
        gradients: of the captures that learn, in float64, by their names: `slope` adds to them.
    """

    text: Text
    captures: tuple[Any, ...]
    first_batch: int = 0
    gradients: dict[str, Array] | None = None

    @property
    def learned(self) -> list[str]:
        return [x.name for x in self.text.captures if x.learns]

    def with_gradients(self) -> "TextCall":
        """This call with zeros for the gradients of the captures, to which `slope` adds."""
        named = zip(self.text.captures, self.captures)
        zeros = {
            capture.name: array_namespace(x).zeros(x.shape, "float64")
            for capture, x in named
            if capture.learns
        }
        return self._replace(gradients=zeros)

    @property
    def first_weight(self) -> FirstWeight | None:
        """The first weight of one sequence, for dropout; None: that of the call."""
        if not self.text.drops:
            return None
        named = self._named()
        sequence = int(named[PIECES.name][SEQUENCE, self.first_batch])
        row, col = (int(named[PIECES.name][x, self.first_batch]) for x in (QUERY, KEY))
        return FirstWeight(sequence * named[HEADS.name] + named[FIRST_HEAD.name], row, col)

    def score(
        self, scores: Array, row: int, col: int
    ) -> tuple[Array, Callable[[Array], Array] | None]:
        """The scores by the text, and the function that takes their gradient back through it.

        Args:
            scores: (batch, heads_kv, group, m, n), ``scale * q . k`` of the queries from ``row``
                and the keys from ``col`` on.
        """
        tree = self.text.score_tree
        if tree is None:
            return scores, None
        from .evaluate import Evaluation

        variables = self._variables(scores, row, col) | {"score": scores}
        found = Evaluation(tree, variables, self._named(), self.learned)

        def slope(gradient: Array) -> Array:
            of_scores, of_captures = found.pull(gradient)
            for name, x in of_captures.items():
                if self.gradients is not None:
                    self.gradients[name] += x
            return of_scores

        # A copy, as the caller writes into it and the derivatives read what was found.
        return array_namespace(scores).broadcast_to(found.value, scores.shape).copy(), slope

    def mask(self, scores: Array, row: int, col: int) -> Array:
        """The scores, -inf where the query does not see the key."""
        tree = self.text.mask_tree
        if tree is None:
            return scores
        from .evaluate import Evaluation

        variables = self._variables(scores, row, col)
        seen = Evaluation(tree, variables, self._named(), dtype=scores.dtype).value
        return array_namespace(scores).where(seen, scores, -float("inf"))

    def _named(self) -> dict[str, Any]:
        return {x.name: value for x, value in zip(self.text.captures, self.captures)}

    def _variables(self, scores: Array, row: int, col: int) -> dict[str, Array]:
        xp, (batch, heads, group, rows, cols) = array_namespace(scores), scores.shape
        return {
            "batch": xp.arange(batch).reshape(-1, 1, 1, 1, 1) + self.first_batch,
            "head": xp.arange(heads * group).reshape(1, heads, group, 1, 1),
            "query": (xp.arange(rows) + row).reshape(-1, 1),
            "key": xp.arange(cols) + col,
        }
