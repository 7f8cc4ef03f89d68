"""The diffusion step, schedules and embeddings, on every library."""

import copy
import importlib
import math
import pickle

import numpy
import pytest
import wrong_calls
from arrays import normal, stored
from matrix import each_library, pairwise

import cupyflash
from cupyflash.ops.diffusion import reference
from cupyflash.runtime.philox import philox
from cupyflash.testing import assert_close_to_float64, numpy_dtype, to_float64, to_numpy64

BETAS = cupyflash.beta_schedule("cosine", 50)
SAMPLERS = {
    "ddpm": cupyflash.DiffusionSampler.ddpm(BETAS),
    "ddpm-large": cupyflash.DiffusionSampler.ddpm(BETAS, 25, variance="large"),
    "ddim": cupyflash.DiffusionSampler.ddim(BETAS, 10),
    "ddim-eta": cupyflash.DiffusionSampler.ddim(BETAS, 10, eta=1.0),
}
each_sampler = pytest.mark.parametrize("name", SAMPLERS)
SHAPES = [(3, 16, 10), (2, 7, 3), (1, 1001), (6,), (4, 8, 6, 5), (5, 1), (4, 9, 1), (3, 1, 8, 8)]


def indices(target, values, dtype="int64"):
    """An array of step numbers in the library of the target."""
    values = numpy.asarray(values, dtype)
    if target.library == "torch":
        import torch

        return torch.from_numpy(values).to(target.device)
    if target.library == "cupy":
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
def test_step(target, name, shape, clip):
    """With given noise: one index for all, as int and as array, and one for each sample."""
    sampler = SAMPLERS[name]
    for i, dtype in enumerate(target.dtypes):
        storage = "channels_last" if len(shape) == 4 else "contiguous"
        x, predicted, noise = (
            stored(target, normal(shape, (i, j)), dtype, storage) for j in range(3)
        )
        each = numpy.random.default_rng(i).integers(0, sampler.num_steps, shape[0])
        last = sampler.num_steps - 1
        for step, numbers in [
            (0, 0),
            (last, last),
            (numpy.int64(1), 1),
            (indices(target, 3), 3),
            (indices(target, [last]), last),
            (indices(target, each), each),
            (indices(target, each, "int32"), each),
        ]:
            out = sampler.step(x, predicted, step, noise=noise, clip=clip)
            exact, yardstick, terms = expected(sampler, x, predicted, noise, numbers, clip)
            assert type(out) is type(x) and out.dtype == x.dtype
            baseline = yardstick.astype("float64")
            assert_close_to_float64(to_numpy64(out), exact, baseline, dtype, "x", terms=terms)


@each_library()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_predictions_of_float32_samples(target, dtype):
    if dtype not in target.dtypes:
        pytest.skip("needs ml_dtypes")
    sampler = SAMPLERS["ddpm"]
    x, noise = (stored(target, normal((2, 40), i), "float32") for i in range(2))
    predicted = stored(target, normal((2, 40), 2), dtype)
    out = sampler.step(x, predicted, 7, noise=noise)
    exact, yardstick, terms = expected(sampler, x, predicted, noise, 7, None)
    assert_close_to_float64(to_numpy64(out), exact, yardstick, "float32", "x", terms=terms)


@each_library()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_from_a_seed(target, shape):
    """The same numbers on every device, aligned or not: those of cupyflash.normal."""
    sampler, seed = SAMPLERS["ddpm"], 2**63 + 12345
    x, predicted = (stored(target, normal(shape, i), "float32") for i in range(2))
    each = numpy.random.default_rng(5).integers(0, sampler.num_steps - 1, shape[0])
    of_element = numpy.broadcast_to(each.reshape(-1, *[1] * (len(shape) - 1)), shape)
    drawn = reference.normal(int(numpy.prod(shape)), of_element.ravel(), seed).reshape(shape)
    noise = stored(target, drawn, "float32")
    found = sampler.step(x, predicted, indices(target, each), seed=seed)
    given = sampler.step(x, predicted, indices(target, each), noise=noise)
    # sin.approx and cos.approx are right to 2^-20.9, and radii end at 5.8.
    error = abs(to_float64(found) - to_float64(given)).max()
    assert float(error) <= 6 * 2.0**-20
    again = sampler.step(x, predicted, indices(target, each), seed=seed)
    assert (again == found).all()
    other = sampler.step(x, predicted, indices(target, each), seed=seed + 1)
    assert (other != found).any()


