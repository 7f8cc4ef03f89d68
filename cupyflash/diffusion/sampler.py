"""Sampling from diffusion models: schedules and embeddings on the GPU, one kernel for a step."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy

from ..array import Array, compiling, library_of
from ..checks import is_integer, known_library
from . import dispatch
from .schedule import timestep_embeddings


class DiffusionSampler:
    """The steps of a sampler, from the most noise to none, for models that predict the noise.

    Step i = 0, 1, … belongs to the training step ``timesteps[i]``::

        embeddings = sampler.embeddings(128, like=x)
        for i in range(sampler.num_steps):
            x = sampler.step(x, model(x, embeddings[i]), i, seed=7, clip=1.0)

    Made by `ddpm` or `ddim`. Tables are copied to a device at their first use there and stay; call
    `step` and `embeddings` once before a CUDA graph is captured.

    Attributes:
        timesteps: training steps, descending.
        coefficients: float32 (num_steps, 6), see ``DiffusionCoefficients`` in diffusion_params.cuh.
    """

    def __init__(self, timesteps: Sequence[int], coefficients: numpy.ndarray) -> None:
        self.timesteps = tuple(int(t) for t in timesteps)
        self.coefficients = numpy.ascontiguousarray(coefficients, "float32")
        self._tables: dict[Any, Array] = {}
        self._noisy = (self.coefficients[:, -1] != 0).tolist()

    @classmethod
    def ddpm(
        cls, betas: Sequence[float], num_steps: int | None = None, *, variance: str = "small"
    ) -> "DiffusionSampler":
        """The ancestral sampler of arXiv:2006.11239, equations 7 and 11.

        Args:
            betas: of all training steps (`beta_schedule`), each above 0 and below 1.
            num_steps: how many of them are taken, evenly spaced from 0; default all.
            variance: of the noise, "small" (that of the posterior) or "large" (beta).

        Raises:
            ValueError: betas, num_steps, variance.
        """
        if variance not in ("small", "large"):
            raise ValueError(f"ddpm: variance must be 'small' or 'large', got {variance!r}")
        timesteps, now, before = _levels("ddpm", betas, num_steps)
        beta = 1 - now / before
        posterior = (1 - before) / (1 - now) * beta
        sigma = numpy.sqrt(posterior if variance == "small" else beta)
        sigma[-1] = 0  # the last step adds no noise
        return cls(
            timesteps,
            _table(
                now,
                x0_to_x=numpy.sqrt(before) * beta / (1 - now),
                x_to_x=numpy.sqrt(now / before) * (1 - before) / (1 - now),
                model_to_x=numpy.zeros_like(now),
                sigma=sigma,
            ),
        )

    @classmethod
    def ddim(
        cls, betas: Sequence[float], num_steps: int | None = None, *, eta: float = 0.0
    ) -> "DiffusionSampler":
        """The sampler of arXiv:2010.02502, equations 12 and 16.

        Args:
            betas: as in `ddpm`.
            num_steps: as in `ddpm`.
            eta: 0 is deterministic, 1 has the noise of DDPM.

        Raises:
            ValueError: betas, num_steps, eta.
        """
        if not (hasattr(eta, "__float__") and 0 <= eta <= 1):
            raise ValueError(f"ddim: eta must be between 0 and 1, got {eta!r}")
        timesteps, now, before = _levels("ddim", betas, num_steps)
        sigma = eta * numpy.sqrt((1 - before) / (1 - now) * (1 - now / before))
        return cls(
            timesteps,
            _table(
                now,
                x0_to_x=numpy.sqrt(before),
                x_to_x=numpy.zeros_like(now),
                model_to_x=numpy.sqrt(1 - before - sigma**2),
                sigma=sigma,
            ),
        )

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.timesteps)

    def step(
        self,
        x: Array,
        predicted: Array,
        step: int | Array,
        *,
        noise: Array | None = None,
        seed: int | None = None,
        clip: float | None = None,
    ) -> Array:
        """x one step less noisy, in one launch; no gradients. torch.compile breaks its graph here.

        Args:
            x: (batch, ...), float16, bfloat16 or float32, dense in memory, the batch outermost.
            predicted: noise predicted for x, with its shape and strides and its dtype; for float32
                x any of the three dtypes.
            step: index of the step, or an int32 or int64 array of them, (), (1,) or (batch,), one
                for each sample. What an array on a GPU holds is not checked, as that would wait for
                it: an index outside of the table gives NaN.
            noise: like x, standard normal, for steps that add noise.
            seed: draw the noise inside the kernel instead, from 0 to 2^64 - 1. It depends on the
                seed, the step and the place in x only: each call of a sampling loop may have the
                same seed, each loop needs its own.
            clip: keep the predicted sample between -clip and clip.

        Returns:
            A new array like x.

        Raises:
            TypeError: dtypes, libraries.
            ValueError: shapes, strides, devices, a step without noise, options.
            NotImplementedError: a gradient would be recorded.
        """
        number = None  # arrays of one number can be indices, too: they stay on their device
        if type(step) is int or (library_of(step) is None and is_integer(step)):
            step, number = None, operator.index(step)
        arrays, options = (x, predicted, noise, step), (number, seed, clip)
        if compiling():
            from ..torch_eager import eagerly

            return eagerly(dispatch.step, self, *arrays, *options)
        if library_of(x) is None:
            known = lambda *xs: (dispatch.step(self, *xs, *options),)  # noqa: E731
            return known_library(dispatch.FUNCTION, known, *arrays)[0]
        return dispatch.step(self, *arrays, *options)

    def embeddings(self, dim: int, *, like: Array, **options: Any) -> Array:
        """`timestep_embeddings` of the steps, float32 (num_steps, dim), on the device of ``like``.

        Computed at the first call and kept; row i belongs to step i.

        Raises:
            TypeError: ``like`` is no NumPy, CuPy or torch array.
            ValueError: dim.
        """
        if library_of(like) is None:
            fact = "like must be a NumPy, CuPy or torch array"
            got = type(like).__name__
            raise TypeError(f"DiffusionSampler.embeddings: {fact}, got {got}")
        key = (dim, *sorted(options.items()))
        return self.table(key, like, lambda: timestep_embeddings(self.timesteps, dim, **options))

    def adds_noise(self, step: int | None) -> bool:
        """Whether a step, or with None any of them, adds noise."""
        return any(self._noisy) if step is None else self._noisy[step]

    def table(self, key: Any, like: Array, make: Any) -> Array:
        """What ``make`` returns, on the device of ``like``; made and copied at the first use."""
        library = library_of(like)
        place = (key, library, library.device(like))
        table = self._tables.get(place)
        if table is None:
            table = self._tables[place] = library.put(make(), like)
        return table


def _levels(
    function: str, betas: Sequence[float], num_steps: int | None
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Timesteps, descending, and the products of 1 - beta up to them and up to the next one."""
    betas = numpy.asarray(betas, "float64")
    if betas.ndim != 1 or not betas.size or not ((betas > 0) & (betas < 1)).all():
        fact = "betas must be a sequence of numbers above 0 and below 1"
        raise ValueError(f"{function}: {fact}, got {betas}")
    num_steps = betas.size if num_steps is None else num_steps
    if not is_integer(num_steps) or not 1 <= num_steps <= betas.size:
        fact = f"num_steps must be an integer from 1 to {betas.size}"
        raise ValueError(f"{function}: {fact}, got {num_steps}")
    timesteps = (numpy.arange(num_steps) * (betas.size // num_steps))[::-1]
    products = numpy.cumprod(1 - betas)
    now = products[timesteps]
    return timesteps, now, numpy.append(now[1:], 1.0)


def _table(
    now: numpy.ndarray,
    x0_to_x: numpy.ndarray,
    x_to_x: numpy.ndarray,
    model_to_x: numpy.ndarray,
    sigma: numpy.ndarray,
) -> numpy.ndarray:
    """Coefficients (num_steps, 6) of a model that predicts noise."""
    to_x0 = 1 / numpy.sqrt(now), -numpy.sqrt(1 / now - 1)
    return numpy.stack([*to_x0, x0_to_x, x_to_x, model_to_x, sigma], -1)
