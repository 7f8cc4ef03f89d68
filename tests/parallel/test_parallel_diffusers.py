"""A diffusion transformer on several processes has the output and the gradients of one.

The processes are those of ranks.py.
"""

import pytest
import torch

pytest.importorskip("diffusers", "0.36")
import diffusing


def test_a_step(two):
    """ring_degree moves keys, ulysses_degree heads."""
    loss, out, gradients = diffusing.step()
    for degrees in ((2, 1), (1, 2)):
        for found, of_all, others in two.run(diffusing.step, *degrees):
            torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
            torch.testing.assert_close(of_all, out, rtol=0, atol=1e-5)
            assert others.keys() == gradients.keys()
            for weight, right in gradients.items():
                # Sums over tokens in another order, through two blocks.
                atol = 1e-4 * right.abs().max().item()
                torch.testing.assert_close(others[weight], right, rtol=0, atol=atol, msg=weight)


def test_both_degrees(four):
    """A mesh of keys and heads from that of diffusers; the model is left out, as it takes long."""
    for error in four.run(diffusing.both_degrees):
        assert error < 1e-5


def test_a_mode_that_is_refused(two):
    for text in two.run(diffusing.refused):
        assert "ulysses_anything is not built over several ranks" in text
