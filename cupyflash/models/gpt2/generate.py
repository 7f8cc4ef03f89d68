"""From prompts to streams of tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from cupyflash.array import Array
from cupyflash.checks import is_integer
from cupyflash.decode.sampling import Sampling

from .config import Gpt2Config
from .decoder import Decoder

LENGTH_STEP = 128  # caches come in multiples of it, so that the last one can often be used again


class Request(NamedTuple):
    """What a caller wants; see `Gpt2.generate`."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    end_of_text: int | None

    def checked(self, config: Gpt2Config) -> "Request":
        """Itself, with the end of text that holds.

        Raises:
            ValueError: whatever cannot be done.
            TypeError: sampling is none.
        """
        if not (is_integer(self.max_new_tokens) and self.max_new_tokens >= 1):
            fact = "max_new_tokens must be an integer of at least 1"
            raise ValueError(f"generate: {fact}, got {self.max_new_tokens!r}")
        if not isinstance(self.sampling, Sampling):
            got = type(self.sampling).__name__
            raise TypeError(f"generate: sampling must be a Sampling, got {got}")
        self.sampling.check("generate")
        check_prompts(config, self.prompts, room=1)
        end = config.end_of_text if self.end_of_text is None else self.end_of_text
        return self._replace(end_of_text=end)

    def new_tokens(self, config: Gpt2Config) -> list[int]:
        """The most tokens that each prompt can get."""
        rooms = (config.context - len(prompt) for prompt in self.prompts)
        return [min(self.max_new_tokens, room) for room in rooms]


def check_prompts(config: Gpt2Config, prompts: Sequence[Sequence[int]], room: int) -> None:
    """Raise ValueError unless all are sequences of tokens that leave ``room`` in the context."""
    if isinstance(prompts, str | bytes) or len(prompts) == 0:
        raise ValueError(f"Gpt2: prompts must be sequences of tokens, got {prompts!r}")
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str | bytes) or not hasattr(prompt, "__len__"):
            fact = f"prompt {number} must be a sequence of tokens"
            raise ValueError(f"Gpt2: {fact}, got {type(prompt).__name__}")
        if len(prompt) == 0:
            fact = f"prompt {number} must have at least one token (end-of-text can begin a text)"
            raise ValueError(f"Gpt2: {fact}, got none")
        if len(prompt) + room > config.context:
            fact = f"prompt {number} must have at most {config.context - room} tokens"
            raise ValueError(
                f"Gpt2: {fact}, as the context has {config.context}, got {len(prompt)}"
            )
        tokens = numpy.asarray(prompt)
        known = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if not (known and tokens.min() >= 0 and tokens.max() < config.vocabulary):
            fact = f"tokens of prompt {number} must be integers from 0 to {config.vocabulary - 1}"
            raise ValueError(f"Gpt2: {fact}, got {list(prompt)[:8]}")


def stream(model: Any, request: Request, how: str) -> Iterator[list[int | None]]:
    """Tokens of a checked request; the device works on the next ones while these are read."""
    prompts, steps = request.prompts, request.new_tokens(model.config)
    batch, length = len(prompts), max(len(x) + count for x, count in zip(prompts, steps))
    length = min(model.config.context, -(-length // LENGTH_STEP) * LENGTH_STEP)
    decoder = model.idle_decoder(batch, length, how)
    with model.room(batch, length, held=decoder.cache.nbytes if decoder else 0):
        decoder = decoder or Decoder(model, batch, length, how)
        out = model.xp.zeros((max(steps), batch), "int32")
        decoder.sample(decoder.prefill(prompts), request.sampling, out[0])
    try:
        reader, left = Reader(model.on_gpu), list(steps)
        for step in range(max(steps)):
            reader.start(out[step])
            if step + 1 < max(steps):
                decoder.advance(request.sampling, out[step + 1])
            tokens = reader.wait()
            yield _of_step(request, tokens, step, left)
            if not any(left):
                break
    finally:
        if model.on_gpu:
            model.xp.cuda.get_current_stream().synchronize()  # steps ahead may still run
        model.give_decoder(decoder)


def _of_step(
    request: Request, tokens: list[int], step: int, left: list[int]
) -> list[int | None]:  # fmt: skip
    """The tokens of the sequences that have not ended; counts down what is left of each."""
    result: list[int | None] = []
    for number, token in enumerate(tokens):
        if left[number] and token < 0:
            raise RuntimeError(
                f"generate: logits must be finite, got NaN or infinity for prompt {number} "
                f"at new token {step}; bfloat16 and float32 hold larger numbers than float16"
            )
        if left[number] == 0 or token == request.end_of_text:
            left[number] = 0
            result.append(None)
        else:
            left[number] -= 1
            result.append(token)
    return result


class Reader:
    """Reads tokens from the device without holding up what is enqueued after them."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.host, self.event = on_gpu, None, None

    def start(self, tokens: Array) -> None:
        """Enqueue the copy of int32 (batch,)."""
        if not self.on_gpu:
            self.host = tokens
            return
        import cupy
        import cupyx

        if self.host is None:
            self.host = cupyx.empty_pinned(tokens.shape, "int32")
        stream = cupy.cuda.get_current_stream()
        tokens.get(stream=stream, out=self.host, blocking=False)
        self.event = stream.record()

    def wait(self) -> list[int]:
        """The tokens."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()
