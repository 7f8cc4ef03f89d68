"""Checks of tensors without memory: those of operators whose kernels never see them."""

from torch import Tensor


def require_one_device(function: str, first: Tensor, *others: Tensor | None) -> None:
    """All tensors on the device of the first: meta tensors and real ones do not mix.

    Raises:
        ValueError: they are not.
    """
    for x in others:
        if x is not None and x.device != first.device:
            fact = "all tensors must be on the same device"
            raise ValueError(f"{function}: {fact}, got {first.device} and {x.device}")
