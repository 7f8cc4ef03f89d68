"""The U-Net of diffusion policies: with our kernels equal to plain torch, end to end."""

import copy
import pickle

import pytest
from arrays import normal, stored
from matrix import each_library

import cupyflash
from cupyflash.testing import assert_close_to_float64

pytest.importorskip("torch")
STEPS = 10


@pytest.fixture(autouse=True)
def one_thread():
    """The threads of torch's convolutions would wait for each other on a busy CPU."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain_ddpm(model, betas, condition, x, noise):
    """The sampling loop written down with torch's operations alone."""
    import torch

    alphas = torch.cumprod(1 - torch.from_numpy(betas), 0).to(x.device)
    half = model.embedding // 2
    frequencies = 10000 ** (-torch.arange(half, device=x.device).double() / (half - 1))
    for t in reversed(range(len(betas))):
        angles = t * frequencies
        embedding = torch.cat([angles.sin(), angles.cos()]).to(x.dtype)
        predicted = model(x, embedding, condition)
        now, before = alphas[t], alphas[t - 1] if t else torch.ones_like(alphas[0])
        sample = ((x - (1 - now).sqrt() * predicted) / now.sqrt()).clamp(-1, 1)
        beta = 1 - now / before
        mean = before.sqrt() * beta / (1 - now) * sample
        mean = mean + (now / before).sqrt() * (1 - before) / (1 - now) * x
        sigma = ((1 - before) / (1 - now) * beta).sqrt()
        x = (mean + sigma * noise[t]).to(x.dtype)
    return x


def modules():
    from cupyflash.models.diffusion_policy import PolicyUnet
    from cupyflash.models.policy_sampling import ActionSampler

    return PolicyUnet, ActionSampler


