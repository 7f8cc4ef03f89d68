"""attn_implementation="cupyflash" in small models of transformers, beside "eager".

Two computations in float32 differ by rounding. How far that carries, a model tells by itself: eager
attention once more, with every weight moved by one last place or not at all, at random. Results may
differ by `ROUNDING` times as much, and as many last places of the largest number beside them.
"""

import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from small_transformers import GROUPED, MODELS, small_inputs, small_model  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash.integrations import transformers as integration  # noqa: E402
from cupyflash.integrations import transformers_mask  # noqa: E402

ROUNDING = 4
DECODERS = ["gpt2", "llama", "mistral", "gemma2", "qwen3", "gpt-oss"]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


@pytest.fixture(autouse=True)
def registered():
    """Also one thread: those of two test processes wait for each other most of the time."""
    integration.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def to(inputs, device):
    return {name: x.to(device) for name, x in inputs.items()}


def results(model, inputs, kept=...):
    """Logits, loss and every gradient by name."""
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": out.logits[kept].detach(), "loss": out.loss.detach(), **gradients}


def moved(model):
    """The model, each weight moved by one last place up, down or not at all."""
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(1 + torch.randint_like(x, -1, 2) * torch.finfo(x.dtype).eps)
    return model


def assert_equal_but_rounding(actual, eager, rounded):
    assert actual.keys() == eager.keys()
    largest = max(x.abs().max() for name, x in eager.items() if name.endswith("weight"))
    for name, x in eager.items():
        noise = (rounded[name] - x).abs().max()
        # A bias of the keys shifts all scores of a row alike: its gradient is 0 but for rounding.
        cancels = name.endswith(("k_proj.bias", "key.bias"))
        last_place = torch.finfo(x.dtype).eps * (largest if cancels else x.abs().max())
        error = (actual[name] - x).abs().max()
        assert error <= ROUNDING * (noise + last_place), f"{name}: {error} with noise {noise}"


def check_beside_eager(name, device, inputs, kept=..., **changes):
    inputs = to(inputs, device)
    eager = results(small_model(name, "eager", device, **changes), inputs, kept)
    rounded = results(moved(small_model(name, "eager", device, **changes)), inputs, kept)
    actual = results(small_model(name, "cupyflash", device, **changes), inputs, kept)
    assert_equal_but_rounding(actual, eager, rounded)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_logits_loss_and_gradients(name, padding, device):
    lengths = (24, 24) if padding == "none" else (24, 17, 5)
    check_beside_eager(name, device, *small_inputs(name, padding, lengths))


@pytest.mark.parametrize("name", ["vit", "whisper", "t5"])
def test_encoders_and_cross_attention(name, device):
    check_beside_eager(name, device, *small_inputs(name))


def test_padding_with_gaps(device):
    inputs, tokens = small_inputs("bert", lengths=(24, 24))
    tokens[0, 3:9] = tokens[1, 20] = False
    inputs["attention_mask"] = tokens.long()
    inputs["labels"] = inputs["labels"].masked_fill(~tokens, -100)
    check_beside_eager("bert", device, inputs, tokens)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_half_precision(name, device):
    """As far from eager float32 as eager attention in bfloat16, within `ROUNDING` times.

    Eager's error is the largest that a parameter of this name has in any layer: the gradient of a
    bias of two numbers is a sum that cancels, and now and then right by accident.
    """
    inputs, kept = small_inputs(name)
    inputs, weights = to(inputs, device), {"num_local_experts": 2} if name == "gpt-oss" else {}
    exact = small_model(name, "eager", device, **weights)
    exact.load_state_dict({k: x.bfloat16() for k, x in exact.state_dict().items()})
    exact = results(exact, inputs, kept)
    half = {"dtype": torch.bfloat16, **weights}
    eager = results(small_model(name, "eager", device, **half), inputs, kept)
    actual = results(small_model(name, "cupyflash", device, **half), inputs, kept)
    errors = {key: (eager[key].float() - x).abs().max() for key, x in exact.items()}
    name_of = lambda key: re.sub(r"\.\d+\.", ".", key)
    for key, x in exact.items():
        same = max(error for other, error in errors.items() if name_of(other) == name_of(key))
        noise = same + x.abs().max() * 2**-8
        assert (actual[key].float() - x).abs().max() <= ROUNDING * noise, key


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", [*DECODERS, "whisper", "t5"])
def test_generate(name, padding, cache, device):
    lengths = (9, 9) if padding == "none" else (9, 4, 1)
    inputs, _ = small_inputs(name, padding, lengths)
    del inputs["labels"]
    generated = [
        transformers.GenerationMixin.generate(
            small_model(name, implementation, device), **to(inputs, device), do_sample=False,
            max_new_tokens=12, cache_implementation=cache, disable_compile=True,
            return_dict_in_generate=True, output_logits=True,
        )
        for implementation in ("eager", "cupyflash")
    ]  # fmt: skip
    eager, actual = (torch.stack(x.logits) for x in generated)
    assert (actual - eager).abs().max() <= 64 * torch.finfo(eager.dtype).eps * eager.abs().max()
    assert torch.equal(*(x.sequences for x in generated))


