"""Sampling from diffusion models: schedules and embeddings on the GPU, one kernel for a step."""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy

from ...runtime.array import Array, ArrayT
from ...runtime.checks import is_integer
from ...runtime.lookup import library_of
from ...runtime.operation import Operation
from ...runtime.structs import header
from . import dispatch
from .schedule import MAX_STEPS, Levels, levels, numbers_of, require_choice, timestep_embeddings

structs = header("diffusion/params.cuh")


class DiffusionSampler:
    """The steps of a sampler, from the most noise to none.

    Step i = 0, 1, … belongs to the training step ``timesteps[i]``::

        embeddings = sampler.embeddings(128, like=x)
        for i in range(sampler.num_steps):
            x = sampler.step(x, model(x, embeddings[i]), i, seed=7, clip=1.0)

    Made by `ddpm` or `ddim`, which are the schedulers of diffusers with these names and have these
    options of theirs (clip_sample is the ``clip`` of `step`):

    * prediction_type: what the model returns, "epsilon" (the noise), "v_prediction" or "sample";
    * timestep_spacing: "leading", "trailing" or "linspace", of timesteps among the training steps;
    * steps_offset: added to "leading" timesteps;
    * rescale_betas_zero_snr: nothing of the sample is left at the last training step
      (arXiv:2305.08891); for models that predict v or the sample, if that step is taken;
    * thresholding: the predicted sample is kept below the quantile dynamic_thresholding_ratio of
      its magnitudes (0.995), that between 1 and sample_max_value (1.0), and divided by it
      (arXiv:2205.11487). It sorts each sample, which takes much longer than the step itself.

    Tables are copied to a device at their first use there and stay; call `step` and `embeddings`
    once before a CUDA graph is captured. Copies and pickles of a sampler make their own.

    Attributes:
        timesteps: training steps, descending.
        coefficients: float32 (num_steps, 6), see ``DiffusionCoefficients`` in diffusion/params.cuh;
            it cannot be written to, since devices may already have a copy.
        threshold: (quantile, largest threshold) of thresholding, or None.

    Raises:
        TypeError: timesteps or coefficients that are no numbers.
        ValueError: their shapes, numbers that are not finite in float32, threshold.
    """

    def __init__(
        self,
        timesteps: Sequence[int] | numpy.ndarray,
        coefficients: numpy.ndarray,
        *,
        threshold: tuple[float, float] | None = None,
    ) -> None:
        function = type(self).__name__
        steps = numbers_of(function, "timesteps", timesteps)
        if not ((steps >= 0) & (steps < MAX_STEPS) & (steps == numpy.round(steps))).all():
            fact = f"timesteps must be integers from 0 to {MAX_STEPS - 1}"
            raise ValueError(f"{function}: {fact}, got {steps}")
        self.timesteps = tuple(int(t) for t in steps)
        shape = getattr(coefficients, "shape", None)
        if shape != (len(steps), 6) or not len(steps):
            fact = f"coefficients must have shape ({len(steps)}, 6), one row for each timestep"
            raise ValueError(f"{function}: {fact}, got {shape}")
        flat = numbers_of(function, "coefficients", numpy.asarray(coefficients).ravel())
        with numpy.errstate(over="ignore"):
            self.coefficients = flat.reshape(-1, 6).astype("float32")
        if not numpy.isfinite(self.coefficients).all():
            fact = "coefficients must be finite in float32 (betas so large leave only noise)"
            raise ValueError(f"{function}: {fact}, got {abs(flat).max():.3g}")
        self.coefficients.flags.writeable = False
        self.threshold = _checked_threshold(function, threshold)
        self._tables: dict[Any, Array] = {}
        self._noisy = (self.coefficients[:, -1] != 0).tolist()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.coefficients.flags.writeable = False

    @classmethod
    def ddpm(
        cls,
        betas: Sequence[float] | numpy.ndarray,
        num_steps: int | None = None,
        *,
        variance: Literal["small", "large"] = "small",
        **options: Any,
    ) -> "DiffusionSampler":
        """The ancestral sampler of arXiv:2006.11239, equations 7 and 11.

        Args:
            betas: of all training steps (`beta_schedule`), each above 0 and below 1.
            num_steps: how many of them are taken; default all.
            variance: of the noise, "small" (that of the posterior) or "large" (beta).
            options: of `DiffusionSampler`.

        Raises:
            TypeError: an option that does not exist.
            ValueError: betas, num_steps, variance, options.
        """
        require_choice("ddpm", "variance", variance, ("small", "large"))
        found = levels("ddpm", betas, num_steps, options)
        now, before = found.now, found.before_by_order()
        beta = 1 - now / before
        posterior = (1 - before) / (1 - now) * beta
        sigma = numpy.sqrt(posterior if variance == "small" else beta)
        return cls._of(
            found,
            x0_to_x=numpy.sqrt(before) * beta / (1 - now),
            x_to_x=numpy.sqrt(now / before) * (1 - before) / (1 - now),
            model_to_x=numpy.zeros_like(now),
            noise_to_x=numpy.where(found.timesteps > 0, sigma, 0.0),
        )

    @classmethod
    def ddim(
        cls,
        betas: Sequence[float] | numpy.ndarray,
        num_steps: int | None = None,
        *,
        eta: float = 0.0,
        set_alpha_to_one: bool = True,
        **options: Any,
    ) -> "DiffusionSampler":
        """The sampler of arXiv:2010.02502, equations 12 and 16.

        Args:
            betas: as in `ddpm`.
            num_steps: as in `ddpm`.
            eta: 0 is deterministic, 1 has the noise of DDPM.
            set_alpha_to_one: the last step leads to a sample without noise; else to the noise of
                the first training step.
            options: of `DiffusionSampler`.

        Raises:
            TypeError: an option that does not exist.
            ValueError: betas, num_steps, eta, options.
        """
        if not (isinstance(eta, numbers.Real) and type(eta) is not bool and 0 <= eta <= 1):
            raise ValueError(f"ddim: eta must be between 0 and 1, got {eta!r}")
        require_choice("ddim", "set_alpha_to_one", set_alpha_to_one, (False, True))
        found = levels("ddim", betas, num_steps, options)
        now = found.now
        before = found.before_by_distance(1.0 if set_alpha_to_one else found.products[0])
        sigma = eta * numpy.sqrt((1 - before) / (1 - now) * (1 - now / before))
        towards_x = numpy.sqrt(numpy.maximum(1 - before - sigma**2, 0.0))  # of the noise in x
        return cls._of(
            found,
            x0_to_x=numpy.sqrt(before),
            x_to_x=towards_x * found.model.x_to_noise,
            model_to_x=towards_x * found.model.model_to_noise,
            noise_to_x=sigma,
        )

    @classmethod
    def _of(cls, found: Levels, **update: numpy.ndarray) -> "DiffusionSampler":
        """A sampler of these levels and of the coefficients (num_steps,) of its update."""
        of_x0 = {"x_to_x0": found.model.x_to_x0, "model_to_x0": found.model.model_to_x0}
        columns = of_x0 | update
        names = [name for name, _ in structs.DiffusionCoefficients._fields_]
        table = numpy.stack([columns[name] for name in names], -1)
        return cls(found.timesteps, table, threshold=found.threshold)

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return len(self.timesteps)

    def step(
        self,
        x: ArrayT,
        predicted: Array,
        step: int | Array,
        *,
        noise: Array | None = None,
        seed: int | Array | None = None,
        clip: float | None = None,
    ) -> ArrayT:
        """x one step less noisy, in one launch; no gradients. torch.compile breaks its graph here.

        Args:
            x: (batch, ...), float16, bfloat16 or float32, dense in memory, the batch outermost.
            predicted: what the model returned for x, with its shape and strides and its dtype; for
                float32 x any of the three dtypes.
            step: index of the step, or an int32 or int64 array of them, (), (1,) or (batch,), one
                for each sample. What an array on a GPU holds is not checked, as that would wait for
                it: an index outside of the table gives NaN.
            noise: like x, standard normal, for steps that add noise.
            seed: draw the noise inside the kernel instead: an integer from 0 to 2^64 - 1, or an
                int64 array (batch,), one for each sample. It depends on the seed, the step and the
                place in x (with an array in the sample, whatever lies beside it in the batch)
                only: each call of a sampling loop may have the same seed, each loop needs its own.
            clip: keep the predicted sample between -clip and clip; not with thresholding.

        Returns:
            A new array like x.

        Raises:
            TypeError: dtypes, libraries.
            ValueError: shapes, strides, devices, a step without noise, options.
            NotImplementedError: a gradient would be recorded.
        """
        number = None  # arrays of one number can be indices, too: they stay on their device
        if type(step) is int or is_integer(step):
            step, number = None, operator.index(step)
        seeds = None
        if seed is not None and type(seed) is not int and hasattr(seed, "__dlpack__"):
            seed, seeds = None, seed
        arrays, options = (x, predicted, noise, step, seeds), (number, seed, clip)
        return STEP(dispatch.FUNCTION, arrays, (self, *options))[0]

    def embeddings(self, dim: int, *, like: ArrayT, **options: Any) -> ArrayT:
        """`timestep_embeddings` of the steps, float32 (num_steps, dim), on the device of ``like``.

        Row i belongs to step i. They are computed at the first call and kept; each call returns a
        copy. torch.compile breaks its graph here.

        Raises:
            TypeError: ``like`` is no NumPy, CuPy or torch array.
            ValueError: dim.
        """
        given = (dim, *sorted(options.items()))
        return EMBEDDINGS("DiffusionSampler.embeddings", (like,), (self, given))[0]

    def adds_noise(self, step: int | None) -> bool:
        """Whether a step, or with None any of them, adds noise."""
        return any(self._noisy) if step is None else self._noisy[step]

    def table(self, key: Any, like: Array, make: Any) -> Array:
        """The result of ``make`` on the device of ``like``; made and copied at the first use.

        Nobody may write to it, and torch must not track the call.
        """
        library = library_of(like)
        place = (key, library, library.device(like))
        table = self._tables.get(place)
        if table is None:
            table = self._tables[place] = library.put(make(), like)
        return table


def _embeddings(
    function: str, library: Any, arrays: tuple[Array], options: tuple[DiffusionSampler, tuple]
) -> tuple[Array]:
    """A copy of the table, or within modes and transforms of torch one that is not kept."""
    (like,), (sampler, given) = arrays, options
    dim, *more = given
    make = lambda: timestep_embeddings(sampler.timesteps, dim, **dict(more))  # noqa: E731
    if library.traced(like):
        return (library.put(make(), like),)
    return (library.copy(sampler.table(repr(given), like, make)),)


def _checked_threshold(function: str, threshold: Any) -> tuple[float, float] | None:
    if threshold is None:
        return None
    pair = isinstance(threshold, tuple) and len(threshold) == 2
    if pair and all(isinstance(x, numbers.Real) for x in threshold):
        ratio, largest = map(float, threshold)
        if 0 < ratio < 1 <= largest < math.inf:
            return ratio, largest
    fact = "threshold must be (a quantile below 1, the largest threshold, at least 1) or None"
    raise ValueError(f"{function}: {fact}, got {threshold!r}")


STEP = Operation(dispatch.run)
EMBEDDINGS = Operation(_embeddings, native="like")
