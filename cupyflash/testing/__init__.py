"""What tests/ and bench/ share: seeded inputs and the tolerance rule."""

from cupyflash.testing.inputs import (
    STORAGES,
    Inputs,
    cast,
    make_alibi_slopes,
    make_inputs,
    make_varlen_inputs,
    to_library,
)
from cupyflash.testing.linear import expected_projection
from cupyflash.testing.norms import (
    ExpectedNorm,
    expected_group_norm,
    expected_norm,
    numpy_dtype,
    to_numpy64,
)
from cupyflash.testing.same_precision import same_precision_attention
from cupyflash.testing.tolerance import (
    Expected,
    assert_close_to_float64,
    expected,
    poison_free_memory,
    to_float64,
)
from cupyflash.testing.transformer import ExpectedStack, expected_stack

__all__ = [
    "STORAGES",
    "Expected",
    "ExpectedNorm",
    "ExpectedStack",
    "Inputs",
    "assert_close_to_float64",
    "cast",
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