@each_library()
def test_noise_is_standard_normal(target):
    """Moments of 2^18 numbers within five standard errors, and no correlation of steps."""
    sampler = SAMPLERS["ddim-eta"]
    zeros = stored(target, numpy.zeros((4, 2**16)), "float32")
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
    assert abs(numpy.hypot(*reference.normal(2, 0, 11)) - dropouts) > 1e-3


@each_library(device="cuda")
@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_an_unknown_step_on_the_gpu_gives_nan(target, wrong):
    x = stored(target, normal((2, 24), 0), "float32")
    out = to_float64(SAMPLERS["ddpm"].step(x, x, indices(target, [3, wrong]), seed=1))
    assert (out[0] == out[0]).all() and (out[1] != out[1]).all()


@each_library()
def test_nan_is_not_clipped_away(target):
    values = normal((1, 16), 0)
    values[0, 3] = numpy.nan
    x = stored(target, values, "float32")
    out = to_numpy64(SAMPLERS["ddim"].step(x, x, 3, clip=1.0))
    assert numpy.isnan(out).sum() == 1


@each_library()
def test_noise_of_a_step_without_noise_is_not_read(target):
    x, unset = (stored(target, numpy.full((2, 24), y), "float32") for y in (0.5, numpy.nan))
    sampler = SAMPLERS["ddpm"]
    assert not sampler.adds_noise(49) and sampler.adds_noise(48)
    for step in (49, indices(target, [49, 48])):
        out = to_numpy64(sampler.step(x, x, step, noise=unset))
        assert (out[0] == to_numpy64(sampler.step(x, x, 49))[0]).all()
    assert numpy.isnan(out[1]).all()


@each_library()
def test_empty(target):
    x = stored(target, numpy.zeros((0, 4)), "float16")
    none = indices(target, [])
    for step, seed in ((3, 1), (3, none), (none, none)):
        out = SAMPLERS["ddpm"].step(x, x, step, seed=seed)
        assert tuple(out.shape) == (0, 4) and out.dtype == x.dtype


@each_library()
def test_one_number(target):
    """A sample without axes."""
    sampler = cupyflash.DiffusionSampler.ddim(cupyflash.beta_schedule("linear", 10), 5)
    x, predicted = (stored(target, normal((1,), i), "float32") for i in (0, 1))
    found = sampler.step(x.reshape(()), predicted.reshape(()), 2)
    assert found.shape == () and float(found) == float(sampler.step(x, predicted, 2)[0])


@each_library()
def test_ddim_without_noise_recovers_the_sample(target):
    """If the prediction is the true noise, every step stays on the line from sample to noise."""
    sampler = SAMPLERS["ddim"]
    sample, noise = normal((2, 30), 0), normal((2, 30), 1)
    products = numpy.cumprod(1 - BETAS)
    level = products[sampler.timesteps[0]]
    x = stored(target, level**0.5 * sample + (1 - level) ** 0.5 * noise, "float32")
    predicted = stored(target, noise, "float32")
    for i in range(sampler.num_steps):
        x = sampler.step(x, predicted, i)
    # Not a formula in another precision but an identity; float32 rounds at each step.
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
        # Both in float64, from coefficients that are stored in float32.
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
def test_embeddings(target):
    sampler = SAMPLERS["ddim"]
    like = stored(target, normal((2, 4), 0), "float16")
    table = sampler.embeddings(16, like=like)
    assert type(table) is type(like) and tuple(table.shape) == (10, 16)
    for i, t in enumerate(sampler.timesteps):
        angles = [t / 10000 ** (k / 7) for k in range(8)]
        exact = numpy.concatenate([numpy.sin(angles), numpy.cos(angles)])
        # Values of at most 1, stored in float32.
        numpy.testing.assert_allclose(to_numpy64(table[i]), exact, atol=1e-6)
    first = to_numpy64(table)
    table[...] = 0
    assert (to_numpy64(sampler.embeddings(16, like=like)) == first).all()
    table = sampler.embeddings(16, like=like)
    swapped = sampler.embeddings(16, like=like, cos_first=True)
    assert (to_numpy64(swapped)[:, :8] == to_numpy64(table)[:, 8:]).all()
    with pytest.raises(TypeError, match="^DiffusionSampler.embeddings: like must be .*got list"):
        sampler.embeddings(16, like=[1.0])
    for dim in (2, 15, 0, 3.0):
        with pytest.raises(ValueError, match=f"^timestep_embeddings: dim .*{dim}"):
            sampler.embeddings(dim, like=like)


