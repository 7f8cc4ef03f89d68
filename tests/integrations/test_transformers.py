"""attn_implementation="cupy_attention" in small models of transformers, beside "eager".

Two computations in float32 differ by rounding. How far that carries, a model tells by itself: eager
attention once more, with every weight moved by one last place or not at all, at random. Results may
differ by `ROUNDING` times as much, and as many last places of the largest number beside them.
"""

import gc
import inspect
import re
import subprocess
import sys
import weakref

import pytest
from fakes import fake_modules
from targets import few

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from small_transformers import MODELS, SMALL, small_inputs, small_model  # noqa: E402
from transformers import masking_utils  # noqa: E402

import cupyflash  # noqa: E402
from bench.transformers import architectures  # noqa: E402
from cupyflash.integrations import transformers as integration  # noqa: E402
from cupyflash.integrations import transformers_mask  # noqa: E402
from cupyflash.integrations.transformers import NAME  # noqa: E402
from cupyflash.integrations.transformers_models import hands_attention_over  # noqa: E402
from cupyflash.integrations.transformers_pattern import pattern_of  # noqa: E402
from cupyflash.ops.attention.operations import FORWARD  # noqa: E402
from cupyflash.ops.attention.options import DETERMINISTIC  # noqa: E402

ROUNDING = 4
DECODERS = ["gpt2", "llama", "mistral", "gemma2", "qwen3", "gpt-oss", "glm-moe-dsa"]
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


def causal_layer():
    module = torch.nn.Module()
    module.is_causal = True
    return module


def to(inputs, device):
    return {name: x.to(device) for name, x in inputs.items()}


def results(model, inputs, kept=...):
    """Logits, loss and every gradient by name."""
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": out.logits[kept].detach(), "loss": out.loss.detach(), **gradients}


