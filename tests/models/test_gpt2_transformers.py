"""GPT-2 beside GPT2LMHeadModel of transformers: logits, tokens, checkpoints."""

import numpy
import pytest
from gpt2_models import decodes, device, each_device, prompts

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from small_transformers import small_model  # noqa: E402

from cupyflash.models.engine import decoder as engine_decoder  # noqa: E402
from cupyflash.models.gpt2 import Gpt2, load_tokenizer  # noqa: E402
from cupyflash.models.gpt2 import decoder as gpt2_decoder  # noqa: E402
from cupyflash.testing import assert_close_to_float64, to_numpy64  # noqa: E402

STEPS = 64


def saved(folder, model, **options):
    vars(model.config).pop("intermediate_size", None)  # of other models; no field of this one
    model.save_pretrained(folder, **options)
    return folder


def checkpoint(folder, dtype="float32", **changes):
    model = small_model("gpt2", "eager", dtype=getattr(torch, dtype), **changes)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(3)  # else a text is one token again and again
    return saved(folder, model), model


@torch.no_grad()
def theirs(model, tokens):
    return model(torch.tensor(tokens)).logits.double().numpy()


def ours(gpt2, given, later, decode, monkeypatch):
    """Logits after each prompt and after each of the later tokens, which are given, too."""
    found, steps = [], [*later.T.astype("int32"), numpy.zeros(len(given), "int32")]

    def give(logits, *arguments, out, state, **options):
        tokens = gpt2.xp.asarray(steps[len(found)])
        found.append(to_numpy64(logits))
        out[...] = state.tokens[...] = tokens
        state.positions[...] += 1

    with monkeypatch.context() as patch:
        patch.setattr(gpt2_decoder if decode == "persistent" else engine_decoder, "sample", give)
        if decode == "persistent":
            patch.setattr(gpt2_decoder.Decoder, "advance", lambda x, *o: x.sample(x.step(), *o))
        made = gpt2.generate(given, len(steps), decode=decode, end_of_text=-1)
    assert made == [[*row, 0] for row in later.tolist()]
    return numpy.stack(found, 1)


def check_logits(target, folder, model, dtype, steps, monkeypatch):
    given = prompts(20, 20, vocabulary=model.config.vocab_size)
    later = numpy.asarray(prompts(steps, steps, vocabulary=model.config.vocab_size))
    whole = numpy.concatenate([given, later], 1)
    baseline = theirs(model, whole)[:, 19:]
    exact = theirs(model.double(), whole)[:, 19:]
    gpt2 = Gpt2.from_folder(folder, dtype=dtype, device=device(target))
    for decode in decodes(target):
        found = ours(gpt2, given, later, decode, monkeypatch)
        name = f"{decode} logits"
        assert_close_to_float64(found, exact, baseline, dtype, name, terms=abs(exact).max())


@each_device()
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits(target, dtype, tmp_path, monkeypatch):
    """Of a prefill and 64 steps, every way to decode."""
    if dtype not in target.dtypes:
        pytest.skip("needs ml_dtypes")
    check_logits(target, *checkpoint(tmp_path, dtype), dtype, STEPS, monkeypatch)


@each_device()
def test_logits_of_the_full_size(target, tmp_path, monkeypatch):
    """The 124M configuration in float32, whose kernels have other tiles than small ones."""
    if not target.gpu:
        pytest.skip("a CPU computes all sizes alike, as in test_logits")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    check_logits(target, saved(tmp_path, model), model, "float32", STEPS, monkeypatch)


