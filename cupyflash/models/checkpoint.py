"""Folders of Hugging Face models: JSON files, and tensors in safetensors files, without torch.

The names and shapes of all tensors can be checked before the first one is read.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from cupyflash import machine, packages

from .place import numpy_dtype

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F16", "BF16", "F32", "F64")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
BFLOAT16_EXPONENT = 0x7F80  # its bits are all set in infinities and NaN
MOST_LAYERS = 10000  # of which each has names of its own; published models have some hundreds
MOST = 2**31 - 1  # of any other size
# The fields of config.json that change no logits, of any model.
HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_decoder", "label2id", "model_type", "pad_token_id", "problem_type",
    "return_dict", "sep_token_id", "task_specific_params", "tokenizer_class", "torchscript",
    "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
    "finetuning_task", "prefix", "tf_legacy_loss", "unsloth_fixed", "unsloth_version",
}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its name, and its shape there; Conv1D has (in, out)."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


def checkpoint_folder(function: str, folder: str | Path) -> Path:
    """The path of a checkpoint folder.

    Raises:
        FileNotFoundError: there is no such folder; where it can be a name of the Hugging Face hub,
            the text has the command that downloads it.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    fact = "a checkpoint must be a folder on this machine, as nothing is downloaded"
    got = f"the file {path}" if path.exists() else f"{str(folder)!r}, which does not exist"
    text = f"{function}: {fact}, got {got}"
    if not path.exists() and HUB_NAME.fullmatch(str(folder)):
        files = "config.json model.safetensors tokenizer.json"
        text += (
            f"; if that is a name of the Hugging Face hub, `hf download {folder} {files} "
            f"--local-dir {path.name}` (of the package huggingface_hub) makes a folder of it"
        )
    raise FileNotFoundError(text)


def read_json(function: str, path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{function}: a checkpoint folder must have {path}, found none")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{function}: {path} must be JSON, got {error}") from None


def refuse_unknown(function: str, given: dict[str, Any], place: Any, known: set[str]) -> None:
    """Raise NotImplementedError for a field that may change the result, as nobody knows it.

    One that says nothing is let through: false, null, 0 or empty.

    Args:
        place: the file of the fields.
    """
    for name, value in given.items():
        if value and name not in known:
            fact = f"{name} in {place} is not known and may change the result; allowed is "
            raise NotImplementedError(
                f"{function}: {fact}to remove it if it does not, got {value!r}"
            )


def require_count(function: str, name: str, value: Any, most: int = MOST) -> int:
    """An integer from 1 to ``most``.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        fact = f"{name} must be a positive integer of at most {most}"
        raise ValueError(f"{function}: {fact}, got {value!r}")
    return value


def require_eps(function: str, name: str, value: Any) -> float:
    """The eps of a norm, which is added to the variance.

    Raises:
        ValueError: no number above 0 and below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        fact = f"{name} must be a positive number below 1"
        raise ValueError(f"{function}: {fact}, got {value!r}")
    return float(value)


def require_tokens(function: str, name: str, value: Any) -> tuple[int, ...]:
    """The tokens of one token, or of a list of them.

    Raises:
        ValueError: another value.
    """
    tokens = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in tokens):
        fact = f"{name} must be a token or a list of tokens"
        raise ValueError(f"{function}: {fact}, got {value!r}")
    return tuple(tokens)