FIRST_CALLS = ["fake tensors", "inference mode", "a meta tensor", "functionalize", "compiled"]


@each_library(library="torch")
@pytest.mark.parametrize("first", FIRST_CALLS)
def test_embeddings_do_not_keep_what_surrounds_the_first_call(target, first):
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    sampler, x = cupyflash.DiffusionSampler.ddim(BETAS, 10), torch.ones(2, device=target.device)
    call = lambda like: sampler.embeddings(16, like=like) + 0
    if first == "fake tensors":
        with FakeTensorMode() as mode:
            assert type(call(mode.from_tensor(x))) is FakeTensor
    elif first == "inference mode":
        with torch.inference_mode():
            call(x)
            sampler.step(x, x, 3)
    elif first == "a meta tensor":
        assert call(x.to("meta")).is_meta
    elif first == "functionalize":
        torch.func.functionalize(call)(x)
    else:
        torch.compile(call, backend="aot_eager", dynamic=False)(x)
    table = sampler.embeddings(16, like=x)
    assert type(table) is torch.Tensor and table.device == x.device and not table.is_inference()
    assert (to_numpy64(table) == cupyflash.timestep_embeddings(sampler.timesteps, 16)).all()
    assert table.requires_grad_().square().sum().backward() is None


@each_library()
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_sampler(target, way):
    """After its tables have been made, on a device too."""
    sampler, x = (
        cupyflash.DiffusionSampler.ddpm(BETAS, 10),
        stored(target, normal((2, 8), 0), "float32"),
    )
    arrays = lambda s: (s.embeddings(8, like=x), s.step(x, x, 3, seed=1))
    expected = arrays(sampler)
    again = copy.deepcopy(sampler) if way == "deepcopy" else pickle.loads(pickle.dumps(sampler))
    assert again.timesteps == sampler.timesteps
    for a, b in zip(arrays(again), expected):
        assert type(a) is type(b) and (a == b).all()
    for one in (sampler, again):  # what a device has would not change with it
        with pytest.raises(ValueError, match="read-only"):
            one.coefficients[0] = 0


@each_library(library="torch")
def test_a_step_within_a_transform_is_refused(target):
    """functionalize hands over tensors whose memory nobody has written."""
    import torch

    x = torch.ones(2, 8, device=target.device)
    call = lambda x: SAMPLERS["ddim"].step(x, x, 3)
    for transform in (torch.func.functionalize, torch.func.vmap):
        bad(NotImplementedError, "transform of torch.func", lambda: transform(call)(x))  # noqa: B023


def bad(error, match, call):
    with pytest.raises(error, match=f"^DiffusionSampler.step: .*{match}"):
        call()