def packed(lengths, device):
    """One row of sequences, with what a collator for packed sequences hands to a model."""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    offsets = torch.tensor(starts, dtype=torch.int32, device=device)
    ids = torch.randint(3, 100, (1, sum(lengths)), device=device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    labels = ids.masked_fill(positions == 0, -100)
    sizes = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    offsets = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    inputs = {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}
    return inputs, {**offsets, **sizes}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("told", [True, False], ids=["cu_seq_lens", "position_ids"])
def test_packed_sequences(name, told, device, monkeypatch):
    inputs, offsets = packed((11, 1, 17), device)
    eager = results(small_model(name, "eager", device), inputs)
    rounded = results(moved(small_model(name, "eager", device)), inputs)
    other = results(small_model(name, "eager", device), inputs | {"position_ids": None})
    assert (other["logits"] - eager["logits"]).abs().max() > 1e-3
    if told:  # no mask is ever built
        monkeypatch.setattr(transformers_mask, "sdpa_mask", lambda *_, **__: pytest.fail("built"))
        inputs |= offsets
    actual = results(small_model(name, "cupyflash", device), inputs)
    assert_equal_but_rounding(actual, eager, rounded)


def test_packed_sequences_with_sinks(device):
    """Eager gpt-oss does not tell packed sequences apart; beside each sequence by itself."""
    q, k, v = torch.randn(3, 1, 4, 29, 16, device=device)
    starts = [0, 11, 12, 29]
    offsets = torch.tensor(starts, dtype=torch.int32, device=device)
    options = {"sliding_window": 7, "s_aux": torch.randn(4, device=device)}
    lengths = {"max_length_q": 17, "max_length_k": 17}
    lengths |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    module = torch.nn.Module()
    out, _ = integration.attention(module, q, k, v, None, **options, **lengths)
    alone = [
        integration.attention(module, *(x[:, :, a:b] for x in (q, k, v)), None, **options)[0]
        for a, b in zip(starts, starts[1:])
    ]
    torch.testing.assert_close(out, torch.cat(alone, dim=1))


def make_mask(tokens, q_length=None, kv_length=None, function=None, **arguments):
    rows, length = tokens.shape
    function = function or transformers.masking_utils.causal_mask_function
    return transformers_mask.mask(
        rows, q_length or length, kv_length or length, attention_mask=tokens,
        mask_function=function, **arguments,
    )  # fmt: skip


def test_padding_behind_the_tokens_becomes_lengths():
    bidirectional = transformers.masking_utils.bidirectional_mask_function
    tokens = torch.arange(6) < torch.tensor([[6], [2], [0]])
    for function in (None, bidirectional):
        lengths = make_mask(tokens, function=function)
        assert lengths.dtype == torch.int32
        assert lengths.flatten().tolist() == [6, 2, 0]
        assert make_mask(tokens[:1], function=function) is None
    keys = make_mask(tokens.flip(1))
    assert keys.dtype == torch.uint8
    assert keys.shape == (3, 1, 1, 6)
    # The causal diagonal ends at the last key, so that lengths would not do here.
    assert make_mask(tokens, q_length=3, q_offset=3).dtype == torch.uint8


def test_static_cache_becomes_lengths():
    function = transformers.masking_utils.causal_mask_function
    for offset in (4, torch.tensor(4)):
        lengths = transformers_mask.mask(2, 3, 16, offset, 0, function)
        assert lengths.dtype == torch.int32
        assert lengths.tolist() == [[[[7]]], [[[7]]]]


def test_nothing_is_read_while_decoding_or_compiling(monkeypatch):
    tokens = torch.ones(2, 6, dtype=torch.bool)
    assert make_mask(tokens, q_length=1, q_offset=5).dtype == torch.uint8
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert make_mask(tokens).dtype == torch.uint8


def test_own_mask_of_rank_4(device):
    """A bool or additive mask of the user is all there is."""
    inputs, _ = small_inputs("llama", lengths=(12, 12))
    visible = (torch.rand(2, 1, 12, 12) < 0.5) | torch.eye(12, dtype=torch.bool)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    check_beside_eager("llama", device, {**inputs, "attention_mask": additive})
    with torch.no_grad():
        model = small_model("llama", "cupyflash", device)
        first, second = (
            model(**to({**inputs, "attention_mask": mask}, device)).logits
            for mask in (visible, additive)
        )
    torch.testing.assert_close(first, second)


def test_dropout_in_training_follows_the_generator(device):
    inputs = to(small_inputs("llama")[0], device)
    model = small_model("llama", "cupyflash", device, attention_dropout=0.5)
    without = model(**inputs).loss
    model.train()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(**inputs).loss)
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert losses[0] != without
    losses[0].backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())


