"""The weights of a GPT-2, random or from a checkpoint folder as ``save_pretrained`` writes it.

Nothing is put on a device before the names and shapes of all tensors have been checked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy

from ...ops.block.block import BlockWeights
from ...runtime.array import Array
from ..checkpoint import Checkpoint, Tensor, convert, progress
from ..place import numpy_dtype
from .config import FUNCTION, Gpt2Config

PREFIX = "transformer."
UNUSED = (".attn.bias", ".attn.masked_bias")  # the causal mask
STD = 0.02  # standard deviation of random matrices


class Weights(NamedTuple):
    """All tensors of a model; matrices are (out_features, in_features).

    Attributes:
        final_norm: weight and bias.
        head_weight: token_embedding itself where the two are tied.
    """

    token_embedding: Array
    position_embedding: Array
    blocks: tuple[BlockWeights, ...]
    final_norm: tuple[Array, Array]
    head_weight: Array


def block_tensors(config: Gpt2Config, layer: int) -> dict[str, Tensor]:
    """The tensors of a block by the names of `BlockWeights`."""
    width, inner = config.width, config.inner
    parts = {
        "ln1": ("ln_1", (width,)),
        "qkv": ("attn.c_attn", (width, 3 * width)),
        "proj": ("attn.c_proj", (width, width)),
        "ln2": ("ln_2", (width,)),
        "up": ("mlp.c_fc", (width, inner)),
        "down": ("mlp.c_proj", (inner, width)),
    }
    tensors = {}
    for field, (name, shape) in parts.items():
        name = f"h.{layer}.{name}"
        tensors[f"{field}_weight"] = Tensor(f"{name}.weight", shape, len(shape) == 2)
        tensors[f"{field}_bias"] = Tensor(f"{name}.bias", shape[-1:])
    return tensors


def all_tensors(config: Gpt2Config) -> list[Tensor]:
    """Every tensor that a checkpoint must have, without the prefix."""
    tables = [("wte", config.vocabulary), ("wpe", config.context)]
    tensors = [Tensor(f"{name}.weight", (rows, config.width)) for name, rows in tables]
    for layer in range(config.layers):
        tensors += block_tensors(config, layer).values()
    return tensors + [Tensor(f"ln_f.{part}", (config.width,)) for part in ("weight", "bias")]


def assemble(config: Gpt2Config, get: Callable[[Tensor], Array], head: Array | None) -> Weights:
    """`Weights` from what ``get`` returns for each tensor, in the order of `all_tensors`."""
    wte, wpe, *_, norm_weight, norm_bias = all_tensors(config)
    tokens, positions = get(wte), get(wpe)
    blocks = tuple(
        BlockWeights(**{field: get(x) for field, x in block_tensors(config, layer).items()})
        for layer in range(config.layers)
    )
    final_norm = get(norm_weight), get(norm_bias)
    return Weights(tokens, positions, blocks, final_norm, tokens if head is None else head)


def load_weights(
    folder: str | Path, config: Gpt2Config, dtype: str, put: Callable[[numpy.ndarray], Array]
) -> Weights:
    """The weights of a checkpoint in ``dtype``, each tensor put on its device by ``put``.

    Raises:
        FileNotFoundError: no ``model.safetensors``.
        ImportError: no safetensors; no ml_dtypes for bfloat16, asked for or in the file.
        ValueError: a damaged file; a tensor that is missing, of another shape, too much, or with a
            number that is not finite, or not in ``dtype``.
    """
    checkpoint = Checkpoint(FUNCTION, Path(folder), PREFIX)
    tensors = all_tensors(config)
    head = Tensor("lm_head.weight", (config.vocabulary, config.width))
    has_head = head.name in checkpoint or not config.tied
    for tensor in [*tensors, head] if has_head else tensors:
        checkpoint.check(tensor)
    checkpoint.refuse_others([*tensors, head], UNUSED)
    loaded = {}
    for tensor in progress(tensors, f"loading {folder}"):
        loaded[tensor.name] = put(checkpoint.load(tensor, dtype))
    untied = None
    if has_head:
        values = checkpoint.read(head)
        if not numpy.array_equal(values, checkpoint.read(tensors[0])):
            untied = put(convert(FUNCTION, head, values, dtype))
    return assemble(config, lambda tensor: loaded[tensor.name], untied)


def random_weights(
    config: Gpt2Config, dtype: str, put: Callable[[numpy.ndarray], Array], seed: int = 0
) -> Weights:
    """Weights as GPT-2 is initialised; equal seeds give equal weights.

    Matrices are normal with deviation 0.02, those that write to the residual divided by
    sqrt(2 layers); norms are 1 and biases 0.
    """
    rng, loaded = numpy.random.default_rng(seed), {}
    for tensor in progress(all_tensors(config), "random weights"):
        loaded[tensor.name] = put(_values(config, tensor, rng).astype(numpy_dtype(dtype, FUNCTION)))
    return assemble(config, lambda tensor: loaded[tensor.name], None)


def _values(config: Gpt2Config, tensor: Tensor, rng: numpy.random.Generator) -> numpy.ndarray:
    if len(tensor.shape) == 1:
        is_norm = ".ln_" in f".{tensor.name}" and tensor.name.endswith("weight")
        return numpy.full(tensor.shape, float(is_norm), "float32")
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    values = rng.standard_normal(shape, dtype="float32")
    values *= STD / (2 * config.layers) ** 0.5 if "c_proj" in tensor.name else STD
    return values