@pytest.fixture
def without_tf32(monkeypatch):
    """Convolutions of torch in float32 are exact to its rounding, on a GPU as well."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@each_library(library="torch")
@pytest.mark.parametrize(
    ("widths", "batch", "length"), [((16, 32), 3, 16), ((16, 32, 24), 1, 12), ((24,), 2, 5)]
)
def test_sampling_is_that_of_torch(target, without_tf32, widths, batch, length):
    """DDPM in float32; both see the same noise."""
    import torch

    PolicyUnet, ActionSampler = modules()
    torch.manual_seed(0)
    model = PolicyUnet(7, 20, widths=widths).to(target.device)
    betas = cupyflash.beta_schedule("cosine", STEPS)
    sampler = cupyflash.DiffusionSampler.ddpm(betas)
    condition = stored(target, normal((batch, 20), 1), "float32")
    x = stored(target, normal((batch, 7, length), 2), "float32")
    sample = ActionSampler(model, sampler, batch, length)
    ours = sample(condition, x, seed=5)
    noise = sample.noise[:, :, :7].flip(0)
    model.use_kernels(False)
    with torch.no_grad():
        torchs = plain_ddpm(model, betas, condition, x, noise)
        # What one last place in the input changes: rounding errors grow with the steps.
        moved = plain_ddpm(model, betas, condition, torch.nextafter(x, x + 1), noise)
    rounding = (moved - torchs).abs().max() + 2.0**-20
    assert (ours - torchs).abs().max() <= STEPS * rounding
    assert torchs.abs().max() <= 1.0 + 1e-5 and torchs.std() > 0.1
    assert (sample(condition, x, seed=5) == ours).all()
    assert (sample(condition, x, seed=6) != ours).any()


@each_library(library="torch")
@pytest.mark.parametrize("kind", ["ddim", "ddpm"])
def test_inference_mode_leaves_nothing_behind(target, kind):
    """Made in it, called outside, or the other way round: memory of a sampler is written anew."""
    import torch

    PolicyUnet, ActionSampler = modules()
    torch.manual_seed(0)
    model = PolicyUnet(7, 20, widths=(16, 32)).to(target.device)
    sampler = getattr(cupyflash.DiffusionSampler, kind)(cupyflash.beta_schedule("cosine", STEPS))
    arrays = [stored(target, normal(s, 1), "float32") for s in ((2, 20), (2, 7, 8))]
    expected = ActionSampler(model, sampler, 2, 8)(*arrays, seed=1)
    with torch.inference_mode():
        sample = ActionSampler(model, copy.deepcopy(sampler), 2, 8)
    assert (sample(*arrays, seed=1) == expected).all()
    sample = ActionSampler(model, sampler, 2, 8)
    with torch.inference_mode():
        assert (sample(*arrays, seed=1) == expected).all()
    assert (sample(*arrays, seed=1) == expected).all()
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="^ActionSampler: cannot be copied or pickled"):
            way(sample)


@each_library(library="torch", device="cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["ddim", "ddpm"])
def test_graph(target, kind, dtype):
    """Replays give what the launches give, with the inputs of each call."""
    import torch

    PolicyUnet, ActionSampler = modules()
    torch.manual_seed(0)
    model = PolicyUnet(7, 20, widths=(32, 64)).to(target.device, getattr(torch, dtype))
    sampler = getattr(cupyflash.DiffusionSampler, kind)(cupyflash.beta_schedule("cosine", STEPS))
    plain, graph = (ActionSampler(model, sampler, 5, 8, graph=x) for x in (False, True))
    for seed in range(3):
        condition, x = (
            stored(target, normal(shape, seed), "float32") for shape in ((5, 20), (5, 7, 8))
        )
        first, second = (sample(condition, x, seed=seed) for sample in (plain, graph))
        assert (first == second).all() and first.std() > 0.1


@each_library(library="torch", device="cuda")
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_half_precision(target, batch):
    """DDIM in bfloat16: no further from float64 than twice torch's own."""
    import torch

    PolicyUnet, ActionSampler = modules()
    torch.manual_seed(0)
    model = PolicyUnet(7, 20, widths=(64, 128)).to(target.device, torch.bfloat16)
    model.use_kernels(False)
    sampler = cupyflash.DiffusionSampler.ddim(cupyflash.beta_schedule("cosine", STEPS))
    condition, start = (
        stored(target, normal(shape, 1), "float32") for shape in ((batch, 20), (batch, 7, 16))
    )

    @torch.no_grad()
    def plain(model, dtype, wide):
        x, embeddings = start.to(wide), sampler.embeddings(model.embedding, like=start)
        for i, row in enumerate(sampler.coefficients.tolist()):
            predicted = model(x.to(dtype), embeddings[i].to(dtype), condition.to(dtype)).to(wide)
            clipped = (row[0] * x + row[1] * predicted).clamp(-1, 1)
            x = row[2] * clipped + row[3] * x + row[4] * predicted
        return x.double()

    exact = plain(copy.deepcopy(model).double(), torch.float64, torch.float64)
    torchs = plain(model, torch.bfloat16, torch.float32)
    ours = ActionSampler(model, sampler, batch, 16)(condition, start)
    # Actions are float32; as many of its last places as make half of one of bfloat16.
    terms = 2.0**15 * float(exact.abs().max())
    assert_close_to_float64(ours, exact, torchs, "float32", "actions", terms=terms)


