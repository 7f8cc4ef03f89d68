"""Language models by what the config.json of their folder says, or by the name of a size."""

import importlib
import json
from pathlib import Path
from typing import Any

from .gpt2.config import SIZES

# The module and the class of each model_type; a module is imported when it is needed.
FAMILIES = {"gpt2": ("gpt2", "Gpt2")} | dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3"), ("llama", "Llama")
)


def load_model(folder: str | Path, **place: Any) -> Any:
    """The model of a folder of Hugging Face, a `Gpt2` or a `Llama`.

    Args:
        place: dtype and device, as ``from_folder`` of the model takes them.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: no JSON, a damaged file.
        NotImplementedError: another model, or an option that changes its result and is not built.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"generate: a checkpoint folder must have {path}, found none")
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"generate: {path} must be a JSON object, got {error}") from None
    if kind not in FAMILIES:
        fact = f"model_type in {path} must be one of {', '.join(FAMILIES)}"
        raise NotImplementedError(f"generate: {fact}, got {kind!r}")
    return _family(kind).from_folder(folder, **place)


def random_model(size: str, **place: Any) -> Any:
    """A model with random weights of a size of GPT-2, or of a `Llama`."""
    return _family("gpt2" if size in SIZES else "llama").random(size, **place)


def _family(kind: str) -> Any:
    module, name = FAMILIES[kind]
    return getattr(importlib.import_module(f".{module}", __package__), name)
