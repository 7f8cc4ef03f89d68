"""A diffusion step from arrays to its plan; a call of known signature is one look-up."""

import math
import numbers
from typing import Any

import numpy

from ...runtime import loaded
from ...runtime.array import Array, View
from ...runtime.operation import Plans, is_followed
from ...runtime.rows import dense_like
from ...runtime.scratch import array_operations
from ...runtime.specs import Spec, views_of
from . import reference
from .plan import FUNCTION, StepPlan

MAX_SEED = 2**64
SPECS = {
    "x": Spec((...,), strides="dense"),
    "predicted": Spec((...,), "like x or narrower", "dense"),
    "noise": Spec((...,), strides="dense", optional=True),
}

_plans = Plans(wide=3)


def run(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array]:
    """`DiffusionSampler.step` on arrays of one library.

    Args:
        arrays: x, predicted, noise, indices of steps on the device, seeds of the samples.
        options: the sampler; the one index, where there are no arrays of them; the one seed; clip.
    """
    (x, predicted, noise, steps, seeds), (sampler, number, seed, clip) = arrays, options
    drawn = seed is not None or seeds is not None
    _check_numbers(sampler, steps, number, noise, seed, drawn)
    if clip is not None:
        clip = _plain_clip(sampler, clip)

    def check() -> dict[str, View]:
        return _check(library, *arrays)

    if library.on_cpu(x):
        check()
        return (_on_cpu(sampler, library, arrays, number, seed, clip),)
    of_plan = (clip, sampler.num_steps, drawn, sampler.threshold is not None)
    if is_followed(library, arrays):
        check()
    key, pointers = _plans.key(library, arrays, of_plan)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.add(key, StepPlan(library, check(), key[-1], *of_plan))
    table = sampler.table("coefficients", x, sampler.coefficients.copy)
    limits = None
    if sampler.threshold is not None:

        def limits() -> Array:
            with array_operations(x):
                if steps is None:
                    of_model = tuple(sampler.coefficients[number, :2].tolist())
                else:
                    of_model = _gathered(library, table, steps)
                return _thresholds(sampler.threshold, library, of_model, x, predicted)

    return (plan(x, pointers, library.pointer(table), limits, (seed or 0, number or 0)),)


def _on_cpu(
    sampler: Any,
    library: Any,
    arrays: tuple[Array | None, ...],
    number: int | None,
    seed: int | None,
    clip: float | None,
) -> Array:
    *inputs, steps, seeds = (None if y is None else library.to_numpy(y) for y in arrays)
    places = numpy.asarray(number if steps is None else steps)
    if places.size and not (places.min() >= 0 and places.max() < sampler.num_steps):
        fact = f"step must be from 0 to {sampler.num_steps - 1}"
        raise ValueError(f"{FUNCTION}: {fact}, got {places.tolist()}")
    strides = dense_like(library.view(arrays[0]))
    options = (places, seed if seeds is None else seeds, clip, strides, sampler.threshold)
    result = reference.step(sampler.coefficients, *inputs, *options)
    return library.from_numpy(result, arrays[0], strides)


def _thresholds(
    threshold: tuple[float, float],
    library: Any,
    coefficients: Array | tuple[float, float],
    x: Array,
    predicted: Array,
) -> Array:
    """`reference.thresholds` on the device, float32 (batch,).

    Args:
        threshold: (quantile, largest threshold).
        coefficients: x_to_x0 and model_to_x0, or an array (batch or 1, 2) of them.
        x, predicted: CuPy arrays or torch tensors of at least one element.
    """
    ratio, largest = threshold
    batch = x.shape[0] if x.ndim else 1
    values, model = (library.float32(y).reshape(batch, -1) for y in (x, predicted))
    if isinstance(coefficients, tuple):
        of_x, of_model = coefficients
    else:
        of_x, of_model = coefficients[:, :1], coefficients[:, 1:]
    sizes = abs(of_x * values + of_model * model)
    if library.name == "torch.Tensor":
        where, ordered = loaded.torch.where, sizes.sort(1).values
    else:
        where, ordered = loaded.cupy.where, loaded.cupy.sort(sizes, axis=1)
    last = ordered.shape[1] - 1
    place = ratio * last
    low, high = ordered[:, int(place)], ordered[:, min(int(place) + 1, last)]
    found = low + (high - low) * (place - int(place))
    # NaN sorts behind all numbers; a sample that has one has no quantile.
    largest_size = ordered[:, last]
    return where(largest_size != largest_size, largest_size, found.clip(1.0, largest))


def _gathered(library: Any, table: Array, steps: Array) -> Array:
    """The first two coefficients of steps that only the device knows, (steps, 2).

    Those of steps outside of the table do not matter: the kernel gives NaN.
    """
    places = steps.reshape(-1).clip(0, table.shape[0] - 1)
    return table[places.long() if library.name == "torch.Tensor" else places][:, :2]


def _check(
    library: Any,
    x: Array,
    predicted: Array,
    noise: Array | None,
    steps: Array | None,
    seeds: Array | None,
) -> dict[str, View]:
    batch = tuple(x.shape[:1])
    shapes = list(dict.fromkeys([(), (1,), batch]))
    specs = {
        **SPECS,
        "step": Spec(shapes, "int32 or int64", optional=True, instead="an integer"),
        "seed": Spec(batch, "int64", optional=True, instead="an integer"),
    }
    views = views_of(FUNCTION, library, specs, (x, predicted, noise, steps, seeds), plain=True)
    if seeds is not None and not batch:
        fact = "seed must be an integer beside an x without dimensions"
        raise ValueError(f"{FUNCTION}: {fact}, got an array {views['seed'].shape}")
    shape, strides = views["x"].shape, dense_like(views["x"])
    outermost = max((step for size, step in zip(shape, strides) if size > 1), default=0)
    if batch and batch[0] > 1 and 0 not in shape and strides[0] != outermost:
        fact = "the first dimension of x must be the outermost one in memory"
        raise ValueError(f"{FUNCTION}: {fact}, got strides {views['x'].strides}")
    return views


def _plain_clip(sampler: Any, clip: Any) -> float:
    """The option as a plain number: it is part of the key of a plan."""
    real = type(clip) is float or (isinstance(clip, numbers.Real) and type(clip) is not bool)
    if not real or not 0 < clip < math.inf:
        raise ValueError(f"{FUNCTION}: clip must be positive and finite, got {clip!r}")
    if sampler.threshold is not None:
        fact = "clip must be None where the sampler has thresholding"
        raise ValueError(f"{FUNCTION}: {fact}, got {clip}")
    return float(clip)


def _check_numbers(
    sampler: Any,
    steps: Array | None,
    number: int | None,
    noise: Array | None,
    seed: Any,
    drawn: bool,
) -> None:
    if steps is None and number is None:
        raise TypeError(f"{FUNCTION}: step must be an integer or an array of them, got None")
    if number is not None and not 0 <= number < sampler.num_steps:
        fact = f"step must be from 0 to {sampler.num_steps - 1}"
        raise ValueError(f"{FUNCTION}: {fact}, got {number}")
    whole = type(seed) is int or (isinstance(seed, numbers.Integral) and type(seed) is not bool)
    if seed is not None and not (whole and 0 <= seed < MAX_SEED):
        raise ValueError(f"{FUNCTION}: seed must be from 0 to 2^64 - 1, got {seed!r}")
    if noise is not None and drawn:
        raise ValueError(f"{FUNCTION}: takes noise or a seed, got both")
    if noise is None and not drawn and sampler.adds_noise(number):
        raise ValueError(f"{FUNCTION}: this step adds noise, needs noise or a seed, got neither")
