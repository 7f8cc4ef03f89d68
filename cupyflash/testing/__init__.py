"""Seeded inputs and the tolerance rule, which tests/ and bench/ share."""

from .attention import expected
from .inputs import (
    STORAGES,
    Inputs,
    cast,
    make_alibi_slopes,
    make_inputs,
    make_varlen_inputs,
    to_library,
)
from .norms import expected_group_norm, expected_norm
from .operations import expected_projection, expected_stack
from .same_precision import same_precision_attention
from .tolerance import (
    EPSILON,
    Comparison,
    Expected,
    Result,
    assert_close_to_float64,
    compare_with_float64,
    dtype_name,
    numpy_dtype,
    poison_free_memory,
    to_float64,
    to_numpy64,
)

__all__ = [
    "EPSILON",
    "STORAGES",
    "Comparison",
    "Expected",
    "Inputs",
    "Result",
    "assert_close_to_float64",
    "cast",
    "compare_with_float64",
    "dtype_name",
    "expected",
    "expected_group_norm",
    "expected_norm",
    "expected_projection",
    "expected_stack",
    "make_alibi_slopes",
    "make_inputs",
    "make_varlen_inputs",
    "numpy_dtype",
    "poison_free_memory",
    "same_precision_attention",
    "to_float64",
    "to_library",
    "to_numpy64",
]
