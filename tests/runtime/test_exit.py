"""A process that has run a backward ends as it should; exit_stress.py compares many under load."""

import pytest
from exit_stress import end_of
from targets import compute_capability

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_ends(device):
    if device == "cuda" and not (torch.cuda.is_available() and compute_capability()[0]):
        pytest.skip(compute_capability()[1] or "torch sees no GPU")
    assert end_of("ours", device) == (0, "")
