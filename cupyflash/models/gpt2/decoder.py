"""One run: the way of its steps, whether it fits into memory, and the run of the persistent kernel.

A step can be one persistent cooperative kernel ("persistent"), which needs a contiguous cache, or
be done by an engine, as separate launches ("eager") or as the same launches in a CUDA graph
("graph").
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from cupyflash.runtime.gpu import capability_of

from ...ops.decode.sampling import DecodeState, Sampling, sample
from ...runtime.array import Array
from ...runtime.checks import short
from ...runtime.launch import dependent_possible
from ...runtime.structs import header
from ..engine import Batch, PagePool
from ..engine.devices import device_of
from . import layers
from .config import Gpt2Config
from .weights import Weights

structs = header("block/params.cuh")

# While a token of a prompt is computed, it takes so many times the width: x, its norm, q, k, v,
# attention and the MLP's hidden layer, some of them twice, as an output lives beside its input.
ACTIVATION_WIDTHS = 16
DECODES = ("auto", "eager", "graph", "persistent")
# The largest batch for which one kernel a token is faster than a graph of kernels, by whether
# the kernels of a graph overlap.
PERSISTENT_BATCH = {True: 2, False: 8}


def way_to_decode(function: str, model: Any, decode: str, batch: int) -> str:
    """The way to decode, one of `DECODES` but "auto", for a `Gpt2` and this many prompts.

    Raises:
        ValueError: no such way, or not with this mode, device or batch.
        NotImplementedError: the persistent kernel does not take the model.
    """
    if not isinstance(decode, str) or decode not in DECODES:
        fact = f"decode must be {', '.join(DECODES)}"
        raise ValueError(f"{function}: {fact}, got {short(decode)}")
    if decode == "graph" and not model.on_gpu:
        raise ValueError(f"{function}: decode='graph' needs a GPU, got a model on the CPU")
    if decode == "persistent":
        _require_persistent(function, model, batch)
    if decode != "auto":
        return decode
    if not model.on_gpu or model.mode == "naive":
        return "eager"
    capability = capability_of(model.weights.token_embedding.device.id)
    overlap = dependent_possible(capability)
    if model.mode != "fused" or batch > PERSISTENT_BATCH[overlap]:
        return "graph"
    return "graph" if model.stack_problem else "persistent"


def _require_persistent(function: str, model: Any, batch: int) -> None:
    if model.mode != "fused":
        fact = "decode='persistent' needs mode 'fused'"
        raise ValueError(f"{function}: {fact}, got {model.mode!r}")
    if batch > structs.MAX_BATCH:
        fact = f"decode='persistent' takes at most {structs.MAX_BATCH} prompts"
        raise ValueError(f"{function}: {fact}, got {batch}")
    if model.stack_problem:
        fact = "decode='persistent' cannot run this model"
        raise NotImplementedError(f"{function}: {fact}: {model.stack_problem}")


class Room:
    """A context in which running out of memory names the batch and the length that would fit.

    Args:
        item: bytes of a number.
        length: of the longest sequence with its new tokens.
        free: bytes that can be allocated; None: nobody knows.
        every: whether logits of every token are kept, not only of the last ones.

    Raises:
        MemoryError: ahead if the estimate does not fit, or whatever runs out within.
    """

    def __init__(
        self, config: Gpt2Config, item: int, batch: int, length: int, free: int | None, every: bool
    ) -> None:
        of_logits = config.vocabulary * (4 + item)
        of_token = (ACTIVATION_WIDTHS + 2 * config.layers) * config.width * item
        self.of_token = of_token + of_logits * every
        self.of_sequence = of_logits * (not every)
        self.batch, self.length, self.free = batch, length, free

    @property
    def needed(self) -> int:
        """Estimate in bytes."""
        return self.batch * (self.of_sequence + self.length * self.of_token)

    def __enter__(self) -> None:
        if self.free is not None and self.needed > self.free:
            raise MemoryError(self.text(self.free))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, MemoryError):  # CuPy's is one, too; the estimate was too low
            known = self.needed if self.free is None else min(self.free, self.needed)
            raise MemoryError(self.text(known // 2)) from error

    def text(self, free: int) -> str:
        """The error: the bytes that are needed, and the sizes that would fit."""
        batch = free // (self.of_sequence + self.length * self.of_token)
        length = max(0, free // self.batch - self.of_sequence) // self.of_token
        return (
            f"Gpt2: batch {self.batch} of length {self.length} needs {self.needed / 2**30:.3g} "
            f"GiB, {free / 2**30:.3g} GiB can be used: batch {batch} of that length or length "
            f"{length} of that batch would fit"
        )


def free_memory(xp: Any) -> int | None:
    """Bytes that can be allocated on the current GPU; None on the CPU, where nobody knows."""
    if xp.__name__ != "cupy":
        return None
    free, _ = xp.cuda.runtime.memGetInfo()
    return free + xp.get_default_memory_pool().free_bytes()


class PagedGpt2(NamedTuple):
    """The model as an `Engine` takes it.

    Attributes:
        config: the model's own.
    """

    config: Gpt2Config
    weights: Weights
    mode: str

    @property
    def like(self) -> Array:
        """One of its arrays."""
        return self.weights.token_embedding

    def logits(self, batch: Batch, pool: PagePool) -> Array:
        """(wanted, vocabulary), in the dtype of the weights."""
        x = layers.hidden_states(self.config, self.weights, self.mode, batch, pool)
        return layers.logits(self.config, self.weights, x)


class Decoder:
    """One run on a contiguous cache: ``batch`` sequences of up to ``max_length`` tokens.

    The tokens and their positions stay on the device, where sampling leaves them, so that the host
    can be steps ahead.
    """

    def __init__(self, model: Any, batch: int, max_length: int) -> None:
        config, self.model = model.config, model
        self.batch, self.max_length = batch, max_length
        shape = config.layers, batch + 1, max_length, config.heads, config.head_dim
        self.pool = PagePool(*shape, model.paged.like)
        self.caches = self.pool.k[:, 1:], self.pool.v[:, 1:]
        self.device = device_of(model.paged.like)
        self.state = DecodeState(*(self.device.integers(batch) for _ in DecodeState._fields))

    def prepare(self, prompts: Sequence[Sequence[int]], every: bool = False) -> Batch:
        """Put whole prompts on the device, and the state behind them.

        Args:
            every: logits of every token are wanted, not only of the last ones.
        """
        lengths = [len(prompt) for prompt in prompts]
        ends = numpy.cumsum([0, *lengths], dtype="int32")
        tokens = numpy.concatenate([numpy.asarray(prompt, "int32") for prompt in prompts])
        places = numpy.concatenate([numpy.arange(n, dtype="int32") for n in lengths])
        put = self.model.xp.asarray
        self.state.positions[...] = put(ends[1:] - ends[:-1] - 1)
        starts = self.device.integers(len(lengths))
        return Batch(
            put(tokens),
            put(places),
            starts,
            None,
            put(ends),
            max(lengths),
            None if every else put(ends[1:] - 1),
            sequences=put(numpy.repeat(numpy.arange(len(lengths), dtype="int32"), lengths)),
        )

    def run(self, prompts: Batch) -> Array:
        """The logits of prompts that are on the device: launches and nothing else."""
        return self.model.paged.logits(prompts, self.pool)

    def step(self) -> Array:
        """Logits (batch, vocabulary) after the tokens of the state, which are put into the cache.

        The result may be overwritten by the next step.
        """
        tokens, positions, _ = self.state
        return self.model.stack.next_logits(tokens, *self.caches, positions)

    def advance(self, sampling: Sampling, out: Array) -> None:
        """Run a step, and put the tokens that follow into ``out`` and into the state."""
        if sampling.temperature == 0:
            tokens, positions, _ = self.state
            self.model.stack.step(tokens, *self.caches, positions, out=out)
            self.state = self.state._replace(tokens=out)
        else:
            self.sample(self.step(), sampling, out)

    def sample(self, logits: Array, sampling: Sampling, out: Array) -> None:
        """Put the next tokens into ``out`` and into the state, whose positions advance."""
        limit = self.max_length - 1  # finished sequences stay at this position
        sample(logits, sampling, out=out, state=self.state, limit=limit)