def moved(model, seed):
    """The model, each weight moved by one last place up, down or not at all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in model.parameters():
            places = torch.randint(-1, 2, x.shape, generator=generator).to(x.device)
            x.mul_(1 + places * torch.finfo(x.dtype).eps)
    return model


def rounded_results(name, device, inputs, kept=..., **changes):
    """Results of eager attention for three roundings of the weights.

    What one of them changes in a small gradient can be little by chance.
    """
    return [
        results(moved(small_model(name, "eager", device, **changes), seed), inputs, kept)
        for seed in range(3)
    ]


def assert_equal_but_rounding(actual, eager, rounded):
    assert actual.keys() == eager.keys()
    largest = max(x.abs().max() for name, x in eager.items() if name.endswith("weight"))
    for name, x in eager.items():
        noise = max((other[name] - x).abs().max() for other in rounded)
        # A bias of the keys shifts all scores of a row alike: its gradient is 0 but for rounding.
        cancels = name.endswith(("k_proj.bias", "key.bias"))
        last_place = torch.finfo(x.dtype).eps * (largest if cancels else x.abs().max())
        error = (actual[name] - x).abs().max()
        assert error <= ROUNDING * (noise + last_place), f"{name}: {error} with noise {noise}"


def check_beside_eager(name, device, inputs, kept=..., **changes):
    inputs = to(inputs, device)
    eager = results(small_model(name, "eager", device, **changes), inputs, kept)
    rounded = rounded_results(name, device, inputs, kept, **changes)
    actual = results(small_model(name, NAME, device, **changes), inputs, kept)
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
    actual = results(small_model(name, NAME, device, **half), inputs, kept)
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
        for implementation in ("eager", NAME)
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
    rounded = rounded_results(name, device, inputs)
    other = results(small_model(name, "eager", device), inputs | {"position_ids": None})
    assert (other["logits"] - eager["logits"]).abs().max() > 1e-3
    if told:  # no mask is ever built
        monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *_, **__: pytest.fail("built"))
        inputs |= offsets
    actual = results(small_model(name, NAME, device), inputs)
    assert_equal_but_rounding(actual, eager, rounded)


def test_compiled_packed_sequences(device, monkeypatch):
    """One graph, the kernels of packed sequences and a window, and no mask of a whole row."""
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("transformers before 5.24 refuses this: its masks are closures")
    inputs, offsets = packed((11, 1, 17), device)
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *_, **__: pytest.fail("built"))
    model = small_model("mistral", NAME, device)
    eager = results(model, inputs | offsets)
    model.zero_grad()
    torch.compiler.reset()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled = results(graph, inputs | offsets)
    # The same kernels or reference in both; sums around them may be ordered otherwise.
    torch.testing.assert_close(compiled["logits"], eager["logits"])
    for key in eager.keys() - {"logits", "loss"}:
        torch.testing.assert_close(compiled[f"_orig_mod.{key}"], eager[key], msg=key)


def test_packed_sequences_with_sinks(device):
    """Eager gpt-oss does not tell packed sequences apart; beside each sequence by itself."""
    q, k, v = torch.randn(3, 1, 4, 29, 16, device=device)
    starts = [0, 11, 12, 29]
    offsets = torch.tensor(starts, dtype=torch.int32, device=device)
    options = {"sliding_window": 7, "s_aux": torch.randn(4, device=device)}
    lengths = {"max_length_q": 17, "max_length_k": 17}
    lengths |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    module = causal_layer()
    out, _ = integration.attention(module, q, k, v, None, **options, **lengths)
    alone = [
        integration.attention(module, *(x[:, :, a:b] for x in (q, k, v)), None, **options)[0]
        for a, b in zip(starts, starts[1:])
    ]
    # Our kernels or reference in both: a key of a neighbouring sequence differs by far more.
    torch.testing.assert_close(out, torch.cat(alone, dim=1))


@pytest.mark.parametrize("added", ["nothing", "window", "chunks", "images"])
def test_packed_masks(added):
    """Only a pattern that packing alone was added to may be replaced by lengths."""
    config = transformers.LlamaConfig(**MODELS["llama"][2], attn_implementation=NAME)
    config.sliding_window = config.attention_chunk_size = 2
    make = {"window": "sliding_window_causal", "chunks": "chunked_causal"}.get(added, "causal")
    make = getattr(masking_utils, f"create_{make}_mask")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    options = {}
    if added == "images":
        if "block_sequence_ids" not in inspect.signature(make).parameters:
            pytest.skip(f"transformers {transformers.__version__} has no block_sequence_ids")
        options["block_sequence_ids"] = torch.tensor([[-1, 0, 0, -1, 1, 1, 1]])
    cache = "cache" if "cache" in inspect.signature(make).parameters else "past_key_values"
    mask = make(
        config=config, inputs_embeds=torch.zeros(1, 7, 64), attention_mask=None,
        position_ids=positions, **{cache: None}, **options,
    )  # fmt: skip
    packed = {"nothing": (None, 0), "window": (1, 0)}.get(added)
    assert getattr(mask, "packed", None) == packed


def make_mask(tokens, q_length=None, kv_length=None, function=None, **arguments):
    rows, length = tokens.shape
    function = function or masking_utils.causal_mask_function
    return transformers_mask.mask(
        rows, q_length or length, kv_length or length, attention_mask=tokens,
        mask_function=function, **arguments,
    )  # fmt: skip


def chunked(size):
    return masking_utils.chunked_causal_mask_function(size, torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (masking_utils.causal_mask_function, (None, 0)),
        (masking_utils.bidirectional_mask_function, (None, None)),
        (masking_utils.sliding_window_causal_mask_function(7), (6, 0)),
        (masking_utils.sliding_window_bidirectional_mask_function(7), (7, 7)),
        (lambda batch, head, q, kv: abs(kv - q) < 3, (2, 2)),
        (lambda batch, head, q, kv: q + 4 > kv, (None, 3)),
        (chunked(5), None),
        (masking_utils.padding_mask_function(torch.ones(1, 5, dtype=torch.bool)), None),
        (masking_utils.sliding_window_causal_mask_function(0), None),
        (lambda batch, head, q, kv: q == kv, None),
        (lambda batch, head, q, kv: (q - kv) % 2 == 0, None),
        (lambda batch, head, q, kv: q + kv >= 3, None),
        (lambda batch, head, q, kv: head >= 1, None),
    ],
)
def test_pattern_of_a_mask_function(function, pattern):
    assert pattern_of(function) == pattern
    if pattern is not None:
        q, kv = torch.arange(20)[:, None], torch.arange(20)
        left, right = (20 if x is None else x for x in pattern)
        visible = function(0, 0, q, kv).expand(20, 20)
        assert torch.equal(visible, (kv - q >= -left) & (kv - q <= right))


def test_padding_behind_the_tokens_becomes_lengths():
    tokens = torch.arange(6) < torch.tensor([[6], [2], [0]])
    for function in (None, masking_utils.bidirectional_mask_function):
        lengths = make_mask(tokens, function=function).lengths
        assert lengths.dtype == torch.int32
        assert lengths.tolist() == [6, 2, 0]
        without = make_mask(tokens[:1], function=function)
        assert without.lengths is without.keys is None
    keys = make_mask(tokens.flip(1)).keys
    assert keys.dtype == torch.bool
    assert keys.shape == (3, 1, 1, 6)
    # The diagonal of a window or of a cache does not end where the tokens do.
    window = masking_utils.sliding_window_bidirectional_mask_function(2)
    assert make_mask(tokens, function=window, allow_is_bidirectional_skip=True).keys is not None
    assert make_mask(tokens, q_length=3, q_offset=3).keys is not None


def test_static_cache_becomes_lengths():
    function = masking_utils.causal_mask_function
    for offset in (4, torch.tensor(4)):
        lengths = transformers_mask.mask(2, 3, 16, offset, 0, function).lengths
        assert lengths.dtype == torch.int32
        assert lengths.tolist() == [7, 7]


def test_mask_is_of_the_offset_that_it_was_made_with():
    """A static cache adds to the tensor of its length before a layer takes the mask apart."""
    offset = torch.tensor(4)
    mask = transformers_mask.mask(1, 1, 16, offset, 0, masking_utils.causal_mask_function)
    offset += 1
    assert mask.dense().sum() == 5


def test_nothing_is_read_while_decoding_or_compiling(monkeypatch):
    tokens = torch.ones(2, 6, dtype=torch.bool)
    assert make_mask(tokens, q_length=1, q_offset=5).keys is not None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert make_mask(tokens).keys is not None


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("seqlens", [(9, 9), (1, 9), (4, 9)], ids=str)
@pytest.mark.parametrize("padding", ["none", "left", "right", "gaps"])
def test_mask_is_its_bool_tensor(window, causal, seqlens, padding, device):
    """Each mask that is kept as a pattern gives what the tensor of transformers gives."""
    q_length, kv_length = seqlens
    place = torch.arange(kv_length).expand(3, -1)
    tokens = (place.flip(1) if padding == "left" else place) < torch.tensor([[9], [6], [5]])
    if padding == "gaps":
        tokens = tokens.clone()
        tokens[:, 2] = False
    name = "causal" if causal else "bidirectional"
    function = getattr(masking_utils, f"{name}_mask_function")
    if window is not None:
        function = getattr(masking_utils, f"sliding_window_{name}_mask_function")(window)
    mask = transformers_mask.mask(
        3, q_length, kv_length, kv_length - q_length, 0, function,
        None if padding == "none" else tokens.to(device), local_size=window,
        allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal, device=device,
    )  # fmt: skip
    q, k, v = (torch.randn(3, 4, n, 16, device=device) for n in (q_length, kv_length, kv_length))
    module = torch.nn.Module()
    assert mask.pattern is not None
    out, _ = integration.attention(module, q, k, v, mask)
    dense = mask.dense()
    assert dense.shape == mask.shape
    exact, _ = integration.attention(module, q, k, v, dense)
    counts = dense.any(3)[:, 0] & tokens[:, kv_length - q_length :].to(device)
    # Our kernels or reference in both: one key more or less differs by far more than rounding.
    torch.testing.assert_close(out[counts], exact[counts])


def test_mask_that_a_model_takes_apart_or_adds():
    tokens = torch.arange(6) < torch.tensor([[6], [2]])
    mask = make_mask(tokens)
    dense = mask.dense()
    assert (mask.ndim, mask.dim(), mask.shape, mask.dtype) == (4, 4, dense.shape, torch.bool)
    assert torch.equal(mask[:, :, 2:4, :3], dense[:, :, 2:4, :3])
    assert torch.equal(mask.logical_not(), ~dense)
    assert torch.equal(mask == 0, ~dense) and mask in {mask}
    with pytest.raises(AttributeError, match="cannot be written to, got masked_fill_"):
        mask.masked_fill_(dense, True)
    assert torch.equal(torch.cat((mask, dense)), torch.cat((dense, dense)))
    assert torch.equal(mask.to(torch.float32), dense.float())
    assert mask.to("cpu") is mask
    assert transformers_mask.mask(2, 6, 6, attention_mask=mask) is mask
    scores = torch.randn(2, 4, 6, 6)
    for added in (lambda: scores + mask, lambda: mask + scores, lambda: (1.0 - mask) * -1e9):
        with pytest.raises((NotImplementedError, TypeError)):
            added()
    with pytest.raises(NotImplementedError, match=r"got \w*add\w*: this model computes its scores"):
        scores + mask


SEVERAL = {  # masks, and the tensors that each hands to its layers
    "lengths": (lambda rows: make_mask(rows), {"seqused_k", "seqused_q"}),
    "left padding": (lambda rows: make_mask(rows.flip(1)), {"bias"}),
    "decode step": (lambda rows: make_mask(rows.flip(1), q_length=1, q_offset=5), {"bias"}),
    "dense": (lambda rows: transformers_mask.mask(2, 6, 6, mask_function=chunked(3)), {"bias"}),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_layers_on_several_devices(name):
    """A model that is spread over GPUs hands one mask to all layers, by accelerate or by itself."""
    make, moved = SEVERAL[name]
    mask = make(torch.arange(6) < torch.tensor([[6], [2]]))
    q, k = (torch.empty(2, 4, n, 16, device="meta") for n in mask.shape[2:])
    for handed in (mask, mask.to("meta"), mask.to(device="meta", non_blocking=True)):
        out, _ = integration.attention(causal_layer(), q, k, k, handed)
        assert out.device.type == "meta"
        options = handed.options(q, k)
        assert {x for x, y in options.items() if isinstance(y, torch.Tensor)} == moved
        for x in moved:  # copied for the first layer of a device alone
            assert options[x].device.type == "meta"
            assert options[x] is mask.options(q, k)[x]
    assert mask.to("meta")[:, :, -1:].device.type == "meta"
    assert mask.to("meta", torch.float32).device.type == "meta"
    assert mask.to("meta").device == torch.device("meta")


@pytest.mark.parametrize("name", SEVERAL)
def test_mask_on_another_device_is_the_same(name):
    """cpu:0 is the CPU under another name, so that the values can be compared."""
    mask = SEVERAL[name][0](torch.arange(6) < torch.tensor([[6], [2]]))
    copy = mask.to("cpu:0")
    assert copy is not mask and copy is mask.to("cpu:0")
    assert (copy.shape, copy.pattern, copy.packed) == (mask.shape, mask.pattern, mask.packed)
    assert torch.equal(copy.dense(), mask.dense())
    for mine, other in ((mask.keys, copy.keys), (mask.lengths, copy.lengths)):
        assert mine is other is None or torch.equal(mine, other)
    reference = weakref.ref(mask)
    gc.disable()
    try:
        del mask, copy
        assert reference() is None  # no cycle keeps the memory of a GPU
    finally:
        gc.enable()


def test_own_mask_of_rank_4(device):
    """A bool or additive mask of the user is all there is."""
    inputs, _ = small_inputs("llama", lengths=(12, 12))
    visible = (torch.rand(2, 1, 12, 12) < 0.5) | torch.eye(12, dtype=torch.bool)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    check_beside_eager("llama", device, {**inputs, "attention_mask": additive})
    with torch.no_grad():
        model = small_model("llama", NAME, device)
        first, second = (
            model(**to({**inputs, "attention_mask": mask}, device)).logits
            for mask in (visible, additive)
        )
    # The same model twice; `check_beside_eager` compares it with theirs.
    torch.testing.assert_close(first, second)


def test_dropout_in_training_follows_the_generator(device):
    inputs = to(small_inputs("llama")[0], device)
    model = small_model("llama", NAME, device, attention_dropout=0.5)
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
        model = small_model("gemma2", NAME, device).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        gradients.append(results(model, inputs))
    for name, x in gradients[0].items():
        # The same operations, computed twice: nothing but their order may differ.
        torch.testing.assert_close(gradients[1][name], x)


def test_compiled_model(device):
    """No graph break; the padding mask is not read."""
    inputs, kept = small_inputs("mistral", "left")
    inputs = to(inputs, device)
    model = small_model("mistral", NAME, device, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits[kept], model(**inputs).logits[kept])


@pytest.mark.parametrize("packed", [True] if few() else [False, True], ids=str)
def test_compiled_model_without_padding(packed, device):
    """Masks of packed sequences are made of functions whose closures no graph can read."""
    ids = torch.randint(3, 100, (1, 24), device=device)
    starts = torch.arange(24) if not packed else torch.cat((torch.arange(10), torch.arange(14)))
    inputs = {"input_ids": ids, "position_ids": starts[None].to(device), "use_cache": False}
    model = small_model("mistral", NAME, device, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


def test_autocast(device):
    inputs = to(small_inputs("llama")[0], device)
    losses = []
    for implementation in ("eager", NAME):
        model = small_model("llama", implementation, device)
        with torch.autocast(device, torch.bfloat16):
            losses.append(model(**inputs).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=2**-6, atol=0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_model_asks_for_a_deterministic_backward(asked, monkeypatch):
    """In the words that ModernBERT has for flash-attn; what that does, test_deterministic_plans."""
    inputs, _ = small_inputs("modernbert")
    model = small_model("modernbert", NAME, "cpu", deterministic_flash_attn=asked)
    found = []

    def forward(function, arrays, options):
        found.append(options[0][DETERMINISTIC])
        return FORWARD(function, arrays, options)

    monkeypatch.setattr(integration, "FORWARD", forward)
    model(**inputs)
    assert set(found) == {asked}


def test_values_with_fewer_columns_than_keys(device):
    q, k = torch.randn(2, 2, 4, 5, 24, device=device)
    v = torch.randn(2, 4, 5, 16, device=device)
    module = causal_layer()
    out, weights = integration.attention(module, q, k, v, None)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert weights is None
    torch.testing.assert_close(out, exact.transpose(1, 2))


def test_bad_input():
    x = torch.randn(1, 2, 5, 16)
    module, packed = causal_layer(), {"cu_seq_lens_q": torch.tensor([0, 2, 5])}
    packed["cu_seq_lens_k"] = packed["cu_seq_lens_q"]
    with pytest.raises(ValueError, match=r"rank 4 .* got shape \(1, 5\)"):
        integration.attention(module, x, x, x, torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=r"attention_mask must broadcast to .* \(1, 2, 5, 5\), got"
    ):
        integration.attention(module, x, x, x, torch.ones(1, 1, 5, 4, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=r"integrations\.transformers: head_dim of query must be .* 264"
    ):
        integration.attention(module, *[torch.randn(1, 2, 5, 264)] * 3, None)
    with pytest.raises(TypeError, match=r"transformers: .*key .*float16"):
        integration.attention(module, x, x.half(), x, None)
    with pytest.raises(
        ValueError, match=r"transformers: s_aux must have shape \(2,\) .*got \(3,\)"
    ):
        integration.attention(module, x, x, x, None, s_aux=torch.zeros(3))
    for refused in ("paged caches", "block_indices", "sinks of each query"):
        name = {"paged caches": "cache"}.get(refused, refused.partition(" ")[0])
        with pytest.raises(NotImplementedError, match=f"{refused} .* got Tensor"):
            integration.attention(module, x, x, x, None, **{name: x})
    with pytest.raises(NotImplementedError, match="beside indices must be Boolean .*float32"):
        integration.attention(module, x, x, x, x.new_zeros(1, 1, 5, 5), indices=x[:, 0])
    with pytest.raises(NotImplementedError, match="indices of keys in packed .* got Tensor"):
        integration.attention(module, x, x, x, None, indices=x, **packed)
    with pytest.raises(ValueError, match="attention_mask must say which of 5 keys each of 4 quer"):
        integration.attention(module, x[:, :, :4], x, x, None)
    with pytest.raises(ValueError, match="attention_mask must say what sliding_window=3 means"):
        integration.attention(module, x, x, x, None, is_causal=False, sliding_window=3)
    with pytest.raises(ValueError, match="attention_mask must say what a layer without is_causal"):
        integration.attention(torch.nn.Module(), x, x, x, None)
    with pytest.raises(ValueError, match="cu_seq_lens_k must be .* of the 4 keys, got .* 5 quer"):
        integration.attention(module, x, x[:, :, :4], x[:, :, :4], None, **packed)
    for name, missing in (("cu_seq_lens_q", "cu_seq_lens_k"), ("cu_seq_lens_k", "cu_seq_lens_q")):
        with pytest.raises(TypeError, match=f"must come together, got no {missing}"):
            integration.attention(module, x, x, x, None, **{name: packed[name]})
    with pytest.raises(NotImplementedError, match="position biases of packed .* got Tensor"):
        integration.attention(module, x, x, x, None, position_bias=x, **packed)
    for tokens in ([0, 1, 1, 1, 1], [1, 1, 1, 1, 0]):
        mask = make_mask(torch.tensor([tokens]).bool())
        with pytest.raises(NotImplementedError, match="of packed sequences are not built"):
            integration.attention(module, x, x, x, mask, **packed)
    image = transformers_mask.mask(1, 5, 5, mask_function=chunked(3), use_vmap=True)
    for mask in (image, image.dense()):
        with pytest.raises(NotImplementedError, match="cu_seq_lens_q must come with a causal"):
            integration.attention(module, x, x, x, mask, **packed)


def test_a_layer_without_a_mask():
    """As in transformers: causal if the layer is, and one query sees all keys."""
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    module = torch.nn.Module()
    for causal in (True, False):
        module.is_causal = causal
        out, _ = integration.attention(module, q, k, v, None)
        torch.testing.assert_close(out, sdpa(q, k, v, is_causal=causal).transpose(1, 2))
        out, _ = integration.attention(module, q, k, v, None, is_causal=not causal)
        torch.testing.assert_close(out, sdpa(q, k, v, is_causal=not causal).transpose(1, 2))
        out, _ = integration.attention(module, q[:, :, :1], k, v, None, sliding_window=0)
        torch.testing.assert_close(out, sdpa(q[:, :, :1], k, v).transpose(1, 2))


@pytest.mark.parametrize("masked", ["causal", "bool", "pattern"])
def test_selected_keys(masked, device):
    """A query sees the keys that an indexer has selected for it, of those that are not masked."""
    q, k, v = torch.randn(3, 2, 4, 33, 16, device=device)
    indices = torch.rand(2, 33, 33, device=device).topk(9).indices.int()
    indices[..., 0] = 0  # every query sees one key
    visible = torch.ones(33, 33, dtype=torch.bool, device=device).tril()
    if masked == "bool":
        visible = visible & (torch.rand(2, 1, 33, 33, device=device) < 0.7)
        visible[..., 0] = True
    mask = {
        "causal": None,
        "bool": visible,
        "pattern": transformers_mask.mask(2, 33, 33, device=device),
    }[masked]
    out, _ = integration.attention(causal_layer(), q, k, v, mask, indices=indices)
    selected = torch.stack([torch.isin(torch.arange(33), x) for x in indices.flatten(0, 1).cpu()])
    visible = visible & selected.view(2, 1, 33, 33).to(device)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(out, exact.transpose(1, 2))


@pytest.mark.parametrize("width", [(20, 20), (12, 20), (20, 12)], ids=str)
def test_head_dims_that_are_no_multiple_of_8(width, device):
    head_dim, value_dim = width
    q, k = torch.randn(2, 2, 4, 5, head_dim, device=device)
    v = torch.randn(2, 4, 5, value_dim, device=device)
    out, _ = integration.attention(causal_layer(), q, k, v, None)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, exact.transpose(1, 2))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "modernbert", "t5gemma"])
def test_bidirectional_windows(name, padding, device):
    """transformers' masks see `sliding_window` keys on each side of a token, both included."""
    lengths = (24, 24) if padding == "none" else (24, 17, 5)
    inputs, kept = small_inputs(name, padding, lengths)
    changes = {"is_causal": False} if name in ("mistral", "gemma2") else {}
    check_beside_eager(name, device, inputs, kept, **changes)


