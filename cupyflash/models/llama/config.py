"""The shape of a Llama and its kin, and how it is read from the config.json of Hugging Face."""

import dataclasses
from pathlib import Path
from typing import Any

from ..checkpoint import (
    MOST_LAYERS,
    checkpoint_folder,
    read_json,
    require_count,
    require_eps,
    require_tokens,
)
from ..place import DTYPES
from . import fields as files
from .rope import Rope

FUNCTION = "Llama"  # who speaks in errors
MAX_HEAD_DIM = 256
COUNTS = ("width", "heads", "heads_kv", "head_dim", "inner", "vocab_size", "max_positions")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model.

    Attributes:
        width: of a hidden state.
        heads: of q.
        heads_kv: of k and v, a divisor of heads.
        inner: width of the hidden layer of the MLP.
        max_positions: the most tokens of a sequence.
        eps: of the norms.
        rope: of the rotary embedding.
        qkv_bias, proj_bias, mlp_bias: whether these projections have biases.
        head_norms: whether q and k have an RMSNorm of each head.
        tied: whether the head is the embedding of tokens.
        windows: of each layer, how many keys a query sees with its own, None for all; () is None
            for every layer.
        eos_token_ids: the tokens that end a text.
        dtype: of weights, hidden states and caches: "float16", "bfloat16" or "float32".

    Raises:
        ValueError: numbers that no model has.
    """

    layers: int
    width: int
    heads: int
    heads_kv: int
    head_dim: int
    inner: int
    vocab_size: int
    max_positions: int
    eps: float = 1e-6
    rope: Rope = Rope()
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require_count("LlamaConfig", "layers", self.layers, MOST_LAYERS)
        for name in COUNTS:
            require_count("LlamaConfig", name, getattr(self, name))
        if self.heads % self.heads_kv:
            fact, got = "heads_kv must divide heads", f"{self.heads_kv} and {self.heads}"
            raise ValueError(f"LlamaConfig: {fact}, got {got}")
        if self.head_dim % 2 or self.head_dim > MAX_HEAD_DIM:
            fact = f"head_dim must be even and at most {MAX_HEAD_DIM}"
            raise ValueError(f"LlamaConfig: {fact}, got {self.head_dim}")
        if len(self.windows) not in (0, self.layers):
            fact = f"windows must be () or of each of the {self.layers} layers"
            raise ValueError(f"LlamaConfig: {fact}, got {len(self.windows)}")
        for window in self.windows:
            if window is not None:
                require_count("LlamaConfig", "a window", window)
        require_eps("LlamaConfig", "eps", self.eps)
        ends = require_tokens("LlamaConfig", "eos_token_ids", self.eos_token_ids)
        object.__setattr__(self, "eos_token_ids", ends)
        if self.dtype not in DTYPES:
            fact = f"dtype must be {', '.join(DTYPES)}"
            raise ValueError(f"LlamaConfig: {fact}, got {self.dtype!r}")

    @property
    def parameters(self) -> int:
        """The number of weights."""
        heads = self.head_dim * (self.heads + 2 * self.heads_kv)
        layer = self.width * (heads + self.head_dim * self.heads + 3 * self.inner + 2)
        layer += self.qkv_bias * heads + self.proj_bias * self.width
        layer += self.mlp_bias * (2 * self.inner + self.width)
        layer += self.head_norms * 2 * self.head_dim
        tables = (1 if self.tied else 2) * self.vocab_size + 1
        return self.layers * layer + tables * self.width

    def window(self, layer: int) -> tuple[int, int] | None:
        """The ``window`` of attention of a layer: keys before and behind the query's own."""
        window = self.windows[layer] if self.windows else None
        return None if window is None else (window - 1, 0)

    @classmethod
    def from_folder(cls, folder: str | Path, dtype: str | None = None) -> "LlamaConfig":
        """Read ``config.json``, and the ends of texts in ``generation_config.json``.

        Args:
            dtype: that of the config; None is that of the file, or float32.

        Raises:
            FileNotFoundError: there is none, or no such folder.
            ValueError: it is no JSON, or of no such model, or a number is missing or wrong.
            NotImplementedError: a field that changes the result in a way that is not built.
        """
        path = checkpoint_folder(FUNCTION, folder) / "config.json"
        config = cls(**files.read(read_json(FUNCTION, path), str(path)))
        changes: dict[str, Any] = {"dtype": dtype} if dtype else {}
        generation = path.with_name("generation_config.json")
        if generation.is_file():
            given = files.Fields(read_json(FUNCTION, generation), str(generation))
            changes["eos_token_ids"] = given.tokens("eos_token_id") or config.eos_token_ids
        return dataclasses.replace(config, **changes)
