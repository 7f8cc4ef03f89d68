"""Noise schedules and timestep embeddings of diffusion models, in NumPy."""

import math
from collections.abc import Sequence

import numpy

from ..checks import is_integer


def beta_schedule(
    kind: str, num_steps: int, *, beta_start: float = 1e-4, beta_end: float = 0.02
) -> numpy.ndarray:
    """Noise variances of the training steps, float64 (num_steps,).

    Args:
        kind: "linear" from beta_start to beta_end (DDPM, arXiv:2006.11239); "scaled_linear", linear
            in the square root (arXiv:2112.10752); "cosine" (arXiv:2102.09672), which ignores both.
        num_steps: at least 1.

    Raises:
        ValueError: an unknown kind, or no steps.
    """
    function = "beta_schedule"
    if not is_integer(num_steps) or num_steps < 1:
        raise ValueError(f"{function}: num_steps must be an integer of at least 1, got {num_steps}")
    if kind == "linear":
        return numpy.linspace(beta_start, beta_end, num_steps)
    if kind == "scaled_linear":
        return numpy.linspace(beta_start**0.5, beta_end**0.5, num_steps) ** 2
    if kind == "cosine":
        time = numpy.arange(num_steps + 1) / num_steps
        alpha = numpy.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
        return numpy.minimum(1 - alpha[1:] / alpha[:-1], 0.999)
    allowed = "'linear', 'scaled_linear' or 'cosine'"
    raise ValueError(f"{function}: kind must be {allowed}, got {kind!r}")


def timestep_embeddings(
    timesteps: Sequence[int],
    dim: int,
    *,
    max_period: float = 10000.0,
    freq_shift: float = 1.0,
    cos_first: bool = False,
) -> numpy.ndarray:
    """Sinusoidal embeddings, float32 (len(timesteps), dim).

    Column i < dim / 2 is sin(t * max_period ** (-i / (dim / 2 - freq_shift))), the other half the
    cosines of the same; the defaults are those of DDPM and of diffusion policies.

    Args:
        dim: even, and more than 2 * freq_shift.
        cos_first: the cosines before the sines.

    Raises:
        ValueError: dim.
    """
    half = dim // 2 if is_integer(dim) else 0
    if not is_integer(dim) or dim % 2 or half <= freq_shift:
        fact = f"dim must be an even number above {2 * freq_shift:g}"
        raise ValueError(f"timestep_embeddings: {fact}, got {dim}")
    frequencies = numpy.exp(-math.log(max_period) * numpy.arange(half) / (half - freq_shift))
    angles = numpy.asarray(timesteps, "float64")[:, None] * frequencies
    parts = [numpy.sin(angles), numpy.cos(angles)]
    return numpy.concatenate(parts[::-1] if cos_first else parts, -1).astype("float32")
