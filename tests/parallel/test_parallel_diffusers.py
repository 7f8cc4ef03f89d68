"""A diffusion transformer on several processes has the output and the gradients of one."""

import pytest
import torch

pytest.importorskip("diffusers", "0.36")
import diffusing


def test_a_step(two, four):
    """ring_degree moves keys, ulysses_degree heads, and both together do both."""
    loss, out, gradients = diffusing.step()
    for ranks, degrees in ((two, (2, 1)), (two, (1, 2)), (four, (2, 2))):
        for found, of_all, others in ranks.run(diffusing.step, *degrees):
            torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
            torch.testing.assert_close(of_all, out, rtol=0, atol=1e-5)
            assert others.keys() == gradients.keys()
            for weight, right in gradients.items():
                # Sums over tokens in another order, through two blocks.
                atol = 1e-4 * right.abs().max().item()
                torch.testing.assert_close(others[weight], right, rtol=0, atol=atol, msg=weight)


def test_a_mode_that_is_refused(two):
    for text in two.run(diffusing.refused):
        assert "ulysses_anything is not built over several ranks" in text