@each_device()
@pytest.mark.parametrize("lengths", [(6,), (9, 3, 17)], ids=str)
def test_greedy_tokens(target, lengths, tmp_path):
    """Those of their generate() for each prompt alone."""
    folder, model = checkpoint(tmp_path, tie_word_embeddings=False)
    given = prompts(*lengths, vocabulary=100)
    expected = []
    for prompt in given:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # by itself generate() takes some tokens for padding
        ids = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        expected.append(ids[0, len(prompt) :].tolist())
    assert all(len(set(tokens)) > 2 for tokens in expected)
    gpt2 = Gpt2.from_folder(folder, device=device(target), dtype="float32")
    for decode in decodes(target):
        assert gpt2.generate(given, 40, decode=decode) == expected


@each_device()
def test_a_prompt_that_fills_the_context_gets_one_token(target, tmp_path):
    folder, model = checkpoint(tmp_path)
    (given,) = prompts(model.config.n_positions, vocabulary=100)
    expected = int(theirs(model, [given])[0, -1].argmax())
    gpt2 = Gpt2.from_folder(folder, device=device(target), dtype="float32")
    for decode in decodes(target):
        assert gpt2.generate([given], 5, decode=decode) == [[expected]]


@pytest.mark.parametrize("whole", [False, True], ids=["vocab.json", "tokenizer.json"])
def test_tokenizers_give_what_theirs_give(whole, tmp_path):
    """Of a folder that their tokenizer was saved to, with tokens added to it."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    text = "Attention is all you need, said the cat. Ünïcödé: 你好, 🙂!\n"
    special = ["<|endoftext|>"]
    trained.train_from_iterator([text], 300, special_tokens=special, show_progress=False)
    trained.save_model(str(tmp_path))
    other = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    other.add_tokens(["<tool>"])
    other.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    other.save_pretrained(tmp_path)
    if not whole:
        (tmp_path / "tokenizer.json").unlink()
        other = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for given in (text, f"<user>{text}<|endoftext|><bot> <tool>\n", "a <user> b<|endoftext|> c"):
        tokens = ours.encode(given)
        assert len(tokens) >= 5 and tokens == other(given)["input_ids"]
        assert ours.decode(tokens) == other.decode(tokens, clean_up_tokenization_spaces=False)


@each_device()
@pytest.mark.parametrize("end", [7, [7, 40, 63]], ids=str)
def test_ends_and_stop_strings_are_theirs(target, end, tmp_path):
    """Their generate() keeps the token that ends a text; both keep those of a stop string."""
    folder, model = checkpoint(tmp_path)
    (given,) = prompts(9, vocabulary=100)
    ids = torch.tensor([given])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 60, "do_sample": False}
    free = model.generate(ids, **options)[0, 9:].tolist()
    ends = [free[20], *end[1:]] if isinstance(end, list) else free[20]
    expected = model.generate(ids, **options, eos_token_id=ends)[0, 9:].tolist()
    assert len(expected) <= 21 and expected[-1] in (ends if isinstance(ends, list) else [ends])
    gpt2 = Gpt2.from_folder(folder, device=device(target), dtype="float32")
    for decode in decodes(target):
        (found,) = gpt2.generate([given], 60, end_of_text=ends, decode=decode)
        assert found == expected[:-1]


VARIANTS = {
    "several files": ({}, {"max_shard_size": "50KB"}),
    "untied head": ({"tie_word_embeddings": False}, {}),
    "another width of the MLP": ({"n_inner": 96}, {}),
    "one head": ({"num_attention_heads": 1}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints(variant, tmp_path):
    changes, options = VARIANTS[variant]
    model = small_model("gpt2", "eager", **changes)
    check_same(saved(tmp_path, model, **options), model)


def test_checkpoint_without_prefix(tmp_path):
    model = small_model("gpt2", "eager")
    check_same(saved(tmp_path, model.transformer), model)


def check_same(folder, model):
    (given,) = prompts(30, vocabulary=100)
    (found,) = Gpt2.from_folder(folder, device="cpu").logits([given])
    expected = theirs(model, [given])[0]
    # Whether the right weights were loaded; `check_logits` compares with float64.
    numpy.testing.assert_allclose(found, expected, atol=2e-5 * abs(expected).max())
