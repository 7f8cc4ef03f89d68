"""Which requests the next step is for: a step is either over prompts or decodes.

Prompts come first, in the order of their arrival, packed into steps of at most `CHUNK` new tokens;
a longer prompt takes several steps, and one that has no room behind others waits for the next step,
so that it is computed as it is alone. A request is admitted when there are pages for all of its
tokens so far. Where pages run out while requests decode, the one that was admitted last gives all
of its pages back and waits; what it had is computed again. The first request always goes on, so all
of them end.
"""

import collections
from typing import NamedTuple

from .pool import PagePool
from .request import Request

# New tokens of a step over prompts: enough that the GPU is at work while the host prepares the
# launches of the next step, also with a model of 1B parameters.
CHUNK = 8192
MOST_KEYS = 65536  # sequences of a step over prompts times the longest: attention may gather them


class Chunk(NamedTuple):
    """The tokens of a request that a step over prompts computes."""

    request: Request
    tokens: list[int]
    start: int
    ends: bool  # with the last token that is known, so that the next one can be chosen


class Scheduler:
    """The requests of an engine.

    Attributes:
        waiting: those that have no pages.
        prompts: those whose prompts have begun; the order is that of their admission.
        rows: those that decode, in the same order.
    """

    def __init__(self, pool: PagePool, max_batch: int) -> None:
        self.pool, self.max_batch = pool, max_batch
        self.waiting: collections.deque[Request] = collections.deque()
        self.prompts: list[Request] = []
        self.rows: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self.waiting or self.prompts or self.rows)

    def next_prompts(self) -> list[Chunk]:
        """The next step over prompts; empty if there is none to be done now."""
        chunks: list[Chunk] = []
        room, longest = CHUNK, 0
        while room:
            if len(chunks) == len(self.prompts) and not self._admit():
                break
            request = self.prompts[len(chunks)]
            known = request.known
            start = request.computed
            tokens = known[start : start + room]
            longest = max(longest, start + len(tokens))
            whole = start + len(tokens) == len(known)
            if chunks and not (whole and (len(chunks) + 1) * longest <= MOST_KEYS):
                break
            room -= len(tokens)
            chunks.append(Chunk(request, tokens, start, whole))
        for request, tokens, _, _ in chunks:
            request.computed += len(tokens)
        return chunks

    def next_rows(self) -> list[Request]:
        """The next step of decoding, whose requests have pages for a token more.

        Where pages run out, the last requests wait again: all their tokens must have been read.
        """
        while (missing := self._missing()) > self.pool.free:
            self._preempt(self.rows.pop())
        if missing:
            for request in self.rows:
                count = self._pages_of_next(request)
                request.pages += self.pool.take(count)
        return list(self.rows)

    @property
    def must_preempt(self) -> bool:
        """Whether the next step makes a request wait again."""
        return not self.prompts and not self._can_admit() and self._missing() > self.pool.free

    def was_enqueued(self, requests: list[Request]) -> None:
        """The step that chooses the next tokens of these requests has been enqueued.

        Those with all of their tokens leave; whatever takes their pages comes later on the stream.
        """
        known = set(self.rows)
        for request in requests:
            request.sampled += 1
            if request in self.prompts:
                self.prompts.remove(request)
            if request.sampled == request.max_new_tokens:
                self.leave(request)
            elif request not in known:
                self.rows.append(request)

    def leave(self, request: Request) -> None:
        """The request ends, or has ended."""
        for requests in (self.rows, self.prompts, self.waiting):
            if request in requests:
                requests.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.give(request.pages)
        request.pages = []

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.computed, request.sampled = 0, len(request.tokens)
        self.waiting.appendleft(request)

    def _missing(self) -> int:
        """The pages that the rows need for their next token."""
        return sum(map(self._pages_of_next, self.rows))

    def _pages_of_next(self, request: Request) -> int:
        return self.pool.count(request.position + 1) - len(request.pages)

    def _can_admit(self) -> bool:
        """Whether the first request that waits can begin."""
        if not self.waiting or len(self.rows) + len(self.prompts) >= self.max_batch:
            return False
        return self.pool.count(len(self.waiting[0].known)) <= self.pool.free

    def _admit(self) -> bool:
        if not self._can_admit():
            return False
        request = self.waiting.popleft()
        request.pages = self.pool.take(self.pool.count(len(request.known)))
        self.prompts.append(request)
        return True