# Models that multiply their matrices themselves, in some version since 5.4 with a lost mask. Newer
# ones may hand them over.
WITHOUT_INTERFACE = (
    "Bloom", "XGLM", "CodeGen", "TrOCR", "Mpt", "MPNet", "MegatronBert", "Luke", "RoFormer",
    "ImageGPT", "GPTNeo", "GPTJ", "Falcon", "XLNet", "Reformer", "Funnel", "Deberta",
)  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_a_model_without_the_attention_interface_raises(name):
    kind = {"TrOCR": "TrOCRForCausalLM"}.get(name, f"{name}Model")
    model_class, config = getattr(transformers, kind), getattr(transformers, f"{name}Config")()
    if hands_attention_over(model_class, transformers.PreTrainedModel):
        row = architectures.compared(type(config), model_class)
        assert row["result"] == "equal", row
        return
    said = f'{kind}: computes its attention itself .* allowed is attn_implementation="eager"'
    with torch.device("meta"), pytest.raises(ValueError, match=said):
        model_class._from_config(config, attn_implementation=NAME)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = model_class._from_config(config)
    with pytest.raises(ValueError, match=said):
        model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "eager"


def test_an_argument_that_is_not_known_raises(tmp_path, monkeypatch):
    """A newer transformers may hand over what changes the result."""
    text = """
from transformers import LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

class Known(LlamaModel):
    pass

def attend(self, q, k, v, mask):
    interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    return interface(self, q, k, v, mask, scaling=1.0, sliding_window=4, {more})
"""
    monkeypatch.syspath_prepend(tmp_path)
    for name, more in (("known", "position_ids=None"), ("unknown", "novelty=4, dropout=0.0")):
        (tmp_path / f"model_with_{name}.py").write_text(text.format(more=more))
    config = transformers.LlamaConfig(**MODELS["llama"][2])
    known, unknown = (__import__(f"model_with_{name}").Known for name in ("known", "unknown"))
    assert known._from_config(config, attn_implementation=NAME)
    said = r"Known: hands \['novelty'\] to the attention interface, which cupyflash.* does not know"
    with pytest.raises(ValueError, match=said):
        unknown._from_config(config, attn_implementation=NAME)
    with pytest.raises(ValueError, match=said):
        unknown._from_config(config, attn_implementation="eager").set_attn_implementation(NAME)