@each_library()
def test_bad_input(target):
    sampler = SAMPLERS["ddpm"]
    make = lambda shape=(2, 24), dtype="float32": stored(target, normal(shape, 3), dtype)
    x = make()
    step = lambda *a, **options: lambda: sampler.step(*a, **{"seed": 1} | options)
    bad(ValueError, "step.*0 to 49.*50", step(x, x, 50))
    bad(ValueError, "step.*-1", step(x, x, -1))
    bad(TypeError, "step", step(x, x, 1.5))
    bad(TypeError, "step.*int32 or int64", step(x, x, make((2,))))
    bad(ValueError, r"step.*\(2,\)", step(x, x, indices(target, [1, 2, 3])))
    bad(ValueError, r"predicted.*\(2, 23\)", step(x, make((2, 23)), 1))
    bad(TypeError, "predicted.*float16", step(make(dtype="float16"), x, 1))
    bad(TypeError, "predicted.*list", step(x, [1.0], 1))
    bad(ValueError, r"noise.*\(3, 24\)", step(x, x, 1, seed=None, noise=make((3, 24))))
    bad(ValueError, "noise or a seed, got both", step(x, x, 1, noise=x))
    bad(ValueError, "got neither", step(x, x, 1, seed=None))
    bad(ValueError, "got neither", step(x, x, indices(target, 1), seed=None))
    for seed in (-1, 2**64, 1.5):
        bad(ValueError, "seed", step(x, x, 1, seed=seed))
    for clip in (0, -1.0, float("inf"), float("nan")):
        bad(ValueError, "clip", step(x, x, 1, clip=clip))
    bad(ValueError, "dense", step(make((2, 48))[:, ::2], x, 1))
    bad(ValueError, "strides", step(x, make((2, 48))[:, :24], 1))
    bad(ValueError, "outermost", step(make((24, 2)).T, make((24, 2)).T, 1))
    assert sampler.step(x, x, 49) is not x  # the last step needs no noise


@each_library(library="torch")
def test_no_gradient(target):
    x = stored(target, normal((2, 24), 3), "float32").requires_grad_()
    with pytest.raises(NotImplementedError, match="no_grad"):
        SAMPLERS["ddim"].step(x, x, 1)


@pytest.mark.parametrize("betas", [[], [0.1, 1.0], [0.0], [[0.1]]], ids=str)
def test_bad_betas(betas):
    for make in (cupyflash.DiffusionSampler.ddpm, cupyflash.DiffusionSampler.ddim):
        with pytest.raises(ValueError, match="betas must be"):
            make(betas)


def test_betas_that_leave_less_than_float32_holds():
    """A coefficient of 1e40 would be infinite on the device, and each step NaN."""
    betas = cupyflash.beta_schedule("linear", 1000, beta_start=0.1, beta_end=0.5)
    for make in (cupyflash.DiffusionSampler.ddpm, cupyflash.DiffusionSampler.ddim):
        with pytest.raises(ValueError, match="^DiffusionSampler: coefficients .*float32.*got"):
            make(betas)
        table = make(betas, prediction_type="v_prediction").coefficients
        assert numpy.isfinite(table).all()


def test_bad_sampler_options():
    for steps in (0, 51, 2.0):
        with pytest.raises(ValueError, match=f"^ddim: num_steps .*{steps}"):
            cupyflash.DiffusionSampler.ddim(BETAS, steps)
    with pytest.raises(ValueError, match="^ddim: eta .*2"):
        cupyflash.DiffusionSampler.ddim(BETAS, eta=2)
    with pytest.raises(ValueError, match="^ddpm: variance .*'learned'"):
        cupyflash.DiffusionSampler.ddpm(BETAS, variance="learned")


# As diffusers has it -------------------------------------------------------------------------


def float32_betas(*arguments, **options):
    """Betas that diffusers, which rounds them, has as well."""
    return cupyflash.beta_schedule(*arguments, **options).astype("float32").astype("float64")


SCHEDULES = {
    "linear": float32_betas("linear", 1000),
    "scaled_linear": float32_betas("scaled_linear", 1000, beta_start=0.00085, beta_end=0.012),
    "cosine": float32_betas("cosine", 100),
}
EXTRAS = [
    {},
    {"steps_offset": 1, "set_alpha_to_one": False, "eta": 0.3},
    {"rescale_betas_zero_snr": True, "eta": 0.8, "variance": "large"},
    {"thresholding": True, "dynamic_thresholding_ratio": 0.9, "sample_max_value": 1.5},
    {"clip": 1.0, "variance": "large", "set_alpha_to_one": False},
]
FACTORS = {
    "method": ["ddpm", "ddim"],
    "schedule": list(SCHEDULES),
    "prediction_type": ["epsilon", "v_prediction", "sample"],
    "timestep_spacing": ["leading", "trailing", "linspace"],
    "num_steps": [7, 10, 16],  # 1000 / 16 is a half, which must be rounded as diffusers does
    "extra": [0, 1, 2, 3, 4],
}


