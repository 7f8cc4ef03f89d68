"""Reading checkpoints and tokenizers, without torch: what is wrong with them is told."""

import json
import os
import shlex
import subprocess
import sys

import numpy
import pytest

pytest.importorskip("rich", reason="the command line prints with rich")
pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

from gpt2_models import TINY, prompts  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from cupyflash.commands import cli  # noqa: E402
from cupyflash.models.gpt2 import Gpt2, load_tokenizer  # noqa: E402
from cupyflash.models.gpt2.tokenizer import StopStrings, TextStream  # noqa: E402
from cupyflash.models.gpt2.weights import all_tensors  # noqa: E402

CONFIG = {
    "model_type": "gpt2",
    "n_layer": TINY.layers,
    "n_head": TINY.heads,
    "n_embd": TINY.width,
    "n_positions": TINY.context,
    "vocab_size": 300,
}


def tensors():
    from cupyflash.models.gpt2.config import Gpt2Config

    config = Gpt2Config(2, 4, 64, 128, 300)
    rng = numpy.random.default_rng(0)
    return {
        f"transformer.{x.name}": 0.1 * rng.standard_normal(x.shape, dtype="float32")
        for x in all_tensors(config)
    }


def write(folder, weights=None, **changes):
    config = {name: x for name, x in (CONFIG | changes).items() if x is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def load(folder, **options):
    return Gpt2.from_folder(folder, device="cpu", **options)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


def test_load(folder):
    gpt2 = load(folder)
    weights = tensors()
    found = gpt2.weights.blocks[1].qkv_weight
    assert (found == weights["transformer.h.1.attn.c_attn.weight"].T).all()
    assert found.flags.c_contiguous and found.shape == (192, 64)
    assert gpt2.weights.head_weight is gpt2.weights.token_embedding
    for dtype in ("float16", "bfloat16"):
        assert load(folder, dtype=dtype).weights.blocks[0].up_bias.dtype.name == dtype


LOAD = """
import sys
from cupyflash.models.gpt2 import Gpt2

assert "ml_dtypes" not in sys.modules
if sys.argv[3] == "missing":
    sys.modules["ml_dtypes"] = None
model = Gpt2.from_folder(sys.argv[1], dtype=sys.argv[2], device="cpu")
print(model.weights.final_norm[0].astype("float64").tolist())
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("state", ["installed", "missing"])
def test_bfloat16_in_the_file(dtype, state, tmp_path):
    """In a process where nobody has imported ml_dtypes before, which NumPy needs to read it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors().items()}
    folder = write(tmp_path, weights)
    command = [sys.executable, "-c", LOAD, str(folder), dtype, state]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if state == "missing":
        line = "ImportError: Gpt2: bfloat16 needs ml_dtypes; pip install ml_dtypes"
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == line
        return
    assert done.returncode == 0, done.stderr
    right = weights["transformer.ln_f.weight"].astype(dtype).astype("float64").tolist()
    assert json.loads(done.stdout) == right


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (ValueError, "model_type .*'gpt2', got 'llama'", {"model_type": "llama"}),
        (ValueError, "must have 'n_head', found none", {"n_head": None}),
        (ValueError, "width / heads must be a multiple of 8.*64 / 3", {"n_head": 3}),
        (ValueError, "layers must be", {"n_layer": "two"}),
        (NotImplementedError, "activation_function .*'relu'", {"activation_function": "relu"}),
        (NotImplementedError, "scale_attn_weights .*True", {"scale_attn_weights": False}),
        (ValueError, r"wte.weight .*\(400, 64\), got \(300, 64\)", {"vocab_size": 400}),
        (ValueError, r"must have transformer.h.2.ln_1.weight, found none", {"n_layer": 3}),
        (ValueError, r"no tensor that the model lacks, got transformer.h.1.*12 in", {"n_layer": 1}),
        (ValueError, "must have lm_head.weight, found none", {"tie_word_embeddings": False}),
        (NotImplementedError, "rotary_dim .* not known and may change the", {"rotary_dim": 16}),
    ],
)
def test_config_that_does_not_fit(error, match, changes, tmp_path):
    with pytest.raises(error, match=f"^Gpt2(Config)?: .*{match}"):
        load(write(tmp_path, **changes))


