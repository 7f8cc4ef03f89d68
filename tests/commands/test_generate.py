"""``python -m cupyflash generate``: prompts from a file, chat templates, models by their folder."""

import json
import re

import pytest

pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

from cupyflash.commands import cli  # noqa: E402
from cupyflash.models.gpt2 import Gpt2, Gpt2Config, load_tokenizer  # noqa: E402

TEMPLATE = "{% for x in messages %}<u>{{ x['content'] }}{% endfor %}<a>"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tokenizer with a chat template beside the config of a GPT-2 with random weights."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["?", "<s>", "<u>", "<a>"])
    tokenizer.train_from_iterator(["what is attention all you need"], trainer)
    begin = {"single": "<s> $A", "special_tokens": [("<s>", 1)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**begin)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model = Gpt2.random(Gpt2Config(2, 4, 64, 64, 10), device="cpu")
    monkeypatch.setattr(Gpt2, "from_folder", lambda folder, **options: model)
    return tmp_path


def run(capsys, *arguments):
    status = cli.main(["generate", "--device", "cpu", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, " ".join(err.split())


def answers(folder, *prompts):
    tokenizer, model = load_tokenizer(folder), Gpt2.from_folder(folder)
    return [tokenizer.decode(x) for x in model.generate(list(prompts), 5, end_of_text=-1)]


def test_prompts_of_a_file(folder, capsys):
    (folder / "prompts.txt").write_text("what is\n\n  \nall you need\n")
    given = ("--model", folder, "--plain", "--end", -1, "--max-new-tokens", 5)
    status, out, err = run(capsys, *given, "--prompt", "attention", "--prompts",
                           folder / "prompts.txt")  # fmt: skip
    encode = load_tokenizer(folder).encode
    texts = ["attention", "what is", "all you need"]
    found = answers(folder, *map(encode, texts))
    assert status == 0 and "15 new ones" in err and encode("attention")[0] == 1
    assert out == "".join(f"[{i}] {x}{y}\n" for i, (x, y) in enumerate(zip(texts, found)))


def test_chat(folder, capsys):
    """The template writes all tokens of the prompt, those that begin a text among them."""
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    given = ("--model", folder, "--prompt", "what is attention", "--end", -1)
    status, out, err = run(capsys, *given, "--max-new-tokens", 5)
    encode = load_tokenizer(folder).library_tokenizer.encode
    prompt = encode("<u>what is attention<a>", add_special_tokens=False).ids
    assert prompt[0] == 2 and prompt[-1] == 3
    (found,) = answers(folder, prompt)
    assert status == 0 and out == f"{found}\n"
    plain = run(capsys, *given, "--max-new-tokens", 5, "--plain")[1]
    assert plain.startswith("what is attention") and plain != f"what is attention{found}\n"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"model_type": "bert"}', "model_type in .* must be one of gpt2, llama, .*, got 'bert'"),
        ("{}", "got None"),
        ("[]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        (None, "must have .*config.json, found none"),
    ],
)
def test_folders_of_other_models(folder, text, match, capsys):
    path = folder / "config.json"
    path.unlink() if text is None else path.write_text(text)
    status, out, err = run(capsys, "--model", folder, "--prompt", "a", "--plain")
    assert (status, out) == (1, "") and re.search(match, err)


def test_no_prompts(folder, capsys):
    (folder / "prompts.txt").write_text("\n \n")
    for given in ((), ("--prompts", folder / "prompts.txt")):
        assert "--prompt must be given" in run(capsys, "--model", folder, *given)[2]
    assert run(capsys, "--model", folder, "--prompts", folder / "none.txt")[0] == 1
