"""Models of transformers train on two processes with the loss and the gradients of one.

The processes are those of ranks.py.
"""

import pytest
import torch

pytest.importorskip("transformers", "5.4")
import training


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_a_training_step(name, two):
    """Windows of every second layer, softcap and sinks, packed sequences."""
    loss, gradients = training.alone(name)
    for checkpoint in (False, True):
        for found, others in two.run(training.divided, name, checkpoint):
            torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
            assert others.keys() == gradients.keys()
            for weight, right in gradients.items():
                # Sums over tokens in another order, through two layers.
                atol = 1e-4 * right.abs().max().item()
                torch.testing.assert_close(others[weight], right, rtol=0, atol=atol, msg=weight)


def test_a_checkpoint_outside_of_the_context(two):
    for text in two.run(training.outside_of_the_context, "llama"):
        assert "call backward in the block, too" in text


def test_padding_is_refused(two):
    for text in two.run(training.refused, "llama"):
        assert "of packed sequences are not built" in text
