"""Noise schedules and timestep embeddings of diffusion models, in NumPy."""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy

MAX_STEPS = 2**24  # training steps
MAX_DIM = 2**24  # of an embedding
KINDS = ("linear", "scaled_linear", "cosine")


def beta_schedule(
    kind: str,
    num_steps: int,
    *,
    beta_start: float = 1e-4,
    beta_end: float = 0.02,
) -> numpy.ndarray:
    """Noise variances of the training steps, float64 (num_steps,).

    Args:
        kind: "linear" from beta_start to beta_end (DDPM, arXiv:2006.11239); "scaled_linear", linear
            in the square root (arXiv:2112.10752); "cosine" (arXiv:2102.09672, "squaredcos_cap_v2"
            of diffusers), which ignores both.
        num_steps: at least 1.
        beta_start, beta_end: above 0 and below 1.

    Raises:
        ValueError: an unknown kind, no steps, betas.
    """
    function = "beta_schedule"
    require_choice(function, "kind", kind, KINDS)
    num_steps = require_integer(function, "num_steps", num_steps, 1, MAX_STEPS)
    ends = [("beta_start", beta_start), ("beta_end", beta_end)]
    beta_start, beta_end = (require_real(function, name, x, 1) for name, x in ends)
    if kind == "linear":
        return numpy.linspace(beta_start, beta_end, num_steps)
    if kind == "scaled_linear":
        return numpy.linspace(beta_start**0.5, beta_end**0.5, num_steps) ** 2
    time = numpy.arange(num_steps + 1) / num_steps
    alpha = numpy.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    return numpy.minimum(1 - alpha[1:] / alpha[:-1], 0.999)


def rescale_zero_snr(betas: numpy.ndarray) -> numpy.ndarray:
    """Betas after which nothing of the sample is left, the last being 1; the first stays.

    Source: Lin et al., arXiv:2305.08891, algorithm 1.
    """
    signal = numpy.sqrt(numpy.cumprod(1 - betas))
    first, last = signal[0], signal[-1]
    products = ((signal - last) * (first / (first - last) if first > last else 0.0)) ** 2
    before = numpy.concatenate([numpy.ones(1), products[:-1]])
    return 1 - products / before


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
        timesteps: finite numbers.
        dim: even, and more than 2 * freq_shift.
        max_period: above 0.
        freq_shift: at least 0.
        cos_first: the cosines before the sines.

    Raises:
        TypeError: timesteps.
        ValueError: the others.
    """
    function = "timestep_embeddings"
    timesteps = numbers_of(function, "timesteps", timesteps)
    max_period = require_real(function, "max_period", max_period, math.inf)
    freq_shift = require_real(function, "freq_shift", freq_shift, math.inf, zero=True)
    require_choice(function, "cos_first", cos_first, (False, True))
    whole = isinstance(dim, numbers.Integral) and not isinstance(dim, bool) and dim <= MAX_DIM
    half = int(dim) // 2 if whole else 0
    if not whole or dim % 2 or half <= freq_shift:
        fact = f"dim must be an even number above {2 * freq_shift:g}, at most {MAX_DIM}"
        raise ValueError(f"{function}: {fact}, got {dim!r}")
    frequencies = numpy.exp(-math.log(max_period) * numpy.arange(half) / (half - freq_shift))
    angles = timesteps[:, None] * frequencies
    parts = [numpy.sin(angles), numpy.cos(angles)]
    return numpy.concatenate(parts[::-1] if cos_first else parts, -1).astype("float32")


def require_choice(function: str, name: str, value: Any, allowed: tuple) -> None:
    """One of the allowed values, and of their type."""
    if not any(type(value) is type(x) and value == x for x in allowed):
        *first, last = map(repr, allowed)
        fact = f"{name} must be {', '.join(first)} or {last}"
        raise ValueError(f"{function}: {fact}, got {value!r}")


def require_integer(function: str, name: str, value: Any, least: int, most: int) -> int:
    """An integer in this range, as a plain one."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        fact = f"{name} must be an integer from {least} to {most}"
        raise ValueError(f"{function}: {fact}, got {value!r}")
    return operator.index(value)


def require_real(
    function: str, name: str, value: Any, limit: float, *, zero: bool = False
) -> float:
    """A number above 0 (or 0, if ``zero`` is allowed) and below the limit, as a plain one."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not (0 < value < limit or (zero and value == 0)):
        least = "at least 0" if zero else "above 0"
        most = "finite" if limit == math.inf else f"below {limit}"
        raise ValueError(f"{function}: {name} must be {least} and {most}, got {value!r}")
    return float(value)


def numbers_of(function: str, name: str, values: Any) -> numpy.ndarray:
    """A sequence of finite numbers, float64.

    Raises:
        TypeError: no sequence of numbers.
        ValueError: not one axis, or a number that is not finite.
    """
    try:
        found = numpy.asarray(values)
        found = found.astype("float64") if found.dtype.kind in "iuf" else None
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None:
        got = f"{type(values).__name__} {values!r}"[:200]
        raise TypeError(f"{function}: {name} must be a sequence of numbers, got {got}")
    if found.ndim != 1 or not numpy.isfinite(found).all():
        got = found if found.ndim == 1 else f"shape {found.shape}"
        raise ValueError(f"{function}: {name} must be a sequence of finite numbers, got {got}")
    return found
