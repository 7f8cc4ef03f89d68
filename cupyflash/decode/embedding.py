"""Rows of the tables of tokens and positions: where a language model begins."""

from typing import Any

from ..runtime.array import Array, View
from ..runtime.operation import Operation, Plans
from ..runtime.specs import Spec, views_of
from . import reference
from .plan import EmbeddingPlan

FUNCTION = "embedding"

_plans = Plans(wide=2, plain=True)


def embedding(
    tokens: Array,
    token_weight: Array,
    positions: Array | None = None,
    position_weight: Array | None = None,
) -> Array:
    """token_weight[tokens] + position_weight[positions] in one launch, rounded once; no gradients.

    Arrays are NumPy or CuPy arrays or torch tensors.

    Args:
        tokens: int32, any shape, contiguous. What lies on a GPU is not checked, as that would wait
            for it: a row that does not exist becomes NaN.
        token_weight: (vocabulary, columns), float16, bfloat16 or float32, contiguous.
        positions: like tokens; None, with position_weight None, gathers rows of token_weight only.
        position_weight: (context, columns), dtype of token_weight, contiguous.

    Returns:
        A new array (*tokens.shape, columns).

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices; on the CPU a token or position that does not exist.
        NotImplementedError: inputs that require a gradient.
    """
    return EMBEDDING(FUNCTION, (token_weight, position_weight, tokens, positions), ())[0]


def run(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array]:
    """The tables, then the indices into them."""
    if library.on_cpu(arrays[0]):
        _check(library, *arrays)
        return (reference.embedding(library, *arrays),)
    plan, pointers = _plans.find(
        library,
        arrays,
        None,
        lambda: _check(library, *arrays),
        lambda views, aligned: EmbeddingPlan(library, views, aligned),
    )
    return (plan(arrays[0], pointers),)


EMBEDDING = Operation(run, native="token_weight")


def _check(
    library: Any,
    token_weight: Array,
    position_weight: Array | None,
    tokens: Array,
    positions: Array | None,
) -> dict[str, View]:
    if (positions is None) != (position_weight is None):
        raise ValueError("embedding: takes positions with position_weight, got one of them")
    indices = Spec(tuple(getattr(tokens, "shape", ())), "int32")
    specs = {
        "token_weight": Spec(("vocabulary", "columns")),
        "position_weight": Spec(("context", "columns"), optional=True),
        "tokens": indices,
        "positions": indices._replace(optional=True),
    }
    arrays = (token_weight, position_weight, tokens, positions)
    return views_of(FUNCTION, library, specs, arrays, plain=True)
