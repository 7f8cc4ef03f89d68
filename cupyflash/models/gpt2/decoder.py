"""The state of one run: cache, tokens and lengths on the device, and a step from one to the next.

A step can run as separate launches ("eager"), as the same launches in a CUDA graph ("graph"), or as
one persistent cooperative kernel ("persistent"). All read the tokens and their positions from the
device, where sampling leaves them, so that the host can be steps ahead.
"""

from collections.abc import Sequence
from typing import Any

from cupyflash.decode.embedding import embedding

from ...decode.sampling import DecodeState, Sampling, sample
from ...runtime.array import Array
from ...runtime.launch import dependent_launches
from . import layers
from .attention import PromptAttention, TokenAttention
from .cache import KvCache


class Decoder:
    """Room for ``batch`` sequences of up to ``max_length`` tokens."""

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
        """The prompts on the device."""
        return PromptAttention(self.xp, self.cache, prompts, self.model.mode == "naive")

    def run(self, prompts: PromptAttention, every: bool = False) -> Array:
        """`prefill` of what is on the device: launches and nothing else."""
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
        """A step, and what follows its tokens into ``out`` and into the state."""
        if self.how == "persistent" and sampling.temperature == 0:
            tokens, positions, _ = self.state
            self.model.stack.step(tokens, self.cache.k, self.cache.v, positions, out=out)
            self.state = self.state._replace(tokens=out)
        else:
            self.sample(self.step(), sampling, out)

    def sample(self, logits: Array, sampling: Sampling, out: Array) -> None:
        """Tokens into ``out`` and into the state, whose positions advance."""
        limit = self.cache.max_length - 1  # those of sequences that are done stay there
        sample(logits, sampling, out=out, state=self.state, limit=limit)


class CapturedStep:
    """The launches of a step in a CUDA graph, with memory that belongs to it."""

    def __init__(self, decoder: Decoder) -> None:
        import cupy

        self.pool = cupy.cuda.MemoryPool()
        stream = cupy.cuda.Stream(non_blocking=True)
        ready = cupy.cuda.get_current_stream().record()
        stream.wait_event(ready)
        with cupy.cuda.using_allocator(self.pool.malloc), stream:
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