def points():
    """Samplers in which every two options meet; without a step from nothing but noise by noise."""
    for point in pairwise(FACTORS):
        more = EXTRAS[point.pop("extra")]
        first = point["timestep_spacing"] != "leading" and "rescale_betas_zero_snr" in more
        if first and point["prediction_type"] == "epsilon":
            point["prediction_type"] = "v_prediction"
        yield {**point, **more}


def their_scheduler(point, wide):
    """diffusers' scheduler of a point, with its tables in float64 if ``wide``."""
    import diffusers
    import torch

    names = {"prediction_type", "timestep_spacing", "steps_offset", "rescale_betas_zero_snr"}
    names |= {"thresholding", "dynamic_thresholding_ratio", "sample_max_value"}
    options = {name: value for name, value in point.items() if name in names}
    options |= {"clip_sample": "clip" in point, "clip_sample_range": point.get("clip", 1.0)}
    betas = SCHEDULES[point["schedule"]]
    if point["method"] == "ddpm":
        options["variance_type"] = f"fixed_{point.get('variance', 'small')}"
        scheduler = diffusers.DDPMScheduler(len(betas), trained_betas=betas, **options)
    else:
        options["set_alpha_to_one"] = point.get("set_alpha_to_one", True)
        scheduler = diffusers.DDIMScheduler(len(betas), trained_betas=betas, **options)
    scheduler.set_timesteps(point["num_steps"])
    if wide:
        from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

        betas = torch.from_numpy(betas)
        if point.get("rescale_betas_zero_snr"):
            betas = rescale_zero_terminal_snr(betas)
        scheduler.alphas_cumprod = torch.cumprod(1 - betas, 0)
        scheduler.one = torch.tensor(1.0, dtype=torch.float64)
        one = point.get("set_alpha_to_one", True)
        scheduler.final_alpha_cumprod = scheduler.one if one else scheduler.alphas_cumprod[0]
    return scheduler


def our_sampler(point):
    """The same of this library."""
    names = {"method", "schedule", "num_steps", "clip"}
    names |= {"eta", "set_alpha_to_one"} if point["method"] == "ddpm" else {"variance"}
    options = {name: value for name, value in point.items() if name not in names}
    make = getattr(cupyflash.DiffusionSampler, point["method"])
    return make(SCHEDULES[point["schedule"]], point["num_steps"], **options)


def their_step(scheduler, point, i, x, predicted, noise_seed, dtype):
    """A step of diffusers on the CPU, and the noise that it draws, float32."""
    import torch

    x, predicted = (torch.from_numpy(y).to(dtype) for y in (x, predicted))
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(noise_seed))
    t = int(scheduler.timesteps[i])
    if point["method"] == "ddim":
        options = {"eta": point.get("eta", 0.0), "variance_noise": noise.to(dtype)}
        return scheduler.step(predicted, t, x, **options).prev_sample.numpy(), noise.numpy()
    module = importlib.import_module(type(scheduler).__module__)
    original = module.randn_tensor
    module.randn_tensor = lambda *_, **options: noise.to(dtype)
    try:
        return scheduler.step(predicted, t, x).prev_sample.numpy(), noise.numpy()
    finally:
        module.randn_tensor = original


