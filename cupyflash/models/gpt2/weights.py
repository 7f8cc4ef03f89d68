"""The weights of a GPT-2, random or from a checkpoint folder as ``save_pretrained`` writes it.

Nothing is put on a device before the names and shapes of all tensors have been checked.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from cupyflash import machine, packages

from ...ops.block.block import BlockWeights
from ...runtime.array import Array
from .config import Gpt2Config

PREFIX = "transformer."
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
STD = 0.02  # standard deviation of random matrices
FLOATS = ("F16", "BF16", "F32", "F64")


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


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its name, and its shape there; Conv1D has (in, out)."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


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
        ValueError: a damaged file; a tensor that is missing, of another shape, or with a number
            that is not finite, or not in ``dtype``.
    """
    checkpoint = Checkpoint(Path(folder))
    tensors = all_tensors(config)
    head = Tensor("lm_head.weight", (config.vocabulary, config.width))
    has_head = head.name in checkpoint
    for tensor in [*tensors, head] if has_head else tensors:
        checkpoint.check(tensor)
    loaded = {}
    for tensor in progress(tensors, f"loading {folder}"):
        loaded[tensor.name] = put(convert(tensor, checkpoint.read(tensor), dtype))
    untied = None
    if has_head:
        values = checkpoint.read(head)
        if not numpy.array_equal(values, checkpoint.read(tensors[0])):
            untied = put(convert(head, values, dtype))
    return assemble(config, lambda tensor: loaded[tensor.name], untied)


class Checkpoint:
    """The safetensors files of a folder, one or several with an index."""

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError:
            line = packages.pip_line("gpt2")
            raise ImportError(f"Gpt2: a checkpoint needs safetensors; {line}") from None
        self.folder, self.places = folder, {}
        paths = self._paths()
        for path in paths:
            try:
                file = safe_open(path, framework="numpy").__enter__()
                names = list(file.keys())
            except Exception as error:  # SafetensorError, or what the system raises
                raise ValueError(
                    f"Gpt2: {path} is damaged or was not written to its end: {error}"
                ) from None
            self.places |= dict.fromkeys(names, (file, path))
        prefixed = any(name.startswith(PREFIX) for name in self.places)
        self.prefix = PREFIX if prefixed else ""

    def _paths(self) -> list[Path]:
        index = self.folder / INDEX
        if (self.folder / FILE).is_file():
            return [self.folder / FILE]
        if not index.is_file():
            raise FileNotFoundError(f"Gpt2: {self.folder} must have {FILE}, found {self._pickle()}")
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"Gpt2: {index} is damaged: {error!r}") from None
        paths = [self.folder / name for name in sorted(files)]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"Gpt2: {index} names {path.name}, found none")
        return paths

    def _pickle(self) -> str:
        """The file in pickle format that is there instead, and how to convert it; else "none"."""
        found = sorted(self.folder.glob("pytorch_model*.bin"))
        if not found:
            return "none"
        folder = str(self.folder)
        code = (
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained({folder!r}).save_pretrained({folder!r})"
        )
        return (
            f"{found[0].name}, a pickle, which is not read because it can run code; where torch "
            f"and transformers are installed, this converts it: python -c {shlex.quote(code)}"
        )

    def full_name(self, name: str) -> str:
        """The name in the file; the head has no prefix."""
        return name if name.startswith("lm_head") else self.prefix + name

    def __contains__(self, name: str) -> bool:
        return self.full_name(name) in self.places

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless the tensor is there, floating-point and of its shape.

        Raises:
            ImportError: no ml_dtypes for a tensor in bfloat16.
        """
        name = self.full_name(tensor.name)
        if tensor.name not in self:
            raise ValueError(f"Gpt2: the checkpoint {self.folder} must have {name}, found none")
        file, path = self.places[name]
        part = file.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if shape != tensor.shape:
            raise ValueError(f"Gpt2: {name} in {path} must be {tensor.shape}, got {shape}")
        if dtype not in FLOATS:
            allowed = ", ".join(FLOATS)
            raise ValueError(f"Gpt2: {name} in {path} must be one of {allowed}, got {dtype}")
        if dtype == "BF16":
            numpy_dtype("bfloat16")  # NumPy, and so safetensors, knows it from the import on

    def read(self, tensor: Tensor) -> numpy.ndarray:
        """The values as they are in the file."""
        name = self.full_name(tensor.name)
        return self.places[name][0].get_tensor(name)


def convert(tensor: Tensor, values: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """The values in ``dtype`` and as (out, in); an error unless all are finite."""
    if not numpy.isfinite(values.astype("float32")).all():
        raise ValueError(f"Gpt2: {tensor.name} must be finite, got NaN or infinity")
    with numpy.errstate(over="ignore"):
        result = values.astype(numpy_dtype(dtype))
    if dtype == "float16" and not numpy.isfinite(result).all():
        largest = abs(values).max()
        fact = f"{tensor.name} must fit into float16"
        raise ValueError(f"Gpt2: {fact}, got {largest:.3g}; take bfloat16 or float32")
    return numpy.ascontiguousarray(result.T if tensor.transposed else result)


def numpy_dtype(dtype: str) -> Any:
    """The NumPy dtype of a name; bfloat16 needs ml_dtypes."""
    if dtype != "bfloat16":
        return numpy.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError("Gpt2: bfloat16 needs ml_dtypes; pip install ml_dtypes") from None
    return numpy.dtype(ml_dtypes.bfloat16)


def progress(tensors: list[Tensor], title: str) -> Iterator[Tensor]:
    """The tensors, with a progress bar where rich is installed and stderr is a terminal."""
    if not machine.has("rich"):
        return iter(tensors)
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return iter(
        track(tensors, title, console=console, transient=True, disable=not console.is_terminal)
    )


def random_weights(
    config: Gpt2Config, dtype: str, put: Callable[[numpy.ndarray], Array], seed: int = 0
) -> Weights:
    """Weights as GPT-2 is initialised; equal seeds give equal weights.

    Matrices are normal with deviation 0.02, those that write to the residual divided by
    sqrt(2 layers); norms are 1 and biases 0.
    """
    rng, loaded = numpy.random.default_rng(seed), {}
    for tensor in progress(all_tensors(config), "random weights"):
        loaded[tensor.name] = put(_values(config, tensor, rng).astype(numpy_dtype(dtype)))
    return assemble(config, lambda tensor: loaded[tensor.name], None)


def _values(config: Gpt2Config, tensor: Tensor, rng: numpy.random.Generator) -> numpy.ndarray:
    if len(tensor.shape) == 1:
        is_norm = ".ln_" in f".{tensor.name}" and tensor.name.endswith("weight")
        return numpy.full(tensor.shape, float(is_norm), "float32")
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    values = rng.standard_normal(shape, dtype="float32")
    values *= STD / (2 * config.layers) ** 0.5 if "c_proj" in tensor.name else STD
    return values
