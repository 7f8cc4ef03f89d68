"""Noise schedules, the noise levels of a sampler, and timestep embeddings, in NumPy."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy

MAX_STEPS = 2**24  # training steps
MAX_DIM = 2**24  # columns of an embedding
KINDS = ("linear", "scaled_linear", "cosine")
MAX_OFFSET = 2**31
PREDICTIONS = ("epsilon", "v_prediction", "sample")
SPACINGS = ("leading", "trailing", "linspace")


def beta_schedule(
    kind: Literal["linear", "scaled_linear", "cosine"],
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


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that every kind of sampler has; see `DiffusionSampler`."""

    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0
    rescale_betas_zero_snr: bool = False
    thresholding: bool = False
    dynamic_thresholding_ratio: float = 0.995
    sample_max_value: float = 1.0

    @classmethod
    def checked(cls, function: str, given: dict[str, Any]) -> "Options":
        """The options of a call.

        Raises:
            TypeError: an unknown one.
            ValueError: values.
        """
        allowed = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in allowed:
                fact = f"options must be among {', '.join(allowed)}"
                raise TypeError(f"{function}: {fact}, got {name}")
        options = cls(**given)
        require_choice(function, "prediction_type", options.prediction_type, PREDICTIONS)
        require_choice(function, "timestep_spacing", options.timestep_spacing, SPACINGS)
        for name in ("rescale_betas_zero_snr", "thresholding"):
            require_choice(function, name, getattr(options, name), (False, True))
        require_integer(function, "steps_offset", options.steps_offset, 0, MAX_OFFSET)
        require_real(function, "dynamic_thresholding_ratio", options.dynamic_thresholding_ratio, 1)
        require_real(function, "sample_max_value", options.sample_max_value, math.inf)
        if options.sample_max_value < 1:
            got = options.sample_max_value
            raise ValueError(f"{function}: sample_max_value must be at least 1, got {got!r}")
        return options

    @property
    def threshold(self) -> tuple[float, float] | None:
        """(quantile, largest threshold), or None."""
        if not self.thresholding:
            return None
        return float(self.dynamic_thresholding_ratio), float(self.sample_max_value)


class Prediction(NamedTuple):
    """Coefficients of the sample and of the noise, each in terms of x and of the model's output."""

    x_to_x0: numpy.ndarray
    model_to_x0: numpy.ndarray
    x_to_noise: numpy.ndarray
    model_to_noise: numpy.ndarray


def prediction(kind: str, now: numpy.ndarray) -> Prediction:
    """Coefficients at these levels, x being sqrt(now) x0 + sqrt(1 - now) noise."""
    none, one = numpy.zeros_like(now), numpy.ones_like(now)
    signal, noise = numpy.sqrt(now), numpy.sqrt(1 - now)
    if kind == "epsilon":
        return Prediction(1 / signal, -numpy.sqrt(1 / now - 1), none, one)
    if kind == "v_prediction":
        return Prediction(signal, -noise, noise, signal)
    return Prediction(none, one, 1 / noise, -signal / noise)


class Levels(NamedTuple):
    """The steps of a sampler, from the most noise to none.

    Attributes:
        timesteps: training steps.
        products: of 1 - beta, up to each training step.
        now: the products of the timesteps.
        model: what the model's output says at each of them.
        threshold: (quantile, largest threshold) of thresholding, or None.
    """

    timesteps: numpy.ndarray
    products: numpy.ndarray
    now: numpy.ndarray
    model: Prediction
    threshold: tuple[float, float] | None

    def before_by_order(self) -> numpy.ndarray:
        """The product that each step leads to: the next timestep's, 1 at the end (DDPM)."""
        return numpy.append(self.now[1:], 1.0)

    def before_by_distance(self, last: float) -> numpy.ndarray:
        """The product one equal step earlier, ``last`` before the first training step (DDIM)."""
        earlier = self.timesteps - len(self.products) // len(self.timesteps)
        return numpy.where(earlier < 0, last, self.products[numpy.maximum(earlier, 0)])


def levels(
    function: str,
    betas: Sequence[float] | numpy.ndarray,
    num_steps: int | None,
    given: dict[str, Any],
) -> Levels:
    """The levels of a call.

    Raises:
        TypeError: an option that does not exist.
        ValueError: options, betas, num_steps; timesteps beyond the training steps; noise predicted
            where nothing but noise is left.
    """
    options = Options.checked(function, given)
    betas = numbers_of(function, "betas", betas)
    if not betas.size or not ((betas > 0) & (betas <= 1)).all():
        fact = "betas must be a sequence of numbers above 0 and below 1"
        raise ValueError(f"{function}: {fact}, got {betas}")
    num_steps = betas.size if num_steps is None else num_steps
    num_steps = require_integer(function, "num_steps", num_steps, 1, betas.size)
    if options.rescale_betas_zero_snr:
        betas = rescale_zero_snr(betas)
    timesteps = _timesteps(betas.size, num_steps, options)
    if timesteps[0] >= betas.size:
        fact = f"timesteps must be at most {betas.size - 1}: steps_offset is too large"
        raise ValueError(f"{function}: {fact}, got {timesteps[0]}")
    products = numpy.cumprod(1 - betas)
    if not products[:-1].all():
        fact = "betas must leave some of the sample before the last training step"
        raise ValueError(f"{function}: {fact}, got {betas}")
    now = products[timesteps]
    if options.prediction_type == "epsilon" and not now.all():
        fact = "betas must be below 1 for a model that predicts the noise: the sample is lost"
        raise ValueError(f"{function}: {fact}, got 1 (prediction_type='epsilon')")
    model = prediction(options.prediction_type, now)
    return Levels(timesteps, products, now, model, options.threshold)


def _timesteps(training_steps: int, num_steps: int, options: Options) -> numpy.ndarray:
    """int64, descending."""
    if options.timestep_spacing == "leading":
        steps = numpy.arange(num_steps)[::-1] * (training_steps // num_steps)
        return steps + int(options.steps_offset)
    if options.timestep_spacing == "trailing":
        # Halves are rounded to even numbers before the 1 is taken off, as diffusers does.
        steps = numpy.arange(training_steps, 0, -training_steps / num_steps)[:num_steps]
        return numpy.round(steps).astype("int64") - 1
    steps = numpy.linspace(0, training_steps - 1, num_steps)[::-1]
    return numpy.round(steps).astype("int64")


def timestep_embeddings(
    timesteps: Sequence[float] | numpy.ndarray,
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
    return int(value)


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
