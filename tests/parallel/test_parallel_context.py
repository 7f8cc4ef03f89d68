"""torch's scaled_dot_product_attention in `parallel.context`, by both of its names.

The processes are those of ranks.py.
"""

import contexts
import pytest

ROUNDING = 1e-5  # of float32 results of size one, between two orders of sums


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_a_batch(is_causal, two):
    for batch, move in ((1, "keys"), (3, "heads"), (3, "keys")):
        for errors, same in two.run(contexts.rows, batch, is_causal, move):
            assert max(errors) < ROUNDING and same


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mask", "attn_mask must be None"),
        ("tokens", "key must be (batch, heads, tokens of this rank"),
        ("dropout", "dropout_p where keys travel must be 0"),
        ("heads", "must have the same heads without enable_gqa"),
    ],
)
def test_what_is_refused(name, text, two):
    for found in two.run(contexts.refused, name):
        assert text in found
