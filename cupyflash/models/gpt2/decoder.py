"""One run: the way of its steps, whether it fits into memory, its state, and a step.

The state is the cache, tokens and lengths on the device. A step can run as separate launches
("eager"), as the same launches in a CUDA graph ("graph"), or as one persistent cooperative kernel
("persistent"). All read the tokens and their positions from the device, where sampling leaves them,
so that the host can be steps ahead.
"""

from collections.abc import Sequence
from typing import Any

from cupyflash.ops.decode.embedding import embedding
from cupyflash.runtime.gpu import capability_of

from ...ops.decode.sampling import DecodeState, Sampling, sample
from ...runtime.array import Array
from ...runtime.checks import short
from ...runtime.launch import dependent_launches, dependent_possible
from ...runtime.scratch import no_garbage_collected
from ...runtime.structs import header
from . import layers
from .config import Gpt2Config
from .layers import KvCache, PromptAttention, TokenAttention

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


class Decoder:
    """The state of one run: ``batch`` sequences of up to ``max_length`` tokens."""

    def __init__(self, model: Any, batch: int, max_length: int, how: str) -> None:
        self.model, self.xp, self.how = model, model.xp, how
        self.cache = KvCache(model.config, model.xp, model.dtype, batch, max_length)
        self.state = DecodeState(*(self.xp.zeros(batch, "int32") for _ in DecodeState._fields))
        naive = model.mode == "naive"
        self.attention = TokenAttention(
            self.cache, self.state.positions, self.state.ends, naive=naive
        )
        self.graph: CapturedStep | None = None

    def prefill(self, prompts: Sequence[Sequence[int]], every: bool = False) -> Array:
        """Logits (batch, vocabulary) after each prompt; of every token (total, …) if wanted.

        The state is that of the last tokens of the prompts: sampling puts the next ones behind.
        """
        return self.run(self.prepare(prompts), every)

    def prepare(self, prompts: Sequence[Sequence[int]]) -> PromptAttention:
        """Put the prompts on the device."""
        return PromptAttention(self.xp, self.cache, prompts, self.model.mode == "naive")

    def run(self, prompts: PromptAttention, every: bool = False) -> Array:
        """`prefill` of prompts that are on the device: launches and nothing else."""
        model = self.model
        x = layers.hidden_states(
            model.config, model.weights, model.mode, prompts.tokens, prompts.positions, prompts
        )
        x = x.reshape(-1, x.shape[-1])
        if not every:
            x = embedding(prompts.last, x)  # a gather of rows
        self.state.positions[...] = prompts.lengths - 1
        self.state.ends[...] = prompts.lengths
        return layers.logits(model.config, model.weights, x)

    def step(self) -> Array:
        """Logits (batch, vocabulary) after the tokens of the state, which are put into the cache.

        The result may be overwritten by the next step.
        """
        if self.how == "persistent":
            tokens, positions, _ = self.state
            return self.model.stack.next_logits(tokens, self.cache.k, self.cache.v, positions)
        if self.how == "eager":
            return self.launches()
        if self.graph is None:
            self.graph = CapturedStep(self)
        return self.graph()

    def launches(self) -> Array:
        """A step as separate launches."""
        model, (tokens, positions, _) = self.model, self.state
        x = layers.hidden_states(
            model.config,
            model.weights,
            model.mode,
            tokens[:, None],
            positions[:, None],
            self.attention,
        )
        return layers.logits(model.config, model.weights, x[:, 0])

    def advance(self, sampling: Sampling, out: Array) -> None:
        """Run a step, and put the tokens that follow into ``out`` and into the state."""
        if self.how == "persistent" and sampling.temperature == 0:
            tokens, positions, _ = self.state
            self.model.stack.step(tokens, self.cache.k, self.cache.v, positions, out=out)
            self.state = self.state._replace(tokens=out)
        else:
            self.sample(self.step(), sampling, out)

    def sample(self, logits: Array, sampling: Sampling, out: Array) -> None:
        """Put the next tokens into ``out`` and into the state, whose positions advance."""
        limit = self.cache.max_length - 1  # finished sequences stay at this position
        sample(logits, sampling, out=out, state=self.state, limit=limit)


class CapturedStep:
    """The launches of a step in a CUDA graph, with memory that belongs to it."""

    def __init__(self, decoder: Decoder) -> None:
        import cupy

        self.pool = cupy.cuda.MemoryPool()
        stream = cupy.cuda.Stream(non_blocking=True)
        ready = cupy.cuda.get_current_stream().record()
        stream.wait_event(ready)
        with cupy.cuda.using_allocator(self.pool.malloc), stream, no_garbage_collected():
            # Compiles, allocates and fills what is kept; a step can be repeated, as it writes the
            # same keys and values to the same places.
            decoder.launches()
            stream.synchronize()
            stream.begin_capture()
            try:
                # Sampling, which changes tokens and positions, is not a part of the graph; of the
                # cache a step writes the places that no other kernel of the graph reads.
                with dependent_launches():
                    self.logits = decoder.launches()
            finally:
                self.graph = stream.end_capture()
        self.current_stream = cupy.cuda.get_current_stream

    def __call__(self) -> Array:
        self.graph.launch(self.current_stream())
        return self.logits
