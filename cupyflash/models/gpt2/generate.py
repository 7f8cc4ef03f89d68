"""Generation: the checks of a request, and the stream of its tokens."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from ...ops.decode.sampling import Sampling
from ...runtime.array import Array
from ...runtime.checks import integer_within, is_integer, short
from .config import Gpt2Config
from .decoder import Decoder
from .tokenizer import StopStrings

LENGTH_STEP = 128  # caches come in multiples of it, so that the last one can often be used again


class Request(NamedTuple):
    """A request that has been checked; see `Gpt2.generate`.

    Attributes:
        ends: the tokens that end a text.
        stop: the strings that also end a text, or None.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    ends: frozenset[int]
    stop: StopStrings | None

    def new_tokens(self, config: Gpt2Config) -> list[int]:
        """The most tokens that each prompt can get; the last one needs no place in the context."""
        rooms = (config.context + 1 - len(prompt) for prompt in self.prompts)
        return [min(self.max_new_tokens, room) for room in rooms]


def checked(
    function: str,
    config: Gpt2Config,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    end_of_text: int | Sequence[int] | None,
    stop_strings: str | Sequence[str],
    tokenizer: Any,
) -> Request:
    """A request that can be done.

    Raises:
        ValueError: whatever cannot be done.
        TypeError: sampling is none, no numbers, no texts, no tokenizer.
    """
    check_prompts(function, config, prompts)
    most = integer_within(function, "max_new_tokens", max_new_tokens, 1, 2**31 - 1)
    if not isinstance(sampling, Sampling):
        fact = "sampling must be a Sampling"
        raise TypeError(f"{function}: {fact}, got {short(sampling)}")
    ends = end_tokens(function, config, end_of_text)
    stop = stop_of(function, stop_strings, tokenizer)
    return Request(prompts, most, sampling.with_seed(), ends, stop)


def end_tokens(
    function: str, config: Gpt2Config, end_of_text: int | Sequence[int] | None
) -> frozenset[int]:
    """The tokens that end a text; those of the config by default, none of -1."""
    if end_of_text is None:
        known = config.end_of_text
        return frozenset(() if known is None else [known] if isinstance(known, int) else known)
    tokens = end_of_text
    if is_integer(tokens):
        tokens = [tokens]
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes | dict):
        fact = "end_of_text must be a token or several"
        raise TypeError(f"{function}: {fact}, got {short(end_of_text)}")
    last = config.vocabulary - 1
    return frozenset(integer_within(function, "end_of_text", x, -1, last) for x in tokens)


def stop_of(function: str, strings: str | Sequence[str], tokenizer: Any) -> StopStrings | None:
    """The strings that end a text; None if there are none."""
    if isinstance(strings, str):
        strings = [strings]
    if not isinstance(strings, list | tuple) or not all(isinstance(x, str) for x in strings):
        fact = "stop_strings must be a text or a sequence of texts"
        raise TypeError(f"{function}: {fact}, got {short(strings)}")
    if not all(strings):
        raise ValueError(f"{function}: stop_strings must have characters, got {strings!r}")
    if not strings:
        return None
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "decode"):
        fact = "stop_strings need a tokenizer with decode()"
        raise TypeError(f"{function}: {fact}, got {short(tokenizer)}")
    return StopStrings(tokenizer, tuple(strings))


def check_prompts(function: str, config: Gpt2Config, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless all are sequences of tokens that the context can hold."""
    if not is_sequence(prompts) or len(prompts) == 0:
        raise ValueError(f"{function}: prompts must be sequences of tokens, got {short(prompts)}")
    last = config.vocabulary - 1
    for number, prompt in enumerate(prompts):
        if not is_sequence(prompt):
            fact = f"prompt {number} must be a sequence of tokens"
            raise ValueError(f"{function}: {fact}, got {short(prompt)}")
        if len(prompt) == 0:
            fact = f"prompt {number} must have at least one token (end-of-text can begin a text)"
            raise ValueError(f"{function}: {fact}, got none")
        if len(prompt) > config.context:
            fact = f"prompt {number} must have at most {config.context} tokens, as the context has"
            raise ValueError(f"{function}: {fact}, got {len(prompt)}")
        try:
            tokens = numpy.asarray(prompt)
        except (TypeError, ValueError, RuntimeError):  # on a GPU, or rows of several lengths
            tokens = numpy.empty(0)
        known = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if not (known and tokens.min() >= 0 and tokens.max() <= last):
            fact = f"tokens of prompt {number} must be integers from 0 to {last}"
            raise ValueError(f"{function}: {fact}, got {short(prompt[:8])}")


def is_sequence(x: Any) -> bool:
    """Whether x can be a row of tokens, or several such rows."""
    if isinstance(x, str | bytes | dict | set | type) or getattr(x, "shape", (1,)) == ():
        return False
    return hasattr(x, "__len__") and hasattr(x, "__getitem__")


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
        texts: list[list[int]] = [[] for _ in prompts]
        for step in range(max(steps)):
            reader.start(out[step])
            if step + 1 < max(steps):
                decoder.advance(request.sampling, out[step + 1])
            tokens = reader.wait()
            yield _of_step(request, tokens, texts, left)
            if not any(left):
                break
    finally:
        if model.on_gpu:
            model.xp.cuda.get_current_stream().synchronize()  # steps ahead may still run
        model.give_decoder(decoder)


def _of_step(
    request: Request, tokens: list[int], texts: list[list[int]], left: list[int]
) -> list[int | None]:
    """The new tokens of the sequences that go on, appended to ``texts``; counts down ``left``."""
    result: list[int | None] = []
    for number, (token, text) in enumerate(zip(tokens, texts)):
        if left[number] and token < 0:
            raise RuntimeError(
                f"generate: logits must be finite, got NaN or infinity for prompt {number} "
                f"at new token {len(text)}; bfloat16 and float32 hold larger numbers than float16"
            )
        if left[number] == 0 or token in request.ends:
            left[number] = 0
            result.append(None)
            continue
        text.append(token)
        result.append(token)
        stopped = request.stop is not None and request.stop.end(text)
        left[number] = 0 if stopped else left[number] - 1
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
