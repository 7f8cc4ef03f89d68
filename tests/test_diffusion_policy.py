"""The U-Net of diffusion policies: with our kernels equal to plain torch, end to end."""

import pytest
from arrays import normal, stored
from matrix import each_library

import cupyflash

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


@each_library(library="torch")
def test_sampling_is_that_of_torch(backend):
    """DDPM in float32; both see the same noise."""
    import torch

    from cupyflash.models.diffusion_policy import PolicyUnet, sample_actions
    from cupyflash.normal import normal as normal_of_seed

    torch.manual_seed(0)
    model = PolicyUnet(7, 20, widths=(16, 32)).to(backend.device)
    betas = cupyflash.beta_schedule("cosine", STEPS)
    sampler = cupyflash.DiffusionSampler.ddpm(betas)
    condition = stored(backend, normal((3, 20), 1), "float32")
    x = stored(backend, normal((3, 7, 16), 2), "float32")
    noise = [
        stored(backend, normal_of_seed(x.numel(), STEPS - 1 - t, 5).reshape(3, 7, 16), "float32")
        for t in range(STEPS)
    ]
    ours = sample_actions(model, sampler, condition, x, seed=5)
    model.use_kernels(False)
    with torch.no_grad():
        torchs = plain_ddpm(model, betas, condition, x, noise)
        # What one last place in the input changes: rounding errors grow with the steps.
        moved = plain_ddpm(model, betas, condition, torch.nextafter(x, x + 1), noise)
        fused = sample_actions(model, sampler, condition, x, seed=5)
    rounding = (moved - torchs).abs().max() + 2.0**-20
    assert (ours - torchs).abs().max() <= STEPS * rounding
    assert (fused - torchs).abs().max() <= STEPS * rounding
    assert torchs.abs().max() <= 1.0 + 1e-5 and torchs.std() > 0.1


@each_library(library="torch")
def test_gradients_of_the_model(backend, monkeypatch):
    """Training through our GroupNorm + Mish gives torch's gradients."""
    import torch

    from cupyflash.models.diffusion_policy import PolicyUnet

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = PolicyUnet(7, 20, widths=(16, 32)).to(backend.device)
    x, condition = (stored(backend, normal(s, 1), "float32") for s in ((4, 7, 16), (4, 20)))
    embedding = torch.from_numpy(cupyflash.timestep_embeddings([3], 64)[0]).to(backend.device)
    gradients = []
    for fused in (True, False):
        model.use_kernels(fused)
        loss = model(x, embedding, condition).square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, torchs in zip(*gradients):
        assert (ours - torchs).abs().max() <= 1e-4 * torchs.abs().max() + 1e-7
