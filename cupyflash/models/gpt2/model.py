"""GPT-2: weights on a device, and text from them."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from cupyflash import machine

from ...ops.block.block import BlockStack
from ...ops.decode.sampling import GREEDY, Sampling
from ...runtime.array import Array
from ..engine.request import check_prompts, gathered
from ..place import numpy_dtype
from . import generate
from .config import FUNCTION, SIZES, Gpt2Config
from .decoder import Decoder, PagedGpt2, Room, free_memory, way_to_decode
from .layers import MODES
from .weights import Weights, load_weights, random_weights


class Gpt2:
    """A GPT-2 on the GPU, or on the CPU where there is none.

    Attributes:
        config: its shape.
        weights: its tensors, CuPy or NumPy arrays.
        mode: "fused", or for comparison "flash" or "naive"; see ``layers``.
    """

    def __init__(self, config: Gpt2Config, weights: Weights, *, mode: str = "fused") -> None:
        if mode not in MODES:
            raise ValueError(f"Gpt2: mode must be {', '.join(MODES)}, got {mode!r}")
        self.config, self.weights, self.mode = config, weights, mode
        self.on_gpu = not isinstance(weights.token_embedding, numpy.ndarray)
        self.dtype = weights.token_embedding.dtype
        self._idle: dict[tuple, Any] = {}  # the run that ended last, to be used again

    def __getstate__(self) -> dict[str, Any]:
        """The state without what a run has made, which belongs to this process and its GPU."""
        made = ("stack", "stack_problem")
        return {x: y for x, y in self.__dict__.items() if x not in made} | {"_idle": {}}

    @property
    def xp(self) -> Any:
        """The module of its arrays, CuPy or NumPy."""
        return array_module("gpu" if self.on_gpu else "cpu")

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, dtype: str | None = None, device: str | None = None,
        mode: str = "fused",
    ) -> "Gpt2":  # fmt: skip
        """Load a checkpoint folder of Hugging Face: ``config.json`` and ``model.safetensors``.

        Args:
            dtype: "float16", "bfloat16" or "float32"; default float16 on a GPU, else float32.
            device: "gpu" or "cpu"; default the GPU if there is one.
            mode: see the class.

        Raises:
            FileNotFoundError: a file is missing.
            ImportError: no safetensors; no ml_dtypes for bfloat16, asked for or in the file.
            ValueError: not a GPT-2, a damaged file, a tensor missing or wrong, a weight not finite.
            NotImplementedError: an option of transformers that this model does not have.
        """
        config = Gpt2Config.from_folder(folder)
        xp, dtype = _place(device, dtype)
        return cls(config, load_weights(folder, config, dtype, xp.asarray), mode=mode)

    @classmethod
    def random(
        cls, size: str | Gpt2Config, *, dtype: str | None = None, device: str | None = None,
        mode: str = "fused", seed: int = 0,
    ) -> "Gpt2":  # fmt: skip
        """Random weights of a size ("tiny", "small", "medium", "large", "xl") or a config."""
        if not isinstance(size, Gpt2Config) and size not in SIZES:
            raise ValueError(f"Gpt2: size must be one of {', '.join(SIZES)}, got {size!r}")
        config = size if isinstance(size, Gpt2Config) else SIZES[size]
        xp, dtype = _place(device, dtype)
        return cls(config, random_weights(config, dtype, xp.asarray, seed), mode=mode)

    @property
    def paged(self) -> PagedGpt2:
        """The model as an `Engine` takes it."""
        return PagedGpt2(self.config, self.weights, self.mode)

    @functools.cached_property
    def stack(self) -> BlockStack:
        """All blocks as one kernel for a token."""
        w = self.weights
        return BlockStack(
            w.blocks,
            heads=self.config.heads,
            eps=self.config.eps,
            final_weight=w.final_norm[0],
            final_bias=w.final_norm[1],
            head_weight=w.head_weight,
            token_embedding=w.token_embedding,
            position_embedding=w.position_embedding,
        )

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[Array]:
        """float32 (length, vocabulary) of each prompt: what follows each of its tokens.

        Raises:
            ValueError: no prompt, an empty one, one beyond the context, a token out of range.
            MemoryError: it does not fit; says what would.
        """
        config = self.config
        prompts = check_prompts("logits", prompts, config.vocabulary, config.context)
        lengths = [len(prompt) for prompt in prompts]
        with self.room(len(prompts), max(lengths), every=True):
            decoder = Decoder(self, len(prompts), max(lengths))
            every = decoder.run(decoder.prepare(prompts, every=True)).astype("float32")
        ends = numpy.cumsum([0, *lengths]).tolist()
        return [every[a:b] for a, b in zip(ends, ends[1:])]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        end_of_text: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        tokenizer: Any = None,
        decode: str = "auto",
    ) -> list[list[int]]:
        """The new tokens of each prompt, to the end of the text, `max_new_tokens` or the context.

        Args:
            prompts: tokens, of any lengths up to the context; they do not influence each other. One
                that fills the context gets one token.
            max_new_tokens: at least 1.
            sampling: how tokens are chosen; default greedy. The seed of a `Sampling` is 0 unless it
                is given, so equal calls give equal tokens; with seed=None each call draws one anew.
            end_of_text: the tokens that end a sequence, which are not part of the result; None is
                those of the config, -1 ends none.
            stop_strings: a sequence also ends where its new text comes to one of these; tokens up
                to the last one of the string are part of the result.
            tokenizer: what `load_tokenizer` gives, or another with ``decode``; for stop_strings.
            decode: a step as one kernel ("persistent"), as a CUDA graph of kernels ("graph") or
                as kernels ("eager"); "auto" picks, and the CPU has "eager" only beside it.

        Raises:
            TypeError: options that are no numbers, texts or of their classes.
            ValueError: no prompt, an empty one, one longer than the context, a token out of range,
                other options.
            NotImplementedError: ``decode="persistent"`` of a model that its kernel does not take.
            MemoryError: it does not fit; says what would.
            RuntimeError: logits are not finite.
        """
        given = (prompts, max_new_tokens, sampling, end_of_text, stop_strings, tokenizer)
        steps = self._stream("generate", decode, given)
        return gathered(steps, len(prompts))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        end_of_text: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        tokenizer: Any = None,
        decode: str = "auto",
    ) -> Iterator[list[int | None]]:
        """`generate`, as tokens come: one for each prompt at a time, None where its text has ended.

        Arguments are checked here, not at the first token.
        """
        given = (prompts, max_new_tokens, sampling, end_of_text, stop_strings, tokenizer)
        return self._stream("stream", decode, given)

    def _stream(self, function: str, decode: str, given: tuple) -> Iterator[list[int | None]]:
        wanted = generate.checked(function, self.config, *given)
        how = way_to_decode(function, self, decode, len(wanted.prompts))
        return generate.stream(self, wanted, how)

    def room(self, batch: int, length: int, *, held: int = 0, every: bool = False) -> Room:
        """A context in which running out of memory names what would fit.

        Args:
            held: bytes that the run has already.
            every: logits of every token.
        """
        free = free_memory(self.xp)
        free = None if free is None else free + held
        return Room(self.config, self.dtype.itemsize, batch, length, free, every)

    def idle_run(self, batch: int, length: int, how: str) -> Any:
        """The last run, an `Engine` or a `Decoder`, if it has this size; None if it has not.

        It has one user until it is given back.
        """
        run = self._idle.pop((batch, length, how), None)
        self._idle.clear()  # its memory may be needed
        if isinstance(run, Decoder):
            run.model = self
        return run

    def give_run(self, run: Any, size: tuple[int, int, str]) -> None:
        """Keep a run for the next one of this size; it holds no reference to the model."""
        if isinstance(run, Decoder):
            run.model = None
        self._idle = {size: run}

    @functools.cached_property
    def stack_problem(self) -> str:
        """Why the persistent kernel does not take this model: sizes, GPU; "" if it does."""
        try:
            _ = self.stack
        except (NotImplementedError, ValueError) as error:
            return str(error)
        return ""


def array_module(device: str) -> Any:
    """CuPy for "gpu", NumPy for "cpu"."""
    if device == "cpu":
        return numpy
    import cupy

    return cupy


def _place(device: str | None, dtype: str | None) -> tuple[Any, str]:
    """The array module and the dtype of a new model.

    Raises:
        ValueError: device, dtype.
        RuntimeError: no GPU.
    """
    if device not in (None, "gpu", "cpu"):
        raise ValueError(f"Gpt2: device must be 'gpu' or 'cpu', got {device!r}")
    if dtype not in (None, "float16", "bfloat16", "float32"):
        raise ValueError(f"Gpt2: dtype must be float16, bfloat16 or float32, got {dtype!r}")
    problem = machine.gpu_problem() if device != "cpu" else ""
    if device == "gpu" and problem:
        raise RuntimeError(f"Gpt2: device 'gpu' cannot be used: {problem}")
    device = "cpu" if device == "cpu" or problem else "gpu"
    dtype = dtype or ("float16" if device == "gpu" else "float32")
    numpy_dtype(dtype, FUNCTION)  # the error of a missing ml_dtypes
    return array_module(device), dtype
