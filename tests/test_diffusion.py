"""The diffusion step, schedules and embeddings, on every library."""

import numpy
import pytest
from arrays import normal, stored
from matrix import each_library

import cupyflash
from cupyflash.diffusion import reference
from cupyflash.diffusion.normal import normal as normal_of_seed
from cupyflash.philox import philox
from cupyflash.testing import assert_close_to_float64, numpy_dtype, to_float64, to_numpy64

BETAS = cupyflash.beta_schedule("cosine", 50)
SAMPLERS = {
    "ddpm": cupyflash.DiffusionSampler.ddpm(BETAS),
    "ddpm-large": cupyflash.DiffusionSampler.ddpm(BETAS, 25, variance="large"),
    "ddim": cupyflash.DiffusionSampler.ddim(BETAS, 10),
    "ddim-eta": cupyflash.DiffusionSampler.ddim(BETAS, 10, eta=1.0),
}
each_sampler = pytest.mark.parametrize("name", SAMPLERS)
SHAPES = [(3, 16, 10), (2, 7, 3), (1, 1001), (6,), (4, 8, 6, 5)]


def indices(backend, values, dtype="int64"):
    """An array of step numbers in the library of the backend."""
    values = numpy.asarray(values, dtype)
    if backend.library == "torch":
        import torch

        return torch.from_numpy(values).to(backend.device)
    if backend.library == "cupy":
        import cupy

        return cupy.asarray(values)
    return values


def expected(sampler, x, predicted, noise, numbers, clip):
    """(float64, yardstick, terms) of a step with given noise."""
    numbers = numpy.asarray(numbers)
    wide = [to_numpy64(y) for y in (x, predicted, noise)]
    dtypes = [str(y.dtype).removeprefix("torch.") for y in (x, predicted, noise)]
    narrow = [y.astype(numpy_dtype(name)) for y, name in zip(wide, dtypes)]
    run = lambda arrays: reference.step(
        sampler.coefficients, *arrays, numbers, None, clip, range(wide[0].ndim, 0, -1)
    )
    c = numpy.abs(sampler.coefficients[numbers]).reshape(-1, 6).max(0)
    x, predicted, noise = (numpy.abs(y).max() for y in wide)
    guess = c[0] * x + c[1] * predicted
    terms = c[2] * guess + c[3] * x + c[4] * predicted + c[5] * noise
    return run(wide), run(narrow), float(terms)


@each_library()
@each_sampler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_step(backend, name, shape, clip):
    """With given noise: one index for all, as int and as array, and one for each sample."""
    sampler = SAMPLERS[name]
    for i, dtype in enumerate(backend.dtypes):
        storage = "channels_last" if len(shape) == 4 else "contiguous"
        x, predicted, noise = (
            stored(backend, normal(shape, (i, j)), dtype, storage) for j in range(3)
        )
        each = numpy.random.default_rng(i).integers(0, sampler.num_steps, shape[0])
        last = sampler.num_steps - 1
        for step, numbers in [
            (0, 0),
            (last, last),
            (numpy.int64(1), 1),
            (indices(backend, 3), 3),
            (indices(backend, [last]), last),
            (indices(backend, each), each),
            (indices(backend, each, "int32"), each),
        ]:
            out = sampler.step(x, predicted, step, noise=noise, clip=clip)
            exact, yardstick, terms = expected(sampler, x, predicted, noise, numbers, clip)
            assert type(out) is type(x) and out.dtype == x.dtype
            baseline = yardstick.astype("float64")
            assert_close_to_float64(to_numpy64(out), exact, baseline, dtype, "x", terms=terms)


@each_library()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_predictions_of_float32_samples(backend, dtype):
    if dtype not in backend.dtypes:
        pytest.skip("needs ml_dtypes")
    sampler = SAMPLERS["ddpm"]
    x, noise = (stored(backend, normal((2, 40), i), "float32") for i in range(2))
    predicted = stored(backend, normal((2, 40), 2), dtype)
    out = sampler.step(x, predicted, 7, noise=noise)
    exact, yardstick, terms = expected(sampler, x, predicted, noise, 7, None)
    assert_close_to_float64(to_numpy64(out), exact, yardstick, "float32", "x", terms=terms)


@each_library()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_from_a_seed(backend, shape):
    """The same numbers on every device, aligned or not: those of cupyflash.normal."""
    sampler, seed = SAMPLERS["ddpm"], 2**63 + 12345
    x, predicted = (stored(backend, normal(shape, i), "float32") for i in range(2))
    each = numpy.random.default_rng(5).integers(0, sampler.num_steps - 1, shape[0])
    of_element = numpy.broadcast_to(each.reshape(-1, *[1] * (len(shape) - 1)), shape)
    drawn = normal_of_seed(int(numpy.prod(shape)), of_element.ravel(), seed).reshape(shape)
    noise = stored(backend, drawn, "float32")
    found = sampler.step(x, predicted, indices(backend, each), seed=seed)
    given = sampler.step(x, predicted, indices(backend, each), noise=noise)
    # sin.approx and cos.approx are right to 2^-20.9, and radii end at 5.8.
    error = abs(to_float64(found) - to_float64(given)).max()
    assert float(error) <= 6 * 2.0**-20
    again = sampler.step(x, predicted, indices(backend, each), seed=seed)
    assert (again == found).all()
    other = sampler.step(x, predicted, indices(backend, each), seed=seed + 1)
    assert (other != found).any()