@pytest.mark.parametrize("name", MODELS)
def test_attention_weights_are_refused(name):
    """Also of models that do not hand the wish down to their layers, and of a configuration."""
    inputs, _ = small_inputs(name)
    eager, model = (small_model(name, x) for x in ("eager", NAME))
    assert any(x for key, x in eager(**inputs, output_attentions=True).items() if "attent" in key)
    said = 'output_attentions must be False, .* attn_implementation="eager", got True'
    with pytest.raises(NotImplementedError, match=f"^{integration.FUNCTION}: {said}"):
        model(**inputs, output_attentions=True)
    assert model(**inputs).logits.isfinite().all()
    with pytest.raises(ValueError, match="output_attentions.* must be False|not supported"):
        small_model(name, NAME, output_attentions=True)
    eager = small_model(name, "eager", output_attentions=True)
    with pytest.raises(ValueError, match=r"^\w+: output_attentions of \w+ must be False"):
        eager.set_attn_implementation(NAME)
    assert eager.config._attn_implementation == "eager"


def test_heads_that_are_too_wide_raise_when_loaded(tmp_path):
    wide = small_model("llama", "eager", head_dim=264)
    said = r"^Llama\w+: head_dim of LlamaAttention must be at most 256 .* got 264$"
    with pytest.raises(ValueError, match=said):
        small_model("llama", NAME, head_dim=264)
    with pytest.raises(ValueError, match=said):
        wide.set_attn_implementation(NAME)
    assert wide.config._attn_implementation == "eager"
    wide.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert small_model("llama", NAME, head_dim=256)(**small_inputs("llama")[0]).loss.isfinite()