def test_what_changes_no_logits(folder, tmp_path):
    """Fields and buffers of the files of the hub, older ones with the mask, are no obstacle."""
    tokens = prompts(7)
    right = load(folder).logits(tokens)
    buffers = {
        "transformer.h.0.attn.bias": numpy.ones((1, 1, 128, 128), "uint8"),
        "transformer.h.0.attn.masked_bias": numpy.float32(-1e4).reshape(1),
    }
    fields = {
        "n_ctx": 128,
        "summary_type": "cls_index",
        "attn_pdrop": 0.1,
        "transformers_version": "4.31.0",
    }
    old = load(write(tmp_path, tensors() | buffers, **fields))
    assert all(map(numpy.array_equal, old.logits(tokens), right))


def test_missing_files(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="must have model.safetensors, found none"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(folder)


@pytest.mark.parametrize("kept", [0.0, 4, 0.01, 0.5, 0.999])
def test_half_written_file(kept, folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match="model.safetensors is damaged or was not written to its"):
        load(folder)


def test_weights_that_cannot_be_used(tmp_path):
    name = "transformer.h.1.mlp.c_fc.weight"
    for value, dtype, match in (
        (numpy.nan, "float32", "h.1.mlp.c_fc.weight must be finite"),
        (-numpy.inf, "float16", "h.1.mlp.c_fc.weight must be finite"),
        (7e4, "float16", "must fit into float16, got 7e.04; take bfloat16"),
    ):
        weights = tensors()
        weights[name][3, 5] = value
        write(tmp_path, weights)
        with pytest.raises(ValueError, match=match):
            load(tmp_path, dtype=dtype)
    load(tmp_path, dtype="float32")
    weights = tensors()
    weights[name] = weights[name].astype("int32")
    with pytest.raises(ValueError, match="c_fc.weight .* must be one of F16.*, got I32"):
        load(write(tmp_path, weights))


TEXT = "Attention is all you need, said the cat. Ünïcödé: 你好, 🙂!\n" * 3


def train_tokenizer(folder):
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    return trained


@pytest.mark.parametrize("files", ["vocab.json and merges.txt", "tokenizer.json"])
def test_tokenizer(files, tmp_path):
    trained = train_tokenizer(tmp_path)
    if files == "tokenizer.json":
        trained.save(str(tmp_path / files))
    else:
        trained.save_model(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode(TEXT)
    assert tokens == trained.encode(TEXT).ids and tokenizer.decode(tokens) == TEXT
    stream = TextStream(tokenizer)
    pieces = [*map(stream.add, tokens), stream.rest()]
    assert "".join(pieces) == TEXT and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    half = TextStream(tokenizer)
    assert [half.add(token) for token in tokenizer.encode("🙂")[:1]] == [""]
    assert half.rest() == "\N{REPLACEMENT CHARACTER}"


def test_spaces_that_a_decoder_strips(tmp_path):
    """Those of Llama 2 and Mistral strip the space that the first of all tokens begins with."""
    words = ["<unk>", "\n", "▁a", "▁▁▁", "▁return"]
    model = tokenizers.models.BPE({x: i for i, x in enumerate(words)}, [], unk_token="<unk>")
    known, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    known.decoder = decoders.Sequence([spaces, decoders.Fuse(), strip])
    known.save(str(tmp_path / "tokenizer.json"))
    tokenizer, tokens = load_tokenizer(tmp_path), [2, 1, 3, 4, 1, 4, 1, 1, 2]
    assert tokenizer.decode(tokens) == "a\n    return\n return\n\n a"
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.add, tokens), stream.rest()]) == tokenizer.decode(tokens)
    space = StopStrings(tokenizer, [" "])
    assert not space.end([2]) and space.end([2, 2])


def test_texts_are_neither_padded_nor_cut(tmp_path):
    """Whatever a tokenizer.json was saved with."""
    trained = train_tokenizer(tmp_path)
    expected = trained.encode(TEXT).ids
    trained.enable_truncation(16)
    trained.enable_padding(length=1000)
    trained.save(str(tmp_path / "tokenizer.json"))
    assert len(expected) > 16 and load_tokenizer(tmp_path).encode(TEXT) == expected
    assert load_tokenizer(tmp_path).encode("a") == trained.encode("a").ids[:1]


