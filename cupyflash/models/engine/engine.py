"""The engine: requests that come and go, and steps of a model for all of them at once."""

import collections
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...ops.decode.sampling import GREEDY, Sampling
from ...runtime.checks import integer_within, short
from .decoder import Decoder
from .pool import PagePool, pages_that_fit
from .request import (
    Request,
    check_ends,
    check_prompt,
    check_sampling,
    check_stop,
    each,
    gathered,
    is_sequence,
    not_finite,
)
from .scheduler import Scheduler

PAGE_SIZE = 64
MAX_BATCH = 64


class Engine:
    """Generates tokens for many requests at once: each step is for all that can go on.

    Requests come at any time, have prompts and answers of any lengths and each its own sampling.
    Greedy or with a seed, a request gets the tokens that it gets alone, but where rounding decides:
    ``num_splits=1`` removes what the other requests of a step change in attention. Several threads
    may use one engine; they wait for each other.

    Args:
        model: a language model: ``config`` with ``layers``, ``heads_kv``, ``head_dim``,
            ``vocab_size``, ``max_positions`` and ``eos_token_ids``; ``like``, one of its arrays;
            ``logits(batch, pool)``, (wanted, vocab_size) of a `Batch`, of any dtype.
        pages: of the pool, with one for padding; None takes most of the free memory of a GPU.
        page_size: tokens of a page.
        max_batch: the most requests that decode at once.
        max_length: the most tokens of a request; None: what the model and the pool have room for.
        graphs: whether steps of decoding are CUDA graphs; None: where there is a GPU, but not under
            CUPYFLASH_DEBUG=1, which reads arrays on the host.
        num_splits: 1 to 128 fixes how attention divides the keys; 0 leaves it to each step.

    Raises:
        ValueError: sizes, graphs on the CPU.
        MemoryError: the pages do not fit.

    Sources: pages, arXiv:2309.06180; batches that change from step to step: Orca, OSDI 2022.
    """

    def __init__(
        self,
        model: Any,
        *,
        pages: int | None = None,
        page_size: int = PAGE_SIZE,
        max_batch: int = MAX_BATCH,
        max_length: int | None = None,
        graphs: bool | None = None,
        num_splits: int = 0,
    ) -> None:
        whole = functools.partial(integer_within, "Engine")
        most = model.config.max_positions
        page_size = whole("page_size", page_size, 1, 2**16)
        max_batch = whole("max_batch", max_batch, 1, 2**16)
        length = most if max_length is None else whole("max_length", max_length, 1, most)
        if pages is None:
            pages = pages_that_fit(model, page_size, max_batch, length)
        pages = whole("pages", pages, 2, 2**31 - 1)
        config, room = model.config, (pages - 1) * page_size
        self.model, self.max_length = model, min(length, room)
        shape = config.layers, pages, page_size, config.heads_kv, config.head_dim
        self.pool = PagePool(*shape, model.like)
        self.scheduler = Scheduler(self.pool, max_batch)
        widest = self.pool.count(self.max_length)
        num_splits = whole("num_splits", num_splits, 0, 128)
        self.decoder = Decoder(model, self.pool, max_batch, widest, graphs, num_splits)
        # The requests of each step whose tokens nobody has read, and what waits for these.
        self._unread: collections.deque[tuple[list[Request], Callable[[], list[int]]]]
        self._unread, self._lock = collections.deque(), threading.RLock()
        # Whether a step goes on, and the requests that leave when it has ended.
        self._steps, self._leaving = False, list[Request]()

    @property
    def busy(self) -> bool:
        """Whether a request goes on, or has tokens that nobody has read."""
        return self.scheduler.busy or bool(self._unread)

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        stop_tokens: int | Sequence[int] | None = None,
        stop: Any = None,
        number: int = 0,
    ) -> Request:
        """Put a new request behind those that wait; `step` fills in its tokens.

        Args:
            prompt: tokens, at least one, at most ``max_length``.
            max_new_tokens: at least 1; the request also ends where its length does.
            sampling: how its tokens are chosen; seed=None draws one.
            stop_tokens: what ends it and is no part of it; None is what the model says, -1 nothing.
            stop: None, or an object whose ``end(tokens)`` says whether these new tokens, which are
                part of the result, end the text; it is called after each of them.
            number: from 0 to 2^32 - 1; requests with one seed and different numbers draw different
                tokens.

        Raises:
            TypeError: no numbers, no sampling, no ``stop.end``.
            ValueError: a prompt, number or token that cannot be.
        """
        request = self._request(prompt, max_new_tokens, sampling, stop_tokens, stop, number)
        with self._lock:
            self.scheduler.waiting.append(request)
        return request

    def _request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: int | Sequence[int] | None,
        stop: Any,
        number: int,
    ) -> Request:
        """A request that has been checked."""
        config = self.model.config
        tokens = check_prompt("submit", prompt, config.vocab_size, self.max_length)
        most = integer_within("submit", "max_new_tokens", max_new_tokens, 1, 2**31 - 1)
        given = "submit", "stop_tokens", stop_tokens
        return Request(
            tokens,
            min(most, self.max_length + 1 - len(tokens)),  # the last one needs no place
            check_sampling("submit", sampling),
            check_ends(*given, config.eos_token_ids, config.vocab_size),
            check_stop("submit", stop),
            integer_within("submit", "number", number, 0, 2**32 - 1),
        )

    def step(self) -> list[Request]:
        """Enqueue a step and read the tokens of the one before it.

        Returns:
            The requests that have got a token or ended; empty after the first step of many.

        Raises:
            Whatever the model raises, such as MemoryError; all requests are cancelled then.
            RuntimeError: a step within a step, by ``stop.end``.
        """
        with self._lock:
            if self._steps:
                raise RuntimeError("step: stop.end cannot take a step of its engine, got one")
            self._steps = True
            try:
                return self._step()
            except BaseException:
                for request in self._going():
                    self.cancel(request)
                self._unread.clear()
                raise
            finally:
                while self._leaving:
                    self.scheduler.leave(self._leaving.pop())
                self._steps = False

    def _step(self) -> list[Request]:
        with self.decoder.device.current():
            changed = self._read() if self.scheduler.must_preempt else []
            scheduler, enqueued = self.scheduler, None
            if chunks := scheduler.next_prompts():
                tokens = self.decoder.prefill(chunks, scheduler.rows)
                enqueued = [chunk.request for chunk in chunks if chunk.ends], tokens
            elif scheduler.rows:
                rows = scheduler.next_rows()
                enqueued = rows, self.decoder.decode(rows)
            if enqueued:
                self._unread.append(enqueued)
                scheduler.was_enqueued(enqueued[0])
            while len(self._unread) > (enqueued is not None):
                changed += self._read()
        return changed

    def cancel(self, request: Request) -> None:
        """End a request; nothing happens to one that has ended.

        A stream that nobody has does so when Python frees it, perhaps in the midst of a step.

        Raises:
            TypeError: no request.
            ValueError: a request of another engine.
        """
        if not isinstance(request, Request):
            raise TypeError(f"cancel: request must be a Request, got {short(request)}")
        with self._lock:
            if request.reason:
                return
            if request not in self._going():
                raise ValueError("cancel: request must be one of this engine, got another's")
            request.reason = "cancelled"
            if self._steps:
                self._leaving.append(request)
            else:
                self.scheduler.leave(request)

    def _going(self) -> list[Request]:
        """The requests that have not ended, and perhaps some that have."""
        scheduler = self.scheduler
        unread = (request for requests, _ in self._unread for request in requests)
        return [*scheduler.rows, *scheduler.prompts, *scheduler.waiting, *unread]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        stop_tokens: int | Sequence[int] | None = None,
        stop: Any = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt; arguments as of `submit`, or one for each prompt.

        Prompt i has the number i. Other requests of the engine go on meanwhile.

        Raises:
            TypeError, ValueError: see `submit`.
            RuntimeError: logits are not finite.
        """
        steps = self.stream(prompts, max_new_tokens, sampling, stop_tokens=stop_tokens, stop=stop)
        return gathered(steps, len(prompts))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        stop_tokens: int | Sequence[int] | None = None,
        stop: Any = None,
    ) -> Iterator[list[int | None]]:
        """`generate`, as tokens come: one for each prompt at a time, None where its text has ended.

        Arguments are checked here; the requests are submitted when the first tokens are asked for.
        Whoever leaves the stream cancels them.
        """
        if not is_sequence(prompts) or len(prompts) == 0:
            fact = "prompts must be sequences of tokens"
            raise ValueError(f"stream: {fact}, got {short(prompts)}")
        counts = each("max_new_tokens", max_new_tokens, len(prompts))
        ways = each("sampling", sampling, len(prompts))
        requests = [
            self._request(*given, stop_tokens, stop, number)
            for number, given in enumerate(zip(prompts, counts, ways))
        ]
        return self._tokens(requests)

    def _tokens(self, requests: list[Request]) -> Iterator[list[int | None]]:
        with self._lock:
            self.scheduler.waiting.extend(requests)
        try:
            place = 0
            while True:
                while any(not x.reason and len(x.tokens) <= place for x in requests):
                    self.step()
                for number, request in enumerate(requests):
                    if request.reason == "nan" and len(request.tokens) <= place:
                        raise RuntimeError(not_finite(number, place))
                tokens = [x.tokens[place] if len(x.tokens) > place else None for x in requests]
                if not any(token is not None for token in tokens):
                    return
                yield tokens
                place += 1
        finally:
            for request in requests:
                self.cancel(request)

    def _read(self) -> list[Request]:
        """Give the requests of the oldest step their tokens; some may have ended before it."""
        if not self._unread:
            return []
        (requests, tokens), changed = self._unread[0], []
        for request, token in zip(requests, tokens()):
            if not request.reason:
                request.add(token)
                changed.append(request)
                if request.reason:
                    self.scheduler.leave(request)
        self._unread.popleft()
        return changed