class Checkpoint:
    """The safetensors files of a folder, one or several with an index.

    Args:
        function: who reads, for errors.
        prefix: what the names of all tensors but those of the head begin with; it may be missing
            in the files, where a model was saved without its head.

    Raises:
        ImportError: no safetensors.
        FileNotFoundError: no file.
        ValueError: a damaged file.
    """

    def __init__(self, function: str, folder: Path, prefix: str) -> None:
        try:
            from safetensors import safe_open
        except ImportError:
            line = packages.pip_line("gpt2")
            raise ImportError(f"{function}: a checkpoint needs safetensors; {line}") from None
        self.function, self.folder, self.places = function, folder, {}
        paths = self._paths()
        for path in paths:
            try:
                file = safe_open(path, framework="numpy").__enter__()
                names = list(file.keys())
            except Exception as error:  # SafetensorError, or what the system raises
                raise ValueError(
                    f"{function}: {path} is damaged or was not written to its end: {error}"
                ) from None
            self.places |= dict.fromkeys(names, (file, path))
        prefixed = any(name.startswith(prefix) for name in self.places)
        self.prefix = prefix if prefixed else ""

    def _paths(self) -> list[Path]:
        index, function = self.folder / INDEX, self.function
        if (self.folder / FILE).is_file():
            return [self.folder / FILE]
        if not index.is_file():
            fact = f"{self.folder} must have {FILE}"
            raise FileNotFoundError(f"{function}: {fact}, found {self._pickle()}")
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{function}: {index} is damaged: {error!r}") from None
        paths = [self.folder / name for name in sorted(files)]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"{function}: {index} names {path.name}, found none")
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
        name, function = self.full_name(tensor.name), self.function
        if tensor.name not in self:
            fact = f"the checkpoint {self.folder} must have {name}"
            raise ValueError(f"{function}: {fact}, found none")
        file, path = self.places[name]
        part = file.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if shape != tensor.shape:
            raise ValueError(f"{function}: {name} in {path} must be {tensor.shape}, got {shape}")
        if dtype not in FLOATS:
            allowed = ", ".join(FLOATS)
            raise ValueError(f"{function}: {name} in {path} must be one of {allowed}, got {dtype}")
        if dtype == "BF16":
            # NumPy, and so safetensors, knows it from the import on.
            numpy_dtype("bfloat16", function)

    def refuse_others(self, tensors: Iterable[Tensor], unused: tuple[str, ...]) -> None:
        """Raise ValueError for a tensor that the model lacks: its result would be another.

        Args:
            tensors: those that it has.
            unused: ends of the names of tensors that older checkpoints have for nothing.
        """
        known = {self.full_name(x.name) for x in tensors}
        others = sorted(x for x in self.places if x not in known and not x.endswith(unused))
        if others:
            fact = f"the checkpoint {self.folder} must have no tensor that the model lacks"
            raise ValueError(
                f"{self.function}: {fact}, got {', '.join(others[:3])} and {len(others)} in all"
            )

    def read(self, tensor: Tensor) -> numpy.ndarray:
        """The values as they are in the file."""
        name = self.full_name(tensor.name)
        return self.places[name][0].get_tensor(name)

    def load(self, tensor: Tensor, dtype: str) -> numpy.ndarray:
        """The values in ``dtype`` and as (out, in).

        Raises:
            ValueError: a value that is not finite, or too large for ``dtype``.
        """
        return convert(self.function, tensor, self.read(tensor), dtype)


def convert(function: str, tensor: Tensor, values: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """The values in ``dtype`` and as (out, in); an error unless all are finite."""
    if not _finite(values):
        raise ValueError(f"{function}: {tensor.name} must be finite, got NaN or infinity")
    with numpy.errstate(over="ignore"):
        result = values.astype(numpy_dtype(dtype, function), copy=False)
    if result is not values and not _finite(result):
        fact, largest = f"{tensor.name} must fit into {dtype}", abs(values).max()
        advice = "; take bfloat16 or float32" if dtype == "float16" else ""
        raise ValueError(f"{function}: {fact}, got {largest:.3g}{advice}")
    return numpy.ascontiguousarray(result.T if tensor.transposed else result)


def _finite(values: numpy.ndarray) -> bool:
    """Whether all are finite; those of bfloat16 are not widened, which would take longer."""
    if values.dtype.name == "bfloat16":
        exponents = values.view("uint16") & numpy.uint16(BFLOAT16_EXPONENT)
        return not (exponents == BFLOAT16_EXPONENT).any()
    return bool(numpy.isfinite(values).all())


def progress(items: Iterable[Any], title: str) -> Iterator[Any]:
    """The items, with a progress bar where rich is installed and stderr is a terminal."""
    items = list(items)
    if not machine.has("rich"):
        return iter(items)
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return iter(
        track(items, title, console=console, transient=True, disable=not console.is_terminal)
    )