ADDED = {
    "added_tokens.json": {"<user>": 301, "<bot>": 300},
    "special_tokens_map.json": {
        "eos_token": "<|endoftext|>",
        "unk_token": {"content": "<|endoftext|>", "lstrip": False},
        "additional_special_tokens": ["<bot>"],
    },
    "tokenizer_config.json": {
        "added_tokens_decoder": {
            "300": {"content": "<bot>", "special": True},
            "301": {"content": "<user>", "special": False, "lstrip": True},
        }
    },
}


@pytest.mark.parametrize(
    "files", [[], list(ADDED)[:1], list(ADDED)[1:], list(ADDED)], ids=["none", "one", "two", "all"]
)
def test_added_tokens_beside_a_vocabulary(files, tmp_path):
    trained = tokenizers.ByteLevelBPETokenizer()
    options = {"special_tokens": ["<|endoftext|>"], "show_progress": False}
    trained.train_from_iterator([TEXT], vocab_size=300, **options)
    trained.save_model(str(tmp_path))
    for name in files:
        (tmp_path / name).write_text(json.dumps(ADDED[name]))
    tokenizer = load_tokenizer(tmp_path)
    end = trained.token_to_id("<|endoftext|>")
    tokens = tokenizer.encode("cat<|endoftext|>said")
    assert tokens == [*tokenizer.encode("cat"), end, *tokenizer.encode("said")]
    assert tokenizer.decode(tokens) == "cat<|endoftext|>said"
    found = tokenizer.encode("<user>cat<bot>")
    if files:
        assert found[0] == 301 and found[-1] == 300 and tokenizer.decode(found) == "<user>cat<bot>"
    else:
        assert max(found) < 300
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<user>": 299}))
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="damaged: added token '<user>' must be 299, got 30"):
        load_tokenizer(tmp_path)


def test_ends_of_a_config(tmp_path):
    assert load(write(tmp_path, eos_token_id=[7, 9])).config.end_of_text == (7, 9)
    assert load(write(tmp_path, eos_token_id=7)).config.end_of_text == 7
    assert load(write(tmp_path, eos_token_id=[])).config.end_of_text is None


@pytest.mark.parametrize(("given", "end"), [(7, 7), ([7, 9], (7, 9)), ([], 3), (None, 3)], ids=str)
def test_ends_of_generation(given, end, tmp_path):
    """Those of generation_config.json; where it has none, those of config.json."""
    folder = write(tmp_path, eos_token_id=3)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": given, "max_length": 5}))
    assert load(folder).config.end_of_text == end
    for wrong, error in (({"eos_token_id": "</s>"}, "end_of_text must be"), ([], "an object")):
        path.write_text(json.dumps(wrong))
        with pytest.raises((ValueError, TypeError), match=error):
            load(folder)


def test_tokenizer_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="found neither"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_tokenizer(tmp_path)