def test_layers_of_a_model_that_are_too_wide_raise_when_loaded():
    """Gemma 4: windows have narrow heads, the layers between them wide ones; so do parts."""
    if not hasattr(transformers, "Gemma4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma 4")
    sizes = {**MODELS["gemma2"][2], "global_head_dim": 512, "hidden_size_per_layer_input": 0}
    text = transformers.Gemma4TextConfig(**sizes, vocab_size_per_layer_input=100)
    said = "head_dim of Gemma4TextAttention must be at most 256 .* got 512"
    with pytest.raises(ValueError, match=said):
        transformers.Gemma4ForCausalLM._from_config(text, attn_implementation=NAME)
    vision = {**SMALL, "head_dim": 16, "num_key_value_heads": 4}
    parts = {"text_config": text, "vision_config": transformers.Gemma4VisionConfig(**vision)}
    config = transformers.Gemma4Config(**parts, audio_config=None)
    model = transformers.Gemma4Model._from_config(config, attn_implementation="eager")
    for request in (NAME, {"text_config": NAME}):
        with pytest.raises(ValueError, match=said):
            model.set_attn_implementation(request)
    model.set_attn_implementation({"vision_config": NAME})
    assert model.config.vision_config._attn_implementation == NAME
    assert model.config.text_config._attn_implementation == "eager"


