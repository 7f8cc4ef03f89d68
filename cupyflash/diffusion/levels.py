"""From options, named as those of diffusers, to the noise levels and coefficients of a sampler."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from .schedule import numbers_of, require_choice, require_integer, require_real, rescale_zero_snr

MAX_OFFSET = 2**31
PREDICTIONS = ("epsilon", "v_prediction", "sample")
SPACINGS = ("leading", "trailing", "linspace")


@dataclasses.dataclass(frozen=True)
class Options:
    """What samplers of all kinds have; see `DiffusionSampler`."""

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


class Levels(NamedTuple):
    """The steps of a sampler, from the most noise to none.

    Attributes:
        timesteps: training steps.
        products: of 1 - beta, up to each training step.
        now: the products of the timesteps.
    """

    timesteps: numpy.ndarray
    products: numpy.ndarray
    now: numpy.ndarray

    def before_by_order(self) -> numpy.ndarray:
        """The product that each step leads to: that of the next timestep, 1 at the end (DDPM)."""
        return numpy.append(self.now[1:], 1.0)

    def before_by_distance(self, last: float) -> numpy.ndarray:
        """The same with the timestep at equal distance, ``last`` below the first one (DDIM)."""
        earlier = self.timesteps - len(self.products) // len(self.timesteps)
        return numpy.where(earlier < 0, last, self.products[numpy.maximum(earlier, 0)])


def levels(
    function: str, betas: Sequence[float], num_steps: int | None, options: Options
) -> Levels:
    """The levels of a call.

    Raises:
        ValueError: betas, num_steps; timesteps beyond the training steps; noise predicted where
            nothing but noise is left.
    """
    betas = numbers_of(function, "betas", betas)
    if not betas.size or not ((betas > 0) & (betas <= 1)).all():
        fact = "betas must be a sequence of numbers above 0 and below 1"
        raise ValueError(f"{function}: {fact}, got {betas}")
    if num_steps is None:
        num_steps = betas.size
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
    return Levels(timesteps, products, now)


def _timesteps(training_steps: int, num_steps: int, options: Options) -> numpy.ndarray:
    """int64, descending."""
    if options.timestep_spacing == "leading":
        steps = numpy.arange(num_steps)[::-1] * (training_steps // num_steps)
        return steps + int(options.steps_offset)
    if options.timestep_spacing == "trailing":
        steps = numpy.arange(training_steps, 0, -training_steps / num_steps)[:num_steps] - 1
    else:
        steps = numpy.linspace(0, training_steps - 1, num_steps)[::-1]
    return numpy.round(steps).astype("int64")


class Prediction(NamedTuple):
    """What a prediction says of sample and noise, each from x and from what the model returned."""

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
