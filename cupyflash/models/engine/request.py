"""A request: its prompt, sampling and stop conditions, and the tokens that it has got so far."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

from ...ops.decode.sampling import Sampling
from ...runtime.checks import integer_within, is_integer, short

UNENDED = -1  # as the only stop token: none


@dataclasses.dataclass(eq=False)
class Request:
    """What `Engine.submit` returns; the engine fills in its tokens.

    Attributes:
        prompt: its tokens.
        max_new_tokens: the most new tokens.
        sampling: with a seed.
        stop_tokens: the tokens that end the text and are no part of it.
        stop: an object whose ``end(tokens)`` says whether the text ends with the last of these new
            tokens, or None.
        number: a part of the counter of its random numbers, so that requests with one seed draw
            different ones.
        tokens: the new tokens that the host has read.
        reason: why it has ended: "stop", "length", "cancelled", or "nan", where a logit was not
            finite; "" while it goes on.
        pages: the numbers of its pages in the pool.
        computed: how many tokens steps over prompts have computed; a request that was preempted
            computes those of its answer in such steps, too.
        sampled: how many new tokens there are, with those that the host has not read yet.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int] = frozenset()
    stop: Any = None
    number: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str = ""
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    sampled: int = 0

    @property
    def known(self) -> list[int]:
        """The prompt and the new tokens that the host has read."""
        return self.prompt + self.tokens

    @property
    def position(self) -> int:
        """The position of its latest token, the input of the next step; so many keys it has."""
        return len(self.prompt) + self.sampled - 1

    def add(self, token: int) -> None:
        """A token has been read; -1 where the logits were no distribution."""
        if token < 0:
            self.reason = "nan"
        elif token in self.stop_tokens:
            self.reason = "stop"
        else:
            self.tokens.append(token)
            if self.stop is not None and self.stop.end(self.tokens):
                self.reason = "stop"
            elif len(self.tokens) == self.max_new_tokens:
                self.reason = "length"


def gathered(steps: Iterable[list[int | None]], count: int) -> list[list[int]]:
    """The tokens of each of ``count`` prompts from a stream, see `Engine.stream`."""
    results: list[list[int]] = [[] for _ in range(count)]
    for tokens in steps:
        for result, token in zip(results, tokens):
            if token is not None:
                result.append(token)
    return results


def each(name: str, value: Any, count: int) -> list:
    """One value for each prompt.

    Raises:
        ValueError: another number of them.
    """
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"stream: {name} must be one, or {count} of them, got {len(value)}")
    return list(value)


def check_prompt(
    function: str, prompt: Sequence[int], vocabulary: int, most: int, name: str = "the prompt"
) -> list[int]:
    """The tokens of a prompt as plain integers.

    Raises:
        ValueError: no sequence of at least one token and of ``most`` at most, or a token out of
            range.
    """
    if not is_sequence(prompt):
        fact = f"{name} must be a sequence of tokens"
        raise ValueError(f"{function}: {fact}, got {short(prompt)}")
    if len(prompt) == 0:
        fact = f"{name} must have at least one token (end-of-text can begin a text)"
        raise ValueError(f"{function}: {fact}, got none")
    if len(prompt) > most:
        fact = f"{name} must have at most {most} tokens, as the context has"
        raise ValueError(f"{function}: {fact}, got {len(prompt)}")
    try:
        tokens = numpy.asarray(prompt)
    except (TypeError, ValueError, RuntimeError):  # on a GPU, or rows of several lengths
        tokens = numpy.empty(0)
    known = tokens.ndim == 1 and tokens.dtype.kind in "iu"
    if not (known and tokens.min() >= 0 and tokens.max() < vocabulary):
        fact = f"tokens of {name} must be integers from 0 to {vocabulary - 1}"
        raise ValueError(f"{function}: {fact}, got {short(prompt[:8])}")
    return tokens.tolist()


def check_prompts(
    function: str, prompts: Sequence[Sequence[int]], vocabulary: int, most: int
) -> list[list[int]]:
    """The tokens of several prompts; see `check_prompt`."""
    if not is_sequence(prompts) or len(prompts) == 0:
        raise ValueError(f"{function}: prompts must be sequences of tokens, got {short(prompts)}")
    return [
        check_prompt(function, prompt, vocabulary, most, f"prompt {number}")
        for number, prompt in enumerate(prompts)
    ]


def check_sampling(function: str, sampling: Any) -> Sampling:
    """The sampling, with a seed.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(sampling, Sampling):
        fact = "sampling must be a Sampling"
        raise TypeError(f"{function}: {fact}, got {short(sampling)}")
    return sampling.with_seed()


def check_stop(function: str, stop: Any) -> Any:
    """The object that a request asks after each token whether its text ends.

    Raises:
        TypeError: it has no ``end``; in a step, this would end all other requests, too.
    """
    if stop is not None and not callable(getattr(stop, "end", None)):
        fact = "stop must be None or an object with a method end(tokens)"
        raise TypeError(f"{function}: {fact}, got {short(stop)}")
    return stop


def check_ends(
    function: str,
    name: str,
    tokens: int | Sequence[int] | None,
    default: Iterable[int],
    vocabulary: int,
) -> frozenset[int]:
    """The tokens that end a text: ``default`` for None, none of -1.

    Raises:
        TypeError: neither tokens nor None.
        ValueError: a token out of range.
    """
    if tokens is None:
        return frozenset(default)
    given: Any = [tokens] if is_integer(tokens) else tokens
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | dict):
        fact = f"{name} must be a token or several"
        raise TypeError(f"{function}: {fact}, got {short(tokens)}")
    last = vocabulary - 1
    return frozenset(integer_within(function, name, x, UNENDED, last) for x in given)


def not_finite(number: int, place: int) -> str:
    """The error of a prompt whose logits are no distribution at a new token."""
    return (
        f"generate: logits must be finite, got NaN or infinity for prompt {number} at new token "
        f"{place}; bfloat16 and float32 hold larger numbers than float16"
    )


def is_sequence(x: Any) -> bool:
    """Whether x can be a row of tokens, or several such rows."""
    if isinstance(x, str | bytes | dict | set | type) or getattr(x, "shape", (1,)) == ():
        return False
    return hasattr(x, "__len__") and hasattr(x, "__getitem__")