def test_a_part_without_the_attention_interface_raises():
    """And may keep its own attention where the parts are told apart."""
    encoder = transformers.ViTConfig(**MODELS["vit"][2], attn_implementation="eager")
    decoder = transformers.TrOCRConfig(vocab_size=100, d_model=64, decoder_layers=1)
    make = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs
    model_class = transformers.VisionEncoderDecoderModel
    said = "TrOCRForCausalLM: computes its attention itself .* for this part alone with a dict"
    with pytest.raises(ValueError, match=said):
        model_class._from_config(make(encoder, decoder), attn_implementation=NAME)
    parts = {"": NAME, "encoder": NAME, "decoder": "eager"}
    model = model_class._from_config(make(encoder, decoder), attn_implementation=parts)
    assert model.encoder.config._attn_implementation == NAME
    assert model.decoder.config._attn_implementation == "eager"
    for request in (NAME, {"decoder": NAME}):
        with pytest.raises(ValueError, match=said):
            model.set_attn_implementation(request)
    model.set_attn_implementation({"encoder": "eager"})
    assert model.encoder.config._attn_implementation == "eager"
    model.set_attn_implementation({"encoder": NAME})
    assert model.encoder.config._attn_implementation == NAME


def test_models_of_users_are_judged_by_what_they_inherit():
    base = transformers.PreTrainedModel
    for parent, capable in ((transformers.LlamaModel, True), (transformers.BloomModel, False)):
        own = type("Own", (parent,), {"__module__": "typed_in"})
        assert hands_attention_over(own, base) is capable
        assert hands_attention_over(parent, base) is capable
    assert hands_attention_over(transformers.ResNetModel, base)  # has no attention


