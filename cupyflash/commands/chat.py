"""Prompts as a chat model wants them: in the template of its tokenizer."""

import json
from pathlib import Path
from typing import Any

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def has_template(folder: str | Path) -> bool:
    """Whether the tokenizer of a folder has a chat template."""
    config = Path(folder) / CONFIG
    if (Path(folder) / TEMPLATE).is_file():
        return True
    return config.is_file() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))


def chat_prompts(folder: str | Path, tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokens of what a user says in a chat, up to where the answer begins.

    Raises:
        ImportError: transformers, whose templates these are, or what it needs is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        fact = "a chat template needs transformers and jinja2"
        line = "pip install transformers jinja2, or give --plain"
        raise ImportError(f"generate: {fact}; {line}") from None
    theirs = AutoTokenizer.from_pretrained(str(folder))
    chats = ([{"role": "user", "content": text}] for text in texts)
    options = {"tokenize": False, "add_generation_prompt": True}
    filled = (theirs.apply_chat_template(chat, **options) for chat in chats)
    # The template has written the tokens that begin a text.
    encode = tokenizer.library_tokenizer.encode
    return [encode(text, add_special_tokens=False).ids for text in filled]