@each_library()
def test_noise_is_standard_normal(backend):
    """Moments of 2^18 numbers within five standard errors, and no correlation of steps."""
    sampler = SAMPLERS["ddim-eta"]
    zeros = stored(backend, numpy.zeros((4, 2**16)), "float32")
    sigma = sampler.coefficients[:, -1].astype("float64")
    first, second = (
        to_numpy64(sampler.step(zeros, zeros, i, seed=11)).ravel() / sigma[i] for i in (2, 3)
    )
    n = first.size
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((first**power).mean() - mean) < 5 * (variance / n) ** 0.5
    assert abs((first * second).mean()) < 5 / n**0.5
    assert abs((first[1:] * first[:-1]).mean()) < 5 / n**0.5


def test_noise_is_not_that_of_dropout():
    """Of the same seed: the radius of the first pair is of another Philox counter."""
    first = philox(11, tuple(numpy.zeros((4, 1), "uint64")))[0][0]
    dropouts = (-2 * numpy.log(((int(first) >> 8) + 1) * 2.0**-24)) ** 0.5
    assert abs(numpy.hypot(*normal_of_seed(2, 0, 11)) - dropouts) > 1e-3


@each_library(device="cuda")
@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_an_unknown_step_on_the_gpu_gives_nan(backend, wrong):
    x = stored(backend, normal((2, 24), 0), "float32")
    out = to_float64(SAMPLERS["ddpm"].step(x, x, indices(backend, [3, wrong]), seed=1))
    assert (out[0] == out[0]).all() and (out[1] != out[1]).all()


@each_library()
def test_nan_is_not_clipped_away(backend):
    values = normal((1, 16), 0)
    values[0, 3] = numpy.nan
    x = stored(backend, values, "float32")
    out = to_numpy64(SAMPLERS["ddim"].step(x, x, 3, clip=1.0))
    assert numpy.isnan(out).sum() == 1


@each_library()
def test_empty(backend):
    x = stored(backend, numpy.zeros((0, 4)), "float16")
    out = SAMPLERS["ddpm"].step(x, x, 3, seed=1)
    assert tuple(out.shape) == (0, 4)


@each_library()
def test_ddim_without_noise_recovers_the_sample(backend):
    """If the prediction is the true noise, every step stays on the line from sample to noise."""
    sampler = SAMPLERS["ddim"]
    sample, noise = normal((2, 30), 0), normal((2, 30), 1)
    products = numpy.cumprod(1 - BETAS)
    level = products[sampler.timesteps[0]]
    x = stored(backend, level**0.5 * sample + (1 - level) ** 0.5 * noise, "float32")
    predicted = stored(backend, noise, "float32")
    for i in range(sampler.num_steps):
        x = sampler.step(x, predicted, i)
    numpy.testing.assert_allclose(to_numpy64(x), sample, atol=2e-3)


def test_ddpm_is_the_posterior():
    """Mean and variance of q(x_{t-1} | x_t, x_0), written down independently (equation 7)."""
    sampler, products = SAMPLERS["ddpm"], numpy.cumprod(1 - BETAS)
    for i, t in enumerate(sampler.timesteps):
        before = products[t - 1] if t else 1.0
        a, b, c, d, e, sigma = sampler.coefficients[i].astype("float64")
        numpy.testing.assert_allclose(c, before**0.5 * BETAS[t] / (1 - products[t]), rtol=1e-6)
        mean = (1 - BETAS[t]) ** 0.5 * (1 - before) / (1 - products[t])
        numpy.testing.assert_allclose(d, mean, rtol=1e-6, atol=1e-12)
        to_x0 = products[t] ** -0.5, -((1 / products[t] - 1) ** 0.5)
        numpy.testing.assert_allclose([a, b], to_x0, rtol=1e-6)
        variance = (1 - before) / (1 - products[t]) * BETAS[t] if t else 0.0
        numpy.testing.assert_allclose([e, sigma**2], [0.0, variance], rtol=1e-5)


def test_ddim_with_eta_1_is_ddpm_of_all_steps():
    """Without clipping, arXiv:2010.02502 section 4.1."""
    ddpm = cupyflash.DiffusionSampler.ddpm(BETAS)
    ddim = cupyflash.DiffusionSampler.ddim(BETAS, eta=1.0)
    x, predicted, noise = (normal((3, 20), i).astype("float64") for i in range(3))
    for i in range(len(BETAS)):
        a, b = (
            reference.step(
                s.coefficients, x, predicted, noise, numpy.asarray(i), None, None, (20, 1)
            )
            for s in (ddpm, ddim)
        )
        numpy.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * numpy.abs(a).max())