@each_library()
def test_steps_are_those_of_diffusers(target):
    """Every step of every kind of sampler, beside diffusers with tables in float64."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    for point in points():
        wide, plain = their_scheduler(point, True), their_scheduler(point, False)
        sampler = our_sampler(point)
        assert list(sampler.timesteps) == wide.timesteps.tolist(), point
        for i in range(sampler.num_steps):
            values = 1.5 * normal((2, 3, 5, 4), i), normal((2, 3, 5, 4), (i, 1))
            exact, noise = their_step(wide, point, i, *values, i, torch.float64)
            baseline, _ = their_step(plain, point, i, *values, i, torch.float32)
            x, predicted, given = (stored(target, y, "float32") for y in (*values, noise))
            out = to_numpy64(sampler.step(x, predicted, i, noise=given, clip=point.get("clip")))
            c = numpy.abs(sampler.coefficients[i].astype("float64"))
            x0 = c[0] * abs(values[0]).max() + c[1] * abs(values[1]).max()
            terms = c[2] * x0 + c[3] * abs(values[0]).max() + c[4] * abs(values[1]).max()
            terms += c[5] * abs(noise).max()
            assert numpy.isfinite(exact).all(), f"{point}, step {i}"
            # Where their own tables are of float32 a root of something below 0 gives NaN.
            baseline = numpy.where(numpy.isfinite(baseline), baseline, exact)
            assert_close_to_float64(
                out, exact, baseline.astype("float64"), "float32", f"{point}, step {i}",
                terms=float(terms),
            )  # fmt: skip


@each_library()
def test_a_whole_loop_of_diffusers(target):
    """Stable Diffusion's DDIM: 1000 training steps, 20 taken, offset 1, alpha not to one."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    point = {
        "method": "ddim",
        "schedule": "scaled_linear",
        "num_steps": 20,
        "steps_offset": 1,
        "set_alpha_to_one": False,
        "prediction_type": "v_prediction",
    }
    wide, sampler = their_scheduler(point, True), our_sampler(point)
    start = normal((1, 4, 8, 8), 0)
    x, exact, yardstick = stored(target, start, "float32"), start.astype("float64"), start
    for i in range(20):
        predicted = normal((1, 4, 8, 8), (1, i))
        exact, _ = their_step(wide, point, i, exact, predicted, 0, torch.float64)
        yardstick, _ = their_step(wide, point, i, yardstick, predicted, 0, torch.float32)
        yardstick = yardstick.astype("float32")
        x = sampler.step(x, stored(target, predicted, "float32"), i)
    terms = 20 * float(abs(exact).max())  # each step rounds anew
    assert_close_to_float64(x, exact, yardstick, "float32", "x", terms=terms)


