"""A diffusion step from arrays to its plan; a call of known signature is one look-up."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy

from ..runtime.array import Array, View, library_of
from ..runtime.checks import require_dense, require_like, views_of
from ..runtime.operation import Plans
from ..runtime.rows import dense_like
from ..runtime.scratch import allocations_held
from . import reference
from .kernels import model_dtypes
from .plan import FUNCTION, StepPlan
from .thresholding import gathered, thresholds

INDEX_DTYPES = ("int32", "int64")
MAX_SEED = 2**64

_plans = Plans(wide=3)


def run(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array]:
    """`DiffusionSampler.step` on arrays of one library.

    Args:
        arrays: x, predicted, noise, indices of steps on the device, seeds of the samples.
        options: the sampler; the one index, where there are no arrays of them; the one seed; clip.
    """
    return (_step(library, *arrays, *options),)


def _step(
    library: Any,
    x: Array,
    predicted: Array,
    noise: Array | None,
    steps: Array | None,
    seeds: Array | None,
    sampler: Any,
    number: int | None,
    seed: int | None,
    clip: float | None,
) -> Array:
    if steps is None and number is None:
        raise TypeError(f"{FUNCTION}: step must be an integer or an array of them, got None")
    drawn = seed is not None or seeds is not None
    _check_numbers(sampler, number, noise, seed, drawn)
    threshold = sampler.threshold
    if clip is not None and not (type(clip) is float and 0 < clip < math.inf and not threshold):
        clip = _plain_clip(sampler, clip)

    def check() -> dict[str, View]:
        arrays = {"x": x, "predicted": predicted, "noise": noise}
        return _check(library, arrays, steps, seeds)

    if library.on_cpu(x):
        check()
        _refuse_gradient(library, x, predicted, noise)
        arrays = (x, predicted, noise, steps, seeds)
        return _on_cpu(sampler, library, *arrays, number, seed, clip)
    options = (clip, sampler.num_steps, drawn, threshold is not None)
    plan, pointers = _plans.find(
        library,
        (x, predicted, noise, steps, seeds),
        options,
        check,
        lambda views, aligned: StepPlan(library, views, aligned, *options),
    )
    _refuse_gradient(library, x, predicted, noise)
    table = sampler.table("coefficients", x, lambda: sampler.coefficients)
    limits = None
    if threshold is not None:

        def limits() -> Array:
            with allocations_held(library):
                if steps is None:
                    of_model = tuple(sampler.coefficients[number, :2].tolist())
                else:
                    of_model = gathered(library, table, steps)
                return thresholds(threshold, library, of_model, x, predicted)

    *inputs, of_steps, of_seeds = pointers
    tables = of_steps, library.pointer(table)
    return plan(x, inputs, tables, limits, of_seeds, seed or 0, number or 0)


def _refuse_gradient(library: Any, *arrays: Array | None) -> None:
    if library.wants_gradient(*arrays):
        raise NotImplementedError(
            f"{FUNCTION}: has no gradient, call it under torch.no_grad(), "
            "got a tensor that requires one"
        )


def _on_cpu(
    sampler: Any,
    library: Any,
    x: Array,
    predicted: Array,
    noise: Array | None,
    steps: Array | None,
    seeds: Array | None,
    number: int | None,
    seed: int | None,
    clip: float | None,
) -> Array:
    places = numpy.asarray(number if steps is None else library.to_numpy(steps))
    if places.size and not (places.min() >= 0 and places.max() < sampler.num_steps):
        fact = f"step must be from 0 to {sampler.num_steps - 1}"
        raise ValueError(f"{FUNCTION}: {fact}, got {places.tolist()}")
    arrays = (None if y is None else library.to_numpy(y) for y in (x, predicted, noise))
    strides = dense_like(library.view(x))
    key = seed if seeds is None else library.to_numpy(seeds)
    options = (places, key, clip, strides, sampler.threshold)
    result = reference.step(sampler.coefficients, *arrays, *options)
    return library.from_numpy(result, x, strides)


def _check(
    library: Any,
    arrays: Mapping[str, Array | None],
    steps: Array | None,
    seeds: Array | None,
) -> dict[str, View]:
    views = views_of(FUNCTION, library, arrays)
    x, predicted = views["x"], views.get("predicted")
    if predicted is None:
        raise TypeError(f"{FUNCTION}: predicted must be an array, got None")
    allowed = model_dtypes(x.dtype)
    if predicted.dtype not in allowed:
        fact = f"predicted must be {' or '.join(allowed)} beside {x.dtype}"
        raise TypeError(f"{FUNCTION}: {fact}, got {predicted.dtype}")
    require_like(
        FUNCTION, views | {"predicted": predicted._replace(dtype=x.dtype)}, "predicted", "x"
    )
    require_like(FUNCTION, views, "noise", "x")
    require_dense(FUNCTION, views, "x")
    dense = dense_like(x)
    if x.shape and x.shape[0] > 1 and 0 not in x.shape and dense[0] != max(dense):
        fact = "the first dimension of x must be the outermost one in memory"
        raise ValueError(f"{FUNCTION}: {fact}, got strides {x.strides}")
    if steps is not None:
        views["step"] = _check_steps(library, steps, x)
    if seeds is not None:
        views["seed"] = _check_seeds(library, seeds, x)
    return views


def _check_steps(library: Any, steps: Array, x: View) -> View:
    if library_of(steps) is not library:
        fact = f"step must be an integer or a {library.name} like x"
        raise TypeError(f"{FUNCTION}: {fact}, got {type(steps).__name__}")
    view = library.view(steps)
    if view.dtype not in INDEX_DTYPES:
        allowed = " or ".join(INDEX_DTYPES)
        raise TypeError(f"{FUNCTION}: step must be {allowed}, got {view.dtype}")
    if view.device != x.device:
        where = f"got devices {view.device} and {x.device}"
        raise ValueError(f"{FUNCTION}: step must be on the device of x, {where}")
    shapes = ((), (1,), x.shape[:1])
    if view.shape not in shapes or (view.shape and view.shape[0] > 1 and view.strides != (1,)):
        fact = f"step must be contiguous, (), (1,) or {x.shape[:1]}"
        raise ValueError(f"{FUNCTION}: {fact}, got {view.shape}, strides {view.strides}")
    return view


def _check_seeds(library: Any, seeds: Array, x: View) -> View:
    if library_of(seeds) is not library:
        fact = f"seed must be an integer or a {library.name} like x"
        raise TypeError(f"{FUNCTION}: {fact}, got {type(seeds).__name__}")
    view = library.view(seeds)
    if view.dtype != "int64":
        raise TypeError(f"{FUNCTION}: seed must be an integer or int64, got {view.dtype}")
    if view.device != x.device:
        where = f"got devices {view.device} and {x.device}"
        raise ValueError(f"{FUNCTION}: seed must be on the device of x, {where}")
    shape = x.shape[:1]
    if not shape or view.shape != shape or (shape[0] > 1 and view.strides != (1,)):
        fact = f"seed must be an integer or contiguous, one for each sample, {shape}"
        raise ValueError(f"{FUNCTION}: {fact}, got {view.shape}, strides {view.strides}")
    return view


def _plain_clip(sampler: Any, clip: Any) -> float:
    """The option as a plain number: it is part of the key of a plan."""
    real = isinstance(clip, numbers.Real) and not isinstance(clip, bool)
    if not real or not 0 < clip < math.inf:
        raise ValueError(f"{FUNCTION}: clip must be positive and finite, got {clip!r}")
    if sampler.threshold is not None:
        fact = "clip must be None where the sampler has thresholding"
        raise ValueError(f"{FUNCTION}: {fact}, got {clip}")
    return float(clip)


def _check_numbers(
    sampler: Any, number: int | None, noise: Array | None, seed: int | None, drawn: bool
) -> None:
    if number is not None and not 0 <= number < sampler.num_steps:
        fact = f"step must be from 0 to {sampler.num_steps - 1}"
        raise ValueError(f"{FUNCTION}: {fact}, got {number}")
    if seed is not None and not ((type(seed) is int or _is_whole(seed)) and 0 <= seed < MAX_SEED):
        raise ValueError(f"{FUNCTION}: seed must be from 0 to 2^64 - 1, got {seed!r}")
    if noise is not None and drawn:
        raise ValueError(f"{FUNCTION}: takes noise or a seed, got both")
    if noise is None and not drawn and sampler.adds_noise(number):
        raise ValueError(f"{FUNCTION}: this step adds noise, needs noise or a seed, got neither")


def _is_whole(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)
