"""The weights of a Llama, random or from a checkpoint folder.

Nothing is put on a device before the names and shapes of all tensors have been checked.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy

from ...runtime.array import Array
from ..checkpoint import Checkpoint, Tensor, progress
from ..place import Place, numpy_dtype
from .config import FUNCTION, LlamaConfig

PREFIX = "model."
EMBEDDING, FINAL_NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"
UNUSED = (".rotary_emb.inv_freq",)  # these frequencies follow from config.json
STD = 0.02  # standard deviation of random matrices
# Random weights repeat after so many; a prime, so that no two rows of a matrix are equal.
PERIOD = 4194301


class LayerWeights(NamedTuple):
    """The tensors of a layer; matrices are (out_features, in_features), None is absent.

    Attributes:
        qkv_weight: the rows of q, then those of k and of v.
        q_norm, k_norm: (head_dim,).
    """

    input_norm: Array
    qkv_weight: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    proj_weight: Array
    proj_bias: Array | None
    mlp_norm: Array
    gate_weight: Array
    gate_bias: Array | None
    up_weight: Array
    up_bias: Array | None
    down_weight: Array
    down_bias: Array | None


class Weights(NamedTuple):
    """All tensors of a model.

    Attributes:
        head_weight: token_embedding itself where the two are tied.
        cos, sin: float32 (max_positions, head_dim / 2), the angles of the rotary embedding.
    """

    token_embedding: Array
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head_weight: Array
    cos: Array
    sin: Array


def layer_tensors(config: LlamaConfig, layer: int) -> dict[str, tuple[Tensor, ...]]:
    """The tensors of a layer by the fields of `LayerWeights`; those of one field are joined."""
    width, inner, head_dim = config.width, config.inner, config.head_dim
    rows_q, rows_kv = config.heads * head_dim, config.heads_kv * head_dim
    qkv = [(f"self_attn.{name}_proj", rows) for name, rows in
           (("q", rows_q), ("k", rows_kv), ("v", rows_kv))]  # fmt: skip
    matrices = {
        "qkv": (qkv, width, config.qkv_bias),
        "proj": ([("self_attn.o_proj", width)], rows_q, config.proj_bias),
        "gate": ([("mlp.gate_proj", inner)], width, config.mlp_bias),
        "up": ([("mlp.up_proj", inner)], width, config.mlp_bias),
        "down": ([("mlp.down_proj", width)], inner, config.mlp_bias),
    }
    place = f"layers.{layer}."
    tensors = {
        "input_norm": (Tensor(f"{place}input_layernorm.weight", (width,)),),
        "mlp_norm": (Tensor(f"{place}post_attention_layernorm.weight", (width,)),),
    }
    for field, (parts, columns, biased) in matrices.items():
        tensors[f"{field}_weight"] = tuple(
            Tensor(f"{place}{name}.weight", (rows, columns)) for name, rows in parts
        )
        if biased:
            tensors[f"{field}_bias"] = tuple(
                Tensor(f"{place}{name}.bias", (rows,)) for name, rows in parts
            )
    if config.head_norms:
        for name in ("q_norm", "k_norm"):
            tensors[name] = (Tensor(f"{place}self_attn.{name}.weight", (head_dim,)),)
    return tensors


def all_tensors(config: LlamaConfig) -> list[Tensor]:
    """Every tensor that a checkpoint must have, without the prefix."""
    table = (config.vocab_size, config.width)
    tensors = [Tensor(EMBEDDING, table), Tensor(FINAL_NORM, (config.width,))]
    tensors += [] if config.tied else [Tensor(HEAD, table)]
    for layer in range(config.layers):
        tensors += [x for parts in layer_tensors(config, layer).values() for x in parts]
    return tensors


def assemble(
    config: LlamaConfig, place: Place, get: Callable[[tuple[Tensor, ...]], Array], title: str
) -> Weights:
    """`Weights` from what ``get`` returns for the tensors of each field.

    Args:
        title: of the progress bar.
    """
    table = (config.vocab_size, config.width)
    embedding = get((Tensor(EMBEDDING, table),))
    absent: dict[str, Array | None] = dict.fromkeys(LayerWeights._fields)
    layers = []
    for layer in progress(range(config.layers), title):
        tensors = layer_tensors(config, layer)
        found = {field: get(parts) for field, parts in tensors.items()}
        layers.append(LayerWeights(**{**absent, **found}))
    cos, sin = map(place.put, config.rope.angles(config.head_dim, config.max_positions))
    final_norm = get((Tensor(FINAL_NORM, (config.width,)),))
    head = embedding if config.tied else get((Tensor(HEAD, table),))
    return Weights(embedding, tuple(layers), final_norm, head, cos, sin)


def load_weights(folder: str | Path, config: LlamaConfig, place: Place) -> Weights:
    """The weights of a checkpoint in the dtype of the config.

    Raises:
        FileNotFoundError: no ``model.safetensors``, nor an index of its parts.
        ImportError: no safetensors; no ml_dtypes for bfloat16, asked for or in the file.
        ValueError: a damaged file; a tensor that is missing, of another shape, too much, or with a
            number that is not finite, or not in the dtype; a head that differs from the embedding
            to which config.json ties it.
    """
    checkpoint = Checkpoint(FUNCTION, Path(folder), PREFIX)
    tensors = all_tensors(config)
    for tensor in tensors:
        checkpoint.check(tensor)
    head = Tensor(HEAD, (config.vocab_size, config.width))
    checkpoint.refuse_others([*tensors, head], UNUSED)
    if config.tied and HEAD in checkpoint:
        _require_tied(checkpoint, config)

    def get(parts: tuple[Tensor, ...]) -> Array:
        values = [checkpoint.load(tensor, config.dtype) for tensor in parts]
        return place.put(values[0] if len(values) == 1 else numpy.concatenate(values))

    return assemble(config, place, get, f"loading {folder}")


def _require_tied(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    """Raise ValueError unless the head of the checkpoint is its embedding of tokens."""
    table = (config.vocab_size, config.width)
    head, embedding = Tensor(HEAD, table), Tensor(EMBEDDING, table)
    checkpoint.check(head)
    if not numpy.array_equal(checkpoint.read(head), checkpoint.read(embedding)):
        fact = f"{HEAD} must equal {EMBEDDING}, as tie_word_embeddings is true in config.json"
        raise ValueError(f"{FUNCTION}: {fact}, got another")


def random_weights(config: LlamaConfig, place: Place, seed: int = 0) -> Weights:
    """Normal matrices with deviation 0.02, norms of 1 and biases of 0; equal seeds, equal weights.

    The numbers are drawn once and copied on the device, so that 8B parameters take seconds.
    """
    rng = numpy.random.default_rng(seed)
    values = STD * rng.standard_normal(PERIOD, dtype="float32")
    block = place.put(values.astype(numpy_dtype(config.dtype, FUNCTION)))
    first = 0

    def get(parts: tuple[Tensor, ...]) -> Array:
        nonlocal first
        shape = (sum(x.shape[0] for x in parts), *parts[0].shape[1:])
        out = place.zeros(shape, config.dtype)
        if len(shape) == 1:
            out[...] = float("norm" in parts[0].name)
            return out
        flat = out.reshape(-1)
        for start, end, place_in_block in _pieces(len(flat), first):
            flat[start:end] = block[place_in_block : place_in_block + end - start]
        first = (first + len(flat)) % PERIOD
        return out

    return assemble(config, place, get, "random weights")


def _pieces(size: int, first: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, place) of the parts of an array of this size that lie in one copy of a block."""
    start = 0
    while start < size:
        place = (first + start) % PERIOD
        end = min(size, start + PERIOD - place)
        yield start, end, place
        start = end