def test_schedules():
    linear = cupyflash.beta_schedule("linear", 1000)
    assert linear[0] == 1e-4 and linear[-1] == 0.02
    scaled = cupyflash.beta_schedule("scaled_linear", 5, beta_start=0.01, beta_end=0.04)
    numpy.testing.assert_allclose(scaled**0.5, [0.1, 0.125, 0.15, 0.175, 0.2])
    cosine = cupyflash.beta_schedule("cosine", 100)
    assert cosine[-1] == 0.999 and (numpy.diff(cosine) > 0).all()
    with pytest.raises(ValueError, match="^beta_schedule: kind .*'square'"):
        cupyflash.beta_schedule("square", 10)
    with pytest.raises(ValueError, match="^beta_schedule: num_steps .*0"):
        cupyflash.beta_schedule("linear", 0)


@each_library()
def test_embeddings(backend):
    sampler = SAMPLERS["ddim"]
    like = stored(backend, normal((2, 4), 0), "float16")
    table = sampler.embeddings(16, like=like)
    assert type(table) is type(like) and tuple(table.shape) == (10, 16)
    for i, t in enumerate(sampler.timesteps):
        angles = [t / 10000 ** (k / 7) for k in range(8)]
        exact = numpy.concatenate([numpy.sin(angles), numpy.cos(angles)])
        numpy.testing.assert_allclose(to_numpy64(table[i]), exact, atol=1e-6)
    assert sampler.embeddings(16, like=like) is table
    swapped = sampler.embeddings(16, like=like, cos_first=True)
    assert (to_numpy64(swapped)[:, :8] == to_numpy64(table)[:, 8:]).all()
    with pytest.raises(TypeError, match="^DiffusionSampler.embeddings: like must be .*got list"):
        sampler.embeddings(16, like=[1.0])
    for dim in (2, 15, 0, 3.0):
        with pytest.raises(ValueError, match=f"^timestep_embeddings: dim .*{dim}"):
            sampler.embeddings(dim, like=like)


def bad(error, match, call):
    with pytest.raises(error, match=f"^DiffusionSampler.step: .*{match}"):
        call()


@each_library()
def test_bad_input(backend):
    sampler = SAMPLERS["ddpm"]
    make = lambda shape=(2, 24), dtype="float32": stored(backend, normal(shape, 3), dtype)
    x = make()
    step = lambda *a, **options: lambda: sampler.step(*a, **{"seed": 1} | options)
    bad(ValueError, "step.*0 to 49.*50", step(x, x, 50))
    bad(ValueError, "step.*-1", step(x, x, -1))
    bad(TypeError, "step", step(x, x, 1.5))
    bad(TypeError, "step.*int32 or int64", step(x, x, make((2,))))
    bad(ValueError, r"step.*\(2,\)", step(x, x, indices(backend, [1, 2, 3])))
    bad(ValueError, r"predicted.*\(2, 23\)", step(x, make((2, 23)), 1))
    bad(TypeError, "predicted.*float16", step(make(dtype="float16"), x, 1))
    bad(TypeError, "predicted.*list", step(x, [1.0], 1))
    bad(ValueError, r"noise.*\(3, 24\)", step(x, x, 1, seed=None, noise=make((3, 24))))
    bad(ValueError, "noise or a seed, got both", step(x, x, 1, noise=x))
    bad(ValueError, "got neither", step(x, x, 1, seed=None))
    bad(ValueError, "got neither", step(x, x, indices(backend, 1), seed=None))
    for seed in (-1, 2**64, 1.5):
        bad(ValueError, "seed", step(x, x, 1, seed=seed))
    for clip in (0, -1.0, float("inf"), float("nan")):
        bad(ValueError, "clip", step(x, x, 1, clip=clip))
    bad(ValueError, "dense", step(make((2, 48))[:, ::2], x, 1))
    bad(ValueError, "strides", step(x, make((2, 48))[:, :24], 1))
    bad(ValueError, "outermost", step(make((24, 2)).T, make((24, 2)).T, 1))
    assert sampler.step(x, x, 49) is not x  # the last step needs no noise


@each_library(library="torch")
def test_no_gradient(backend):
    x = stored(backend, normal((2, 24), 3), "float32").requires_grad_()
    with pytest.raises(NotImplementedError, match="no_grad"):
        SAMPLERS["ddim"].step(x, x, 1)


@pytest.mark.parametrize("betas", [[], [0.1, 1.0], [0.0], [[0.1]]], ids=str)
def test_bad_betas(betas):
    for make in (cupyflash.DiffusionSampler.ddpm, cupyflash.DiffusionSampler.ddim):
        with pytest.raises(ValueError, match="betas must be"):
            make(betas)


def test_bad_sampler_options():
    for steps in (0, 51, 2.0):
        with pytest.raises(ValueError, match=f"^ddim: num_steps .*{steps}"):
            cupyflash.DiffusionSampler.ddim(BETAS, steps)
    with pytest.raises(ValueError, match="^ddim: eta .*2"):
        cupyflash.DiffusionSampler.ddim(BETAS, eta=2)
    with pytest.raises(ValueError, match="^ddpm: variance .*'learned'"):
        cupyflash.DiffusionSampler.ddpm(BETAS, variance="learned")