def test_bad_input():
    import torch

    PolicyUnet, ActionSampler = modules()
    model = PolicyUnet(7, 20, widths=(16, 32))
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", STEPS))
    for batch, length in ((0, 8), (1, 0), (1, 7)):
        with pytest.raises(ValueError, match=f"^ActionSampler: .*multiple of 2, got {batch} and"):
            ActionSampler(model, sampler, batch, length)
    with pytest.raises(ValueError, match="^ActionSampler: graph needs .*got cpu"):
        ActionSampler(model, sampler, 1, 8, graph=True)
    betas = cupyflash.beta_schedule("cosine", STEPS)
    thresholding = cupyflash.DiffusionSampler.ddpm(betas, thresholding=True)
    with pytest.raises(ValueError, match="^ActionSampler: the sampler must have no thresholding"):
        ActionSampler(model, thresholding, 1, 8)
    sample = ActionSampler(model, sampler, 2, 8)
    condition, noise = torch.zeros(2, 20), torch.zeros(2, 7, 8)
    with pytest.raises(ValueError, match=r"^ActionSampler: condition must be \(2, 20\), .*1, 20"):
        sample(condition[:1], noise, seed=1)
    with pytest.raises(ValueError, match=r"^ActionSampler: noise must be \(2, 7, 8\), .*2, 7, 4"):
        sample(condition, noise[..., :4], seed=1)
    with pytest.raises(ValueError, match="^ActionSampler: .*needs a seed, got None"):
        sample(condition, noise)
    for batch, length in ((2.0, 8), ("2", 8), (None, 8), (2, 8.0), (2, True)):
        with pytest.raises(TypeError, match="^ActionSampler: .* must be an integer, got"):
            ActionSampler(model, sampler, batch, length)
    # Actions like integers would be cut off at the point.
    for wrong in (condition.numpy(), condition.long(), [[0.0]], None):
        with pytest.raises(TypeError, match="^ActionSampler: condition must be .*, got"):
            sample(wrong, noise, seed=1)
    for wrong in (noise.numpy(), noise.long(), [[0.0]], None):
        with pytest.raises(TypeError, match="^ActionSampler: noise must be .*, got"):
            sample(condition, wrong, seed=1)
    for wrong in ("1", 1.5, torch.ones(2), 2**70):
        with pytest.raises((TypeError, ValueError), match="^ActionSampler: seed must be .*, got"):
            sample(condition, noise, seed=wrong)


@each_library(library="torch")
def test_gradients_of_the_model(target, without_tf32):
    """Training through our GroupNorm + Mish gives torch's gradients."""
    import torch

    from cupyflash.models.diffusion_policy import PolicyUnet

    torch.manual_seed(0)
    model = PolicyUnet(7, 20, widths=(16, 32)).to(target.device)
    x, condition = (stored(target, normal(s, 1), "float32") for s in ((4, 7, 16), (4, 20)))
    embedding = torch.from_numpy(cupyflash.timestep_embeddings([3], 64)[0]).to(target.device)
    gradients = []
    for fused in (True, False):
        model.use_kernels(fused)
        loss = model(x, embedding, condition).square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, torchs in zip(*gradients):
        assert (ours - torchs).abs().max() <= 1e-4 * torchs.abs().max() + 1e-7


@pytest.mark.parametrize(
    ("launches", "has_scratch", "copies"),
    [(0, False, 0), (1, False, 0), (1, True, 0), (2, False, 0), (1, False, 1)],
)
def test_prepared_calls(launches, has_scratch, copies):
    """One launch is repeated with its parameters, on the stream of then; others are called."""
    from cupyflash.runtime.launch import Launch, Prepared, copies_were_made
    from cupyflash.runtime.torch_library import raw_stream

    launch, started, called = Launch.__new__(Launch), [], []
    launch.grid = launch.threads = 1
    launch.shared_memory = 0
    launch.cooperative = launch.dependent = False
    launch.has_scratch = has_scratch
    launch.function = lambda *launch: started.append((launch[2], launch[4]))

    def call():
        called.append(None)
        for _ in range(copies):
            copies_were_made()
        for _ in range(launches):
            launch.start(raw_stream(1), b"abc")
        return "result"

    prepared = Prepared(call, lambda: raw_stream(2))
    assert [prepared(), prepared()] == ["result", "result"]
    repeated = launches == 1 and not has_scratch and not copies
    assert len(called) == (1 if repeated else 2)
    assert len(started) == 2 * launches
    assert not launches or started[-1] == (b"abc", 2 if repeated else 1)