@each_library()
@pytest.mark.parametrize("shape", [(3, 16, 10), (2, 7, 3), (1, 1001), (6,), (4, 8, 6, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_seeds_of_the_samples(target, shape, dtype):
    """The noise of a sample is that of its seed, wherever in the batch it lies."""
    sampler = SAMPLERS["ddpm"]
    storage = "channels_last" if len(shape) == 4 else "contiguous"
    values = normal(shape, 0)
    seeds = numpy.random.default_rng(0).integers(-(2**63), 2**63, shape[0])
    x = stored(target, values, dtype, storage)
    out = sampler.step(x, x, 3, seed=indices(target, seeds))
    each = indices(target, numpy.full(shape[0], 3))
    assert (sampler.step(x, x, each, seed=indices(target, seeds)) == out).all()
    for i, seed in enumerate(seeds):
        one = stored(target, values[i : i + 1], dtype, storage)
        right = sampler.step(one, one, 3, seed=int(seed) % 2**64)
        assert (out[i : i + 1] == right).all()


@each_library()
@pytest.mark.parametrize("shape", [(3, 16, 10), (2, 7, 3), (4, 8, 6, 5)], ids=str)
def test_thresholding(target, shape):
    """One index for all, as int and as array, one for each sample; NaN stays in its sample."""
    options = {"thresholding": True, "dynamic_thresholding_ratio": 0.8, "sample_max_value": 3.0}
    sampler = cupyflash.DiffusionSampler.ddim(BETAS, 10, **options)
    storage = "channels_last" if len(shape) == 4 else "contiguous"
    for dtype in target.dtypes:
        arrays = [stored(target, 2 * normal(shape, i), dtype, storage) for i in range(2)]
        wide = [to_numpy64(y) for y in arrays]
        each = numpy.arange(shape[0]) + 2
        for step, numbers in [(4, 4), (indices(target, [4]), 4), (indices(target, each), each)]:
            out = to_numpy64(sampler.step(*arrays, step))
            run = lambda arrays: reference.step(
                sampler.coefficients, *arrays, None, numpy.asarray(numbers), None, None,  # noqa: B023
                (), sampler.threshold,
            )  # fmt: skip
            exact = run(wide)
            narrow = run([y.astype(numpy_dtype(dtype)) for y in wide]).astype("float64")
            c = numpy.abs(sampler.coefficients[numbers]).reshape(-1, 6).max(0)
            largest = [abs(y).max() for y in wide]
            x0 = c[0] * largest[0] + c[1] * largest[1]
            terms = c[2] * x0 + c[3] * largest[0] + c[4] * largest[1]
            assert_close_to_float64(out, exact, narrow, dtype, "x", terms=float(terms))
    broken = wide[0].copy()
    broken[(1, *[0] * (len(shape) - 1))] = numpy.nan
    out = to_numpy64(sampler.step(stored(target, broken, dtype, storage), arrays[1], 4))
    assert numpy.isnan(out[1]).all() and not numpy.isnan(out[[0]]).any()


@each_library(device="cuda")
def test_steps_outside_of_the_table_with_thresholding(target):
    sampler = cupyflash.DiffusionSampler.ddim(BETAS, 10, thresholding=True)
    x = stored(target, normal((3, 8), 0), "float32")
    out = to_numpy64(sampler.step(x, x, indices(target, [3, 10, -1])))
    assert not numpy.isnan(out[0]).any() and numpy.isnan(out[1:]).all()


def test_options_are_refused():
    ddim, ddpm = cupyflash.DiffusionSampler.ddim, cupyflash.DiffusionSampler.ddpm
    for make in (ddim, ddpm):
        name = make.__name__
        for option, value, match in [
            ("prediction_type", "noise", "'epsilon', 'v_prediction' or 'sample', got 'noise'"),
            ("timestep_spacing", "even", "'leading', 'trailing' or 'linspace', got 'even'"),
            ("steps_offset", -1, "integer from 0"),
            ("steps_offset", 50, "at most 49.*steps_offset.*got 99"),
            ("rescale_betas_zero_snr", 1, "False or True, got 1"),
            ("thresholding", 0.995, "False or True"),
            ("dynamic_thresholding_ratio", 1.0, "above 0 and below 1"),
            ("sample_max_value", 0.5, "at least 1, got 0.5"),
        ]:
            with pytest.raises(ValueError, match=f"^{name}: .*{match}"):
                make(BETAS, **{option: value})
        with pytest.raises(TypeError, match=f"^{name}: options must be among .*clip_sample"):
            make(BETAS, clip_sample=True)
        with pytest.raises(ValueError, match=f"^{name}: betas must be below 1 .*'epsilon'"):
            make(BETAS, rescale_betas_zero_snr=True)
        make(BETAS, 10, rescale_betas_zero_snr=True)  # takes no step without signal
        make(BETAS, rescale_betas_zero_snr=True, prediction_type="sample")
    sampler = ddim(BETAS, thresholding=True)
    x = normal((2, 4), 0)
    with pytest.raises(ValueError, match="clip must be None where the sampler has thresholding"):
        sampler.step(x, x, 0, clip=1.0)


# Wrong calls ---------------------------------------------------------------------------------


def named(name, function):
    """The function under the name that its errors have."""
    call = lambda **arguments: function(**arguments)
    call.__name__ = name
    return call


SEQUENCE = ("text", 3, None, {}, object(), ["a"], [[1.0]], [math.nan], [math.inf], [1j])
POSITIVE = (*wrong_calls.NUMBER, 0, -1.0)
WHOLE = (*wrong_calls.INTEGER, 0, -1)


def test_wrong_calls_of_schedules():
    fraction = (*POSITIVE, 1.0, 2)
    wrong_calls.check_refused(
        cupyflash.beta_schedule,
        {"kind": "linear", "num_steps": 10, "beta_start": 0.1, "beta_end": 0.2},
        {
            "kind": (*wrong_calls.CHOICE, None),
            "num_steps": (*WHOLE, None),
            "beta_start": (*fraction, None),
            "beta_end": (*fraction, None),
        },
        least=60,
    )
    wrong_calls.check_refused(
        cupyflash.timestep_embeddings,
        {
            "timesteps": [1, 2],
            "dim": 8,
            "max_period": 100.0,
            "freq_shift": 0.0,
            "cos_first": True,
        },
        {
            "timesteps": SEQUENCE,
            "dim": (*WHOLE, 7, None),
            "max_period": (*POSITIVE, None),
            "freq_shift": (*wrong_calls.NUMBER, -1.0, 4.0, None),
            "cos_first": (*wrong_calls.FLAG, None, 1),
        },
        least=70,
    )


@pytest.mark.parametrize("method", ["ddpm", "ddim"])
def test_wrong_calls_of_samplers(method):
    special = {"variance": (*wrong_calls.CHOICE, None)}
    if method == "ddim":
        special = {
            "eta": (*wrong_calls.NUMBER, -0.1, 1.1, None),
            "set_alpha_to_one": (*wrong_calls.FLAG, None, 1),
        }
    good = {"betas": [0.1, 0.2, 0.3], "num_steps": 2, "prediction_type": "sample"}
    wrong_calls.check_refused(
        getattr(cupyflash.DiffusionSampler, method),
        good,
        {
            "betas": (*SEQUENCE, [], [0.0], [1.1], [-0.1], [1.0, 0.5], [True]),
            "num_steps": (*WHOLE, 4),
            "prediction_type": (*wrong_calls.CHOICE, None),
            "timestep_spacing": (*wrong_calls.CHOICE, None),
            "steps_offset": (*wrong_calls.INTEGER, -1, 2, None),
            "rescale_betas_zero_snr": (*wrong_calls.FLAG, None, 1),
            "thresholding": (*wrong_calls.FLAG, None, 1),
            "dynamic_thresholding_ratio": (*POSITIVE, 1.0, None),
            "sample_max_value": (*POSITIVE, 0.5, None),
            "no_such_option": (1,),
            **special,
        },
        least=100,
    )


def test_wrong_calls_of_the_constructor():
    table = numpy.ones((2, 6))
    wrong_calls.check_refused(
        cupyflash.DiffusionSampler,
        {"timesteps": [1, 0], "coefficients": table, "threshold": (0.9, 2.0)},
        {
            "timesteps": (*SEQUENCE, [1], [1, -1], [1, 0.5], [2**40, 0], [1, 0, 0]),
            "coefficients": (
                *("text", 3, None, {}, object(), table[:1], table[:, :5], table[None]),
                *(table * math.nan, table * math.inf, table.astype(object), table * 1j),
                table * 1e39,  # infinite in float32
            ),
            "threshold": (
                *("text", 3, {}, object(), (), (0.9,), (0.9, 2.0, 3.0), [0.9, 2.0]),
                *((0.9, 0.5), (1.0, 2.0), (0.0, 2.0), (math.nan, 2.0), (0.9, math.nan)),
                *((0.9, math.inf), ("a", "b"), (None, None), (True, 2.0)),
            ),
        },
    )


@each_library()
def test_wrong_calls_of_a_step(target):
    sampler = SAMPLERS["ddpm"]
    x, predicted = (stored(target, normal((2, 24), i), "float32") for i in range(2))
    good = {"x": x, "predicted": predicted, "step": 3, "seed": 1, "clip": 1.0}
    of_x = wrong_calls.array(x)
    each = indices(target, [1, 2])
    wrong_calls.check_refused(
        named("DiffusionSampler.step", sampler.step),
        good,
        {
            "x": of_x,
            "predicted": (*of_x, predicted[:1], predicted[:, :3]),
            "step": (*wrong_calls.INTEGER, -1, 50, None, x, indices(target, [1, 2, 3])),
            "seed": (
                *wrong_calls.INTEGER, -1, 2**64, x, each[:1], indices(target, [1, 2], "int32"),
                None,
            ),
            "noise": (x, *of_x[:6]),
            "clip": (*wrong_calls.NUMBER, 0, -1.0),
        },
        least=80,
    )  # fmt: skip
