"""Rows of the tables of tokens and positions: where a language model begins."""

import math
from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.launch import Launch
from ...runtime.operation import Operation, Plan, Plans, is_followed
from ...runtime.specs import Spec, views_of
from ...runtime.structs import header
from . import kernels, reference

structs = header("decode/params.cuh")

FUNCTION = "embedding"

_plans = Plans(wide=2)


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
    if is_followed(library, arrays):
        _check(library, *arrays)
    key, pointers = _plans.key(library, arrays, None)
    plan = _plans.get(key)
    if plan is None:
        views = _check(library, *arrays)
        plan = _plans.add(key, EmbeddingPlan(library, views, key[-1]))
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


class EmbeddingPlan(Plan):
    """The kernel for one signature."""

    def __init__(self, library: Any, views: Mapping[str, View], aligned: bool) -> None:
        weight, tokens = views["token_weight"], views["tokens"]
        super().__init__(weight.device)
        vocabulary, columns = weight.shape
        self.library, self.shape = library, (*tokens.shape, columns)
        self.strides = library.strides_of_empty(
            self.shape, View(self.shape, (0,) * len(self.shape), weight.dtype, weight.device)
        )
        rows = math.prod(tokens.shape)
        self.empty = rows * columns == 0
        if self.empty:
            return
        positions = views.get("position_weight")
        params = structs.EmbeddingParams(
            rows=rows,
            columns=columns,
            vocabulary=vocabulary,
            context=positions.shape[0] if positions else 0,
        )
        vector = kernels.vector(weight.dtype, aligned)
        config = kernels.Embedding(weight.dtype, vector if columns % vector == 0 else 1)
        grid = require_grid(FUNCTION, config.grid(rows * columns), self.shape)
        self.launch = Launch(config, weight.device, grid, params)

    def run(self, token_weight: Array, pointers: list[int]) -> Array:
        """``pointers`` of token_weight, position_weight, tokens, positions."""
        out = self.library.empty(self.shape, self.strides, token_weight)
        if not self.empty:
            tokens_weight, positions_weight, tokens, positions = pointers
            stream = self.library.stream(self.device_id)
            values = (tokens, positions, tokens_weight, positions_weight, self.library.pointer(out))
            self.launch.start(stream, self.launch.argument(*values))
        return out
