"""A Llama: its weights on a device, and logits from them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from cupyflash.ops.decode.embedding import embedding

from ...runtime.array import Array
from ...runtime.lookup import library_of
from ..checkpoint import checkpoint_folder
from ..place import Place, choose_place
from . import layers
from .config import FUNCTION, LlamaConfig
from .sizes import SIZES
from .weights import Weights, load_weights, random_weights


class Llama:
    """A Llama, Mistral, Qwen2 or Qwen3 on a GPU, or on the CPU where there is none.

    Attributes:
        config: its shape.
        weights: its tensors, all of one library on one device.
        library: the `Place` of its arrays.
    """

    def __init__(self, config: LlamaConfig, weights: Weights, library: Place) -> None:
        self.config, self.weights, self.library = config, weights, library

    @property
    def like(self) -> Array:
        """One of its arrays, for the library and the device of others."""
        return self.weights.token_embedding

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        dtype: str | None = None,
        device: str | None = None,
        library: str | None = None,
    ) -> "Llama":
        """Load a folder of Hugging Face: config.json and safetensors, in one file or several.

        Args:
            dtype: "float16", "bfloat16" or "float32"; default that of config.json on a GPU, else
                float32.
            device: "gpu" or "cpu"; default the GPU if there is one.
            library: of its arrays, "cupy", "torch" or "numpy"; default CuPy, on the CPU NumPy.

        Raises:
            FileNotFoundError: a file is missing.
            ImportError: no safetensors; no ml_dtypes for bfloat16, asked for or in the file.
            ValueError: another model, a damaged file, a tensor missing, wrong or too much, a weight
                that is not finite, arguments.
            NotImplementedError: a field of config.json that changes the result in a way that is
                not built.
            RuntimeError: no GPU.
        """
        path = checkpoint_folder(FUNCTION, folder)
        place, dtype = choose_place(FUNCTION, library, device, dtype)
        config = LlamaConfig.from_folder(path, dtype)
        place.dtype(config.dtype)
        return cls(config, load_weights(path, config, place), place)

    @classmethod
    def random(
        cls,
        size: str | LlamaConfig,
        *,
        seed: int = 0,
        dtype: str | None = None,
        device: str | None = None,
        library: str | None = None,
    ) -> "Llama":
        """Random weights of a published size, or of a config; equal seeds give equal weights.

        Args:
            size: a name of `SIZES`, such as "llama-3.1-8b", or a config.
            dtype, device, library: as in `from_folder`.

        Raises:
            ValueError: no such size, arguments.
            RuntimeError: no GPU.
        """
        if not isinstance(size, LlamaConfig) and size not in SIZES:
            raise ValueError(f"Llama: size must be one of {', '.join(SIZES)}, got {size!r}")
        config = size if isinstance(size, LlamaConfig) else SIZES[size]
        place, dtype = choose_place(FUNCTION, library, device, dtype)
        config = dataclasses.replace(config, dtype=dtype or config.dtype)
        return cls(config, random_weights(config, place, seed), place)

    def logits(self, batch: Any, pool: Any) -> Array:
        """(wanted, vocab_size) in the model's dtype, what follows the rows that a step asks for.

        The keys and values of its rows enter the pool. Nothing waits for the GPU, so a step can be
        captured in a CUDA graph; what lies on a GPU is not checked.

        Args:
            batch: a `Batch` of the engine, with arrays like those of the model.
            pool: a `PagePool` of as many layers.
        """
        config, weights = self.config, self.weights
        attention = layers.paged_attention(config, batch, pool)
        x = layers.hidden_states(config, weights, batch.tokens, batch.row_positions, attention)
        if batch.last is not None:
            x = embedding(batch.last, x)  # a gather of rows
        return layers.logits(config, weights, x)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[Array]:
        """float32 (length, vocab_size) of each sequence: what follows each of its tokens.

        Sequences do not influence each other, and no cache is needed.

        Raises:
            ValueError: no sequence, an empty one, one beyond ``max_positions``, a token out of
                range.
        """
        config = self.config
        lengths = [len(x) for x in sequences]
        if not lengths or min(lengths) < 1 or max(lengths) > config.max_positions:
            fact = f"sequences must be lists of 1 to {config.max_positions} tokens, at least one"
            raise ValueError(f"Llama: {fact}, got lengths {lengths}")
        tokens = numpy.concatenate([numpy.asarray(x) for x in sequences])
        low, high = tokens.min(), tokens.max()
        if tokens.dtype.kind not in "iu" or low < 0 or high >= config.vocab_size:
            fact = f"tokens must be integers from 0 to {config.vocab_size - 1}"
            raise ValueError(f"Llama: {fact}, got {low} to {high}")
        positions = numpy.concatenate([numpy.arange(n) for n in lengths])
        ends = numpy.cumsum([0, *lengths])
        rows, places, cu_seqlens = (
            self.library.put(x.astype("int32")) for x in (tokens, positions, ends)
        )
        attention = layers.whole_attention(config, cu_seqlens, max(lengths))
        x = layers.hidden_states(config, self.weights, rows, places, attention)
        found = layers.logits(config, self.weights, x)
        found = library_of(found).cast(found, self.weights.cos)  # the angles are float32
        return [found[a:b] for a, b in zip(ends.tolist(), ends.tolist()[1:])]