def test_a_transformers_without_the_interfaces(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(masking_utils, "sdpa_mask", lambda cache_position: None)
        with pytest.raises(ImportError, match=r"needs .* 5\.4 or newer, got \d.*; pip install"):
            integration.register()
    fake_modules(monkeypatch, transformers=None)
    with pytest.raises(ImportError, match=r"needs transformers 5\.4 or newer"):
        integration.register()


def test_registered_name_is_taken_for_no_other():
    """transformers looks for these inside of names."""
    assert not [x for x in ("flash", "sdpa", "flex", "eager", "paged", "/", "|") if x in NAME]
    for name in MODELS.keys() - {"glm-moe-dsa", "t5"}:
        assert small_model(name, NAME).config._attn_implementation == NAME


def test_the_name_of_the_library_raises():
    said = f'the name is "{NAME}", .* got "cupyflash"'
    for name in ("llama", "gpt-oss"):  # the second names the builds of flash-attn that it takes
        with pytest.raises(ValueError, match=said):
            small_model(name, "cupyflash")
        with pytest.raises(ValueError, match=said):
            small_model(name, "eager").set_attn_implementation("cupyflash")


def test_import_of_cupyflash_leaves_transformers_alone():
    code = (
        "import sys, cupyflash, cupyflash.integrations.transformers; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert cupyflash.__file__
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