def test_gradient_checkpointing(device):
    inputs = to(small_inputs("gemma2")[0], device)
    gradients = []
    for checkpointing in (False, True):
        model = small_model("gemma2", "cupyflash", device).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        gradients.append(results(model, inputs))
    for name, x in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], x)


def test_compiled_model(device):
    """No graph break; the padding mask is not read."""
    inputs, kept = small_inputs("mistral", "left")
    inputs = to(inputs, device)
    model = small_model("mistral", "cupyflash", device, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits[kept], model(**inputs).logits[kept])


def test_autocast(device):
    inputs = to(small_inputs("llama")[0], device)
    losses = []
    for implementation in ("eager", "cupyflash"):
        model = small_model("llama", implementation, device)
        with torch.autocast(device, torch.bfloat16):
            losses.append(model(**inputs).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=2**-6, atol=0)


def test_values_with_fewer_columns_than_keys(device):
    q, k = torch.randn(2, 2, 4, 5, 24, device=device)
    v = torch.randn(2, 4, 5, 16, device=device)
    module = torch.nn.Module()
    out, weights = integration.attention(module, q, k, v, None)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert weights is None
    torch.testing.assert_close(out, exact.transpose(1, 2))


def test_bad_input():
    x = torch.randn(1, 2, 5, 16)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match=r"rank 4 .* got shape \(1, 5\)"):
        integration.attention(module, x, x, x, torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="paged caches .* got int"):
        integration.attention(module, x, x, x, None, cache=0)
    module.config = transformers.MistralConfig(sliding_window=3)
    with pytest.raises(NotImplementedError, match=r"Module must hand its sliding_window"):
        integration.attention(module, x, x, x, None)


def test_a_transformers_without_the_interfaces(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(transformers.masking_utils, "sdpa_mask", lambda cache_position: None)
        with pytest.raises(ImportError, match=r"needs transformers 5\.4 or newer, got \d"):
            integration.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 5\.4 or newer"):
        integration.register()


def test_registered_name_is_not_sought_on_the_hub():
    from transformers import modeling_utils

    integration.register()
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="cupyflash")
    assert not modeling_utils.is_flash_attention_requested(config)
    assert modeling_utils.is_flash_attention_requested(None, "flash_attention_2")
    for name in MODELS:
        assert small_model(name, "cupyflash").config._attn_implementation == "cupyflash"


def test_import_of_cupyflash_leaves_transformers_alone():
    code = (
        "import sys, cupyflash, cupyflash.integrations.transformers; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert cupyflash.__file__
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
