"""torch's scaled_dot_product_attention in `parallel.context`, by both of its names, and blocks with
torch's signature.

The processes are those of ranks.py.
"""

import contexts
import pytest

from cupyflash.integrations import accelerate

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
        ("heads", "must have the same heads without enable_gqa"),
    ],
)
def test_what_is_refused(name, text, two):
    for found in two.run(contexts.refused, name):
        assert text in found


@pytest.mark.parametrize("move", ["heads", "keys"])
def test_dropout(move, two):
    assert max(two.run(contexts.dropped, move)) < ROUNDING


@pytest.mark.parametrize("lengths", [None, [29, 7, 40]], ids=str)
def test_buffers(lengths, two):
    for errors, same in two.run(contexts.buffers, lengths):
        assert max(errors) < ROUNDING and same


def test_groups_that_are_gone(two):
    """A mesh is equal to one of the same ranks whose groups have been destroyed."""
    for errors in two.run(contexts.groups_in_turn):
        assert max(errors) < ROUNDING


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "buffers must be at least one"),
        ("dims", "buffer_seq_dims as many, got 1 and 2"),
        ("tokens", "buffers must have the 3 tokens of all sequences, got [3, 8]"),
        ("lengths", "buffers must have the 9 tokens of all sequences, got [8]"),
        ("axis", "buffer_seq_dims must be axes of the buffers, got [0, 1]"),
        ("gradient", "buffers must not require a gradient"),
        ("no buffer", "no_restore_buffers must be among the buffers"),
    ],
)
def test_wrong_buffers(name, text, two):
    for found in two.run(contexts.wrong_buffers, name):
        assert found.startswith("parallel.context_parallel: ") and text in found


def test_accelerate(two):
    assert all(two.run(contexts.accelerated))
    accelerator = pytest.importorskip("accelerate").Accelerator
    prepare = accelerator._prepare_cp
    try:
        accelerate.register()
        assert accelerator._prepare_cp is accelerate.prepare
    finally:
        accelerator._prepare_cp = prepare
