"""Generation: the checks of a request, and the stream of its tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...ops.decode.sampling import Sampling
from ...runtime.checks import integer_within, short
from ..engine import Engine
from ..engine.engine import MAX_BATCH, PAGE_SIZE
from ..engine.request import check_ends, check_prompts, check_sampling, not_finite
from .config import Gpt2Config
from .decoder import Decoder
from .tokenizer import StopStrings

LENGTH_STEP = 128  # caches come in multiples of it, so that the last one can often be used again


class Wanted(NamedTuple):
    """What has been asked for and checked; see `Gpt2.generate`.

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
) -> Wanted:
    """What can be done.

    Raises:
        ValueError: whatever cannot be done.
        TypeError: sampling is none, no numbers, no texts, no tokenizer.
    """
    prompts = check_prompts(function, prompts, config.vocabulary, config.context)
    most = integer_within(function, "max_new_tokens", max_new_tokens, 1, 2**31 - 1)
    sampling = check_sampling(function, sampling)
    given = function, "end_of_text", end_of_text
    ends = check_ends(*given, config.eos_token_ids, config.vocabulary)
    return Wanted(prompts, most, sampling, ends, stop_of(function, stop_strings, tokenizer))


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


def stream(model: Any, wanted: Wanted, how: str) -> Iterator[list[int | None]]:
    """Tokens of what has been checked; the device works on the next ones while these are read."""
    steps = wanted.new_tokens(model.config)
    length = max(len(x) + n for x, n in zip(wanted.prompts, steps))
    batch = len(steps) if how == "persistent" else min(len(steps), MAX_BATCH)
    length = min(model.config.context, -(-length // LENGTH_STEP) * LENGTH_STEP)
    run = model.idle_run(batch, length, how)
    with model.room(batch, length, held=run.pool.nbytes if run else 0):
        if how == "persistent":
            run = run or Decoder(model, batch, length)
            tokens = _by_stack(model, run, wanted, steps)
        else:
            run = run or _engine(model, batch, length, graphs=how == "graph")
            sampling, ends = wanted.sampling, list(wanted.ends)
            stop = {"stop_tokens": ends or -1, "stop": wanted.stop}
            tokens = run.stream(wanted.prompts, steps, sampling, **stop)
        first = next(tokens, None)
    try:
        if first is not None:
            yield first
            yield from tokens
    finally:
        tokens.close()
        model.give_run(run, (batch, length, how))


def _engine(model: Any, batch: int, length: int, *, graphs: bool) -> Engine:
    """An engine with room for so many sequences, whatever their lengths."""
    pages = 1 + batch * -(-length // PAGE_SIZE)
    sizes = {"pages": pages, "max_batch": batch, "max_length": length}
    return Engine(model.paged, **sizes, graphs=graphs)


def _by_stack(
    model: Any, decoder: Decoder, wanted: Wanted, steps: list[int]
) -> Iterator[list[int | None]]:
    """The steps of the persistent kernel."""
    out = model.xp.zeros((max(steps), len(steps)), "int32")
    decoder.sample(decoder.run(decoder.prepare(wanted.prompts)), wanted.sampling, out[0])
    left, texts = list(steps), [[] for _ in steps]
    try:
        for step in range(max(steps)):
            tokens = decoder.device.read(out[step])
            if step + 1 < max(steps):
                decoder.advance(wanted.sampling, out[step + 1])
            yield _of_step(wanted, tokens(), texts, left)
            if not any(left):
                break
    finally:
        if model.on_gpu:
            model.xp.cuda.get_current_stream().synchronize()  # steps ahead may still run


def _of_step(
    wanted: Wanted, tokens: list[int], texts: list[list[int]], left: list[int]
) -> list[int | None]:
    """The new tokens of the sequences that go on, appended to ``texts``; counts down ``left``."""
    result: list[int | None] = []
    for number, (token, text) in enumerate(zip(tokens, texts)):
        if left[number] and token < 0:
            raise RuntimeError(not_finite(number, len(text)))
        if left[number] == 0 or token in wanted.ends:
            left[number] = 0
            result.append(None)
            continue
        text.append(token)
        result.append(token)
        stopped = wanted.stop is not None and wanted.stop.end(text)
        left[number] = 0 if stopped else left[number] - 1
    return result
