"""Models of diffusers, whose attention torch's hook brings here: its own registry has fixed names.

On a CPU, `OnTheFlashBackend` stands in for the choice that torch makes on a GPU, and calls the
operator of its flash backend.
"""

import contextlib
import copy

import pytest
from arrays import normal, stored
from matrix import each_library

from cupyflash.testing import assert_close_to_float64

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from torch_hook import active, flash_sdpa, names_of_calls, needs_hook  # noqa: E402

HALF = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    return names_of_calls(monkeypatch)


def flux():
    """Two blocks; text and image tokens together."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    shapes = {
        "hidden_states": (1, 30, 4), "encoder_hidden_states": (1, 7, 32),
        "pooled_projections": (1, 32), "img_ids": (30, 3), "txt_ids": (7, 3), "timestep": (1,),
    }  # fmt: skip
    return model, shapes, 2


def wan():
    """Two blocks, each with attention among the tokens of a video and to those of a text."""
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    shapes = {"hidden_states": (1, 4, 2, 8, 8), "encoder_hidden_states": (1, 7, 16)}
    return model, shapes | {"timestep": (1,)}, 4


def sdxl():
    """One transformer on the way down and in the middle, two on the way up; of one block each."""
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80, cross_attention_dim=32, norm_num_groups=8,
    )  # fmt: skip
    shapes = {"sample": (2, 4, 16, 16), "encoder_hidden_states": (2, 7, 32), "timestep": ()}
    return model, shapes | {"text_embeds": (2, 32), "time_ids": (2, 6)}, 8


MODELS = {"flux": flux, "wan": wan, "sdxl": sdxl}


def sdpa_on_flash(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """The operator that SDPA calls on a GPU, of calls that torch gives to its flash backend."""
    assert attn_mask is None and query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[-1] <= 256 and not enable_gqa
    return flash_sdpa(query, key, value, dropout_p, is_causal, scale=scale)[0]


class OnTheFlashBackend(torch.overrides.TorchFunctionMode):
    """Every SDPA is `sdpa_on_flash`."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        is_sdpa = function is torch.nn.functional.scaled_dot_product_attention
        return (sdpa_on_flash if is_sdpa else function)(*arguments, **options or {})


@contextlib.contextmanager
def backend(model, name):
    """A backend of diffusers, which stays the active one of the process until it is reset."""
    if name is None:
        yield
        return
    model.set_attention_backend(name)
    try:
        yield
    finally:
        model.set_attention_backend("native")
        model.reset_attention_backend()


def inputs_of(target, shapes, dtype):
    made = {}
    for place, (name, shape) in enumerate(shapes.items()):
        x = stored(target, normal(shape, place), "float32")
        made[name] = (3 * x.abs()).round() if name == "timestep" else x.to(HALF).to(dtype)
    added = {name: made.pop(name) for name in ("text_embeds", "time_ids") if name in made}
    return made | ({"added_cond_kwargs": added} if added else {})


@needs_hook
@each_library(library="torch")
@pytest.mark.parametrize("name", [None, "native", "_native_flash"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_run_here(target, calls, kind, name):
    torch.manual_seed(0)
    make, shapes, number = MODELS[kind]()
    model = make.to(target.device, HALF).eval()
    run = lambda model, dtype: model(**inputs_of(target, shapes, dtype)).sample.detach()
    exact = run(copy.deepcopy(model).double(), torch.float64)
    theirs = run(model, HALF)
    assert not calls
    mode = contextlib.nullcontext() if target.gpu else OnTheFlashBackend()
    with active(target), mode, backend(model, name):
        ours = run(model, HALF)
    assert len(calls) == number
    assert_close_to_float64(ours, exact, theirs, "bfloat16", "sample")


@needs_hook
@each_library(library="torch", device="cuda")
def test_what_torch_gives_to_others_stays_there(target, calls):
    """Heads of 512, as in autoencoders, and masks: no error, and not computed here."""
    vae = diffusers.AutoencoderKL(block_out_channels=(512,), norm_num_groups=32)
    vae = vae.to(target.device, HALF)
    images = stored(target, normal((1, 3, 8, 8), 0), "bfloat16")
    q = stored(target, normal((1, 2, 9, 16), 0), "bfloat16")
    mask = torch.ones(9, 9, dtype=torch.bool, device=q.device)
    with active(target), torch.no_grad():
        assert vae.encode(images).latent_dist.mean.isfinite().all()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert not calls