def run(capsys, *arguments):
    """Exit code and the output with white space as single blanks."""
    status = cli.main(["generate", "--device", "cpu", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, " ".join(err.split())


def test_command(folder, capsys):
    train_tokenizer(folder).save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    arguments = ("--model", folder, "--prompt", "Attention is", "--max-new-tokens", "12")
    status, out, err = run(capsys, *arguments)
    (tokens,) = load(folder).generate([tokenizer.encode("Attention is")], 12)
    assert status == 0 and out == f"Attention is{tokenizer.decode(tokens)}\n"
    assert "12 new ones; the first after" in err and "tokens/s" in err
    options = ("--temperature", "1.5", "--top-k", "9", "--top-p", "0.9", "--seed", "3")
    assert run(capsys, *arguments, *options)[1] == run(capsys, *arguments, *options)[1] != out


def test_command_stops(folder, capsys):
    """At a token, at a string, and another text each time without a seed."""
    train_tokenizer(folder).save(str(folder / "tokenizer.json"))
    tokenizer, text = load_tokenizer(folder), "Attention is"
    arguments = ("--model", folder, "--prompt", text, "--max-new-tokens", "12")
    (tokens,) = load(folder).generate([tokenizer.encode(text)], 12)
    end = tokens[5]
    out = run(capsys, *arguments, "--end", end, "--end", 299)[1]
    assert out == f"{text}{tokenizer.decode(tokens[: tokens.index(end)])}\n"
    stop = tokenizer.decode(tokens[:4])
    assert run(capsys, *arguments, "--stop", stop, "--stop", "no such text")[1].startswith(
        f"{text}{stop}"
    )
    assert run(capsys, *arguments, "--stop", "")[0] == 1
    options = ("--temperature", "2")
    assert len({run(capsys, *arguments, *options)[1] for _ in range(3)}) > 1


def test_command_with_random_weights_and_a_batch(capsys):
    arguments = ("--random", "tiny", "--prompt", "abc", "--prompt", "d", "--max-new-tokens", "3")
    for decode in ("eager", "persistent"):
        status, out, err = run(capsys, *arguments, "--decode", decode)
        assert status == 0 and out.startswith("[0] abc") and "\n[1] d" in out
        assert "4 tokens of prompts, 6 new ones" in err


def test_command_errors(capsys, folder):
    for arguments, match in (
        (("--random", "tiny"), "--prompt must be given"),
        (("--random", "tiny", "--prompt", ""), "prompt 0 must have at least one token"),
        (("--random", "tiny", "--prompt", "a" * 300), "at most 256 tokens"),
        (("--random", "tiny", "--prompt", "a", "--top-p", "2"), "top_p must be"),
        (("--model", folder / "none", "--prompt", "a"), "none', which does not exist"),
        (("--model", folder / "config.json", "--prompt", "a"), "got the file "),
        (("--model", folder, "--prompt", "a"), "found neither"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (1, "") and match in err


@pytest.mark.parametrize(
    "idle",
    [("--top-k", "40"), ("--top-p", "0.9"), ("--seed", "0"), ("--top-p", "0.5", "--seed", "7")],
)
def test_options_of_sampling_need_a_temperature(idle, capsys):
    """Greedy decoding would ignore them in silence."""
    given = ("--random", "tiny", "--prompt", "ab", "--max-new-tokens", "3", *idle)
    status, out, err = run(capsys, *given)
    assert (status, out) == (1, "")
    assert f"generate: {idle[0]} needs a --temperature above 0, got 0, which is greedy" in err
    assert run(capsys, *given, "--temperature", "0.5")[0] == 0


def test_more_new_tokens_than_the_context_has(capsys):
    given = ("--random", "tiny", "--prompt", "a" * 250)
    assert run(capsys, *given)[2].startswith("250 tokens of prompts, 7 new ones")
    assert run(capsys, *given, "--max-new-tokens", "7")[0] == 0
    status, out, err = run(capsys, *given, "--prompt", "b", "--max-new-tokens", "8")
    fact = "--max-new-tokens must be at most 7 after a prompt of 250 tokens"
    assert (status, out) == (1, "") and f"{fact}, as the context has 256, got 8" in err


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2-medium"])
def test_name_of_the_hub(name, capsys, tmp_path, monkeypatch):
    """Nothing is downloaded; the error has the command that does it."""
    monkeypatch.chdir(tmp_path)
    folder = name.rpartition("/")[2]
    for call in (load, load_tokenizer):
        with pytest.raises(
            FileNotFoundError, match=f"^Gpt2: .* got '{name}', which does not exist"
        ):
            call(name)
    err = run(capsys, "--model", name, "--prompt", "a")[2]
    command = (
        f"hf download {name} config.json model.safetensors tokenizer.json --local-dir {folder}"
    )
    assert "as nothing is downloaded" in err and f"`{command}`" in err
    path = str(tmp_path / "absent")
    assert "hf download" not in run(capsys, "--model", path, "--prompt", "a")[2]


def test_checkpoint_of_pickles_is_converted(folder):
    """The command in the error makes the folder one that can be loaded."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    weights = {name: torch.from_numpy(x) for name, x in tensors().items()}
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"found pytorch_model.bin, a pickle") as caught:
        load(folder)
    command = str(caught.value).partition("converts it: python ")[2]
    assert command.startswith("-c ")
    subprocess.run([sys.executable, *shlex.split(command)], check=True, capture_output=True)
    right = tensors()["transformer.ln_f.weight"]
    assert numpy.array_equal(load(folder).weights.final_norm[0], right)


def test_deep_json(folder):
    deep = "[" * 10**5 + "]" * 10**5
    (folder / "config.json").write_text(deep)
    with pytest.raises(ValueError, match="^Gpt2: .*config.json must be JSON"):
        load(folder)
    write(folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(deep)
    with pytest.raises(ValueError, match="^Gpt2: .*index.json is damaged"):
        load(folder)


def test_generation_of_a_loaded_model_repeats(folder):
    gpt2, given = load(folder), prompts(5, 2, vocabulary=300)
    assert gpt2.generate(given, 8) == load(folder).generate(given, 8)
