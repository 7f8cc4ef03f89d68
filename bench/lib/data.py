"""Random tensors of torch on the device that is measured."""

from typing import Any

from cupyflash.testing.problem import Problem

DEVICE = "cuda"


def generator(seed: int) -> Any:
    """Returns a generator of random numbers of torch on `DEVICE`."""
    import torch

    return torch.Generator(DEVICE).manual_seed(seed)


def random(shape: tuple[int, ...], dtype: str, source: Any) -> Any:
    """A torch tensor on `DEVICE`, standard normal, by a `generator` or a seed."""
    import torch

    source = generator(source) if isinstance(source, int) else source
    dtype = getattr(torch, dtype)
    return torch.randn(shape, dtype=dtype, device=DEVICE, generator=source)


def of_problem(problem: Problem) -> tuple[Any, Any, Any, Any]:
    """q, k, v, dout (batch, seqlen, heads, head_dim), standard normal."""
    source = generator(0)
    return tuple(random(shape, problem.dtype, source) for shape in problem.shapes)
