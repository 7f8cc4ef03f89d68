"""Rows of the tables of tokens and positions: where a language model begins."""

import math
from typing import Any

import numpy

from ..runtime.array import Array, View, library_of
from ..runtime.checks import require_arrays, require_grid, require_int32, views_of
from ..runtime.launch import Launch
from ..runtime.operation import Plan, Plans
from ..runtime.rows import is_contiguous
from ..runtime.structs import header
from . import kernels

structs = header("decode/params.cuh")

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
    library = library_of(token_weight)
    if library is None:
        got = type(token_weight).__name__
        raise TypeError(f"embedding: token_weight must be a NumPy, CuPy or torch array, got {got}")
    arrays = (tokens, token_weight, positions, position_weight)
    if library.on_cpu(token_weight):
        _check(library, *arrays)
        return _on_cpu(library, *arrays)
    plan, pointers = _plans.find(
        library,
        (token_weight, position_weight, tokens, positions),
        None,
        lambda: _check(library, *arrays),
        lambda views, aligned: EmbeddingPlan(library, tuple(tokens.shape), views, aligned),
    )
    return plan(token_weight, pointers)


class EmbeddingPlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, library: Any, tokens: tuple[int, ...], views: dict[str, View], aligned: bool
    ) -> None:
        weight = views["token_weight"]
        super().__init__(weight.device)
        vocabulary, columns = weight.shape
        self.library, self.shape = library, (*tokens, columns)
        self.strides = library.strides_of_empty(
            self.shape, View(self.shape, (0,) * len(self.shape), weight.dtype, weight.device)
        )
        rows = math.prod(tokens)
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
        grid = require_grid("embedding", config.grid(rows * columns), self.shape)
        self.launch = Launch(config, weight.device, grid, params)

    def run(self, token_weight: Array, pointers: list[int]) -> Array:
        """``pointers`` of tokens, token_weight, positions, position_weight."""
        out = self.library.empty(self.shape, self.strides, token_weight)
        if not self.empty:
            tokens_weight, positions_weight, tokens, positions = pointers
            stream = self.library.stream(self.device_id)
            values = (tokens, positions, tokens_weight, positions_weight, self.library.pointer(out))
            self.launch(stream, *values)
        return out


def _check(
    library: Any, tokens: Array, token_weight: Array, positions: Array | None,
    position_weight: Array | None,
) -> dict[str, View]:  # fmt: skip
    if (positions is None) != (position_weight is None):
        raise ValueError("embedding: takes positions with position_weight, got one of them")
    given = {"token_weight": token_weight, "tokens": tokens}
    if positions is not None:
        given |= {"positions": positions, "position_weight": position_weight}
    require_arrays("embedding", library, given)
    weights = {"token_weight": token_weight, "position_weight": position_weight}
    views = views_of("embedding", library, weights)
    first = views["token_weight"]
    for name, view in views.items():
        if len(view.shape) != 2 or view.shape[1:] != first.shape[1:] or not is_contiguous(view):
            fact = f"{name} must be contiguous, (rows, columns) with the columns of token_weight"
            raise ValueError(f"embedding: {fact}, got {view.shape}, strides {view.strides}")
        if view.dtype != first.dtype:
            fact = f"{name} must have the dtype of token_weight"
            raise TypeError(f"embedding: {fact}, got {view.dtype} and {first.dtype}")
    shape = tuple(getattr(tokens, "shape", ()))
    require_int32("embedding", library, "tokens", tokens, shape, first.device)
    if positions is not None:
        require_int32("embedding", library, "positions", positions, shape, first.device)
    return views


def _on_cpu(
    library: Any, tokens: Array, token_weight: Array, positions: Array | None,
    position_weight: Array | None,
) -> Array:  # fmt: skip
    out = None
    for name, indices, weight in (
        ("tokens", tokens, token_weight),
        ("positions", positions, position_weight),
    ):
        if indices is None:
            continue
        indices, table = library.to_numpy(indices), library.to_numpy(weight)
        if indices.size and not (indices.min() >= 0 and indices.max() < len(table)):
            fact = f"{name} must be from 0 to {len(table) - 1}"
            raise ValueError(f"embedding: {fact}, got {indices.min()} to {indices.max()}")
        rows = table[indices]
        out = rows if out is None else out.astype("float32") + rows.astype("float32")
    return library.from_numpy(
        numpy.asarray(out, library.to_numpy(token_weight).dtype), token_weight
    )
