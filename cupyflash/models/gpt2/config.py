"""The shape of a GPT-2, from the config.json of Hugging Face or by the name of a size."""

import dataclasses
from pathlib import Path
from typing import Any

from ..checkpoint import (
    HARMLESS,
    MOST,
    MOST_LAYERS,
    checkpoint_folder,
    read_json,
    refuse_unknown,
    require_count,
    require_eps,
    require_tokens,
)

FUNCTION = "Gpt2"  # who speaks in errors
MAX_HEAD_DIM = 256
# Options that change the result, with the only value that is implemented.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# The fields that are read.
READ = {
    "activation_function", "eos_token_id", "layer_norm_epsilon", "n_embd", "n_head", "n_inner",
    "n_layer", "n_positions", "tie_word_embeddings", "vocab_size",
}  # fmt: skip
# The fields of this model that change no logits: of training, of other heads, and of old files.
HARMLESS_HERE = HARMLESS | {
    "_num_labels", "attn_pdrop", "dtype", "embd_pdrop", "gradient_checkpointing", "n_ctx",
    "n_special", "output_past", "predict_special_tokens", "reorder_and_upcast_attn", "resid_pdrop",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "torch_dtype",
}  # fmt: skip
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


@dataclasses.dataclass(frozen=True)
class Gpt2Config:
    """Shape of a model.

    Attributes:
        context: the most tokens of a sequence.
        inner: width of the hidden layer of the MLP.
        eps: of the norms.
        end_of_text: the token that ends a text, or several of them; None if there is none.
        tied: whether the head is the embedding of tokens in a checkpoint that has no other one.
    """

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary: int = 50257
    inner: int = 0
    eps: float = 1e-5
    end_of_text: int | tuple[int, ...] | None = None
    tied: bool = True

    def __post_init__(self) -> None:
        if not self.inner and isinstance(self.width, int):
            object.__setattr__(self, "inner", 4 * self.width)
        for name in ("layers", "heads", "width", "context", "vocabulary", "inner"):
            most = MOST_LAYERS if name == "layers" else MOST
            require_count("Gpt2Config", name, getattr(self, name), most)
        if self.width % self.heads or self.head_dim % 8 or self.head_dim > MAX_HEAD_DIM:
            fact = f"width / heads must be a multiple of 8 up to {MAX_HEAD_DIM}"
            raise ValueError(f"Gpt2Config: {fact}, got {self.width} / {self.heads}")
        require_eps("Gpt2Config", "eps", self.eps)
        require_tokens("Gpt2Config", "end_of_text", self.eos_token_ids)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def heads_kv(self) -> int:
        """The heads of keys and values, for an engine, like the next three."""
        return self.heads

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self.vocabulary

    @property
    def max_positions(self) -> int:
        """The most tokens of a sequence."""
        return self.context

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        end = self.end_of_text
        return () if end is None else tuple(end) if isinstance(end, list | tuple) else (end,)

    @property
    def parameters(self) -> int:
        """The number of weights."""
        block = 4 * self.width**2 + 2 * self.width * self.inner + 9 * self.width + self.inner
        return self.layers * block + (self.vocabulary + self.context + 2) * self.width

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Gpt2Config":
        """Read ``config.json``, and the ends of texts in ``generation_config.json``.

        Raises:
            FileNotFoundError: there is none, or no such folder.
            ValueError: it is no JSON, or not of a GPT-2, or a number is missing or wrong.
            NotImplementedError: an option of transformers that this model does not have, or a field
            that is not known.
        """
        path = checkpoint_folder(FUNCTION, folder) / "config.json"
        fields = read_json(FUNCTION, path)
        if not isinstance(fields, dict) or fields.get("model_type") != "gpt2":
            found = fields.get("model_type") if isinstance(fields, dict) else fields
            raise ValueError(f"Gpt2: model_type in {path} must be 'gpt2', got {found!r}")
        config = cls._from_fields(fields, path)
        generation = path.with_name("generation_config.json")
        if not generation.is_file():
            return config
        given = read_json(FUNCTION, generation)
        if not isinstance(given, dict):
            raise ValueError(f"Gpt2: {generation} must hold an object, got {given!r}")
        end = _end_of_text(given)
        return config if end is None else dataclasses.replace(config, end_of_text=end)

    @classmethod
    def _from_fields(cls, fields: dict[str, Any], path: Path) -> "Gpt2Config":
        for name, value in FIXED.items():
            if fields.get(name, value) is not value:
                fact = f"{name} in {path} must be {value}"
                raise NotImplementedError(f"Gpt2: {fact}, got {fields[name]!r}")
        refuse_unknown("Gpt2", fields, path, FIXED.keys() | READ | HARMLESS_HERE)
        activation = fields.get("activation_function", ACTIVATIONS[0])
        if activation not in ACTIVATIONS:
            fact = f"activation_function in {path} must be {' or '.join(ACTIVATIONS)}"
            raise NotImplementedError(f"Gpt2: {fact}, got {activation!r}")
        try:
            return cls(
                layers=fields["n_layer"],
                heads=fields["n_head"],
                width=fields["n_embd"],
                context=fields["n_positions"],
                vocabulary=fields["vocab_size"],
                inner=fields.get("n_inner") or 0,
                eps=fields.get("layer_norm_epsilon", 1e-5),
                end_of_text=_end_of_text(fields),
                tied=bool(fields.get("tie_word_embeddings", True)),
            )
        except KeyError as error:
            raise ValueError(f"Gpt2: {path} must have {error}, found none") from None


def _end_of_text(fields: dict[str, Any]) -> Any:
    end = fields.get("eos_token_id")
    return (tuple(end) or None) if isinstance(end, list) else end


SIZES = {
    "tiny": Gpt2Config(layers=2, heads=4, width=64, context=256, vocabulary=512),
    "small": Gpt2Config(layers=12, heads=12, width=768, end_of_text=50256),
    "medium": Gpt2Config(layers=24, heads=16, width=1024, end_of_text=50256),
    "large": Gpt2Config(layers=36, heads=20, width=1280, end_of_text=50256),
    "xl": Gpt2Config(layers=48, heads=25, width=1600, end_of_text=50256),
}
