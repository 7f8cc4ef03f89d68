"""The steps of a scheduler on the device: arrays that stay where they are, graphs, sampling.

The rows of decoding are tokens, positions, tables and choices in arrays that are made once, so that
CUDA graphs can read them. Sampling puts the next tokens there and counts the positions; the host
writes rows only where a request comes, leaves or gets a page. A graph is made for a number of rows
when it is first needed, for 1, 2, 4 and every multiple of 8; rows of padding write to the page that
nobody has. Prompts that end in a step become the rows behind those that decode.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy

from ... import environment
from ...ops.decode.sampling import DecodeState, choice_words, sample
from ...runtime.array import Array
from ...runtime.structs import header
from .batch import Batch
from .devices import device_of
from .pool import PADDING, PagePool
from .request import Request
from .scheduler import CHUNK, MOST_KEYS, Chunk

CHOICE_WORDS = header("decode/params.cuh").CHOICE_WORDS

SMALL_BATCHES = (1, 2, 4)
BATCH_STEP = 8
ALIGNMENT = 4  # int32 numbers: 16 bytes


def padded(rows: int) -> int:
    """The rows of the graph that so many rows take."""
    return next((x for x in SMALL_BATCHES if x >= rows), -(-rows // BATCH_STEP) * BATCH_STEP)


def power_of_2(least: int) -> int:
    """The first power of 2 that is not smaller."""
    return 1 << (least - 1).bit_length()


class Decoder:
    """The device's side of an engine.

    Args:
        model: has ``like`` and ``logits(batch, pool)``.
        max_pages: the pages of the longest sequence.
        graphs: whether steps of decoding are CUDA graphs; their batches are padded. None: where
            there is a GPU, but not under CUPYFLASH_DEBUG=1, which reads arrays on the host.
        num_splits: as `attention_with_cache` takes it.

    Raises:
        ValueError: graphs on the CPU.
    """

    def __init__(
        self,
        model: Any,
        pool: PagePool,
        max_batch: int,
        max_pages: int,
        graphs: bool | None = None,
        num_splits: int = 0,
    ) -> None:
        self.model, self.pool, self.num_splits = model, pool, num_splits
        self.device = device_of(model.like)
        debug = environment.current().debug
        self.captures = self.device.captures and not debug if graphs is None else graphs
        if self.captures and not self.device.captures:
            raise ValueError("Engine: graphs need a GPU, got a model on the CPU")
        size, integers = padded(max_batch), self.device.integers
        self.state = DecodeState(integers(size), integers(size), integers(size))
        self.table, self.source, self.out = (
            integers(size, max_pages),
            integers(size),
            integers(size),
        )
        self.choices = integers(size, CHOICE_WORDS)
        tables = max(max_pages, 2 * (MOST_KEYS // pool.page_size + size))
        self.prompts = integers(3 * CHUNK + 3 * size + tables + 8 * ALIGNMENT)
        self.graphs: dict[int, Callable[[], Array]] = {}
        self.order: list[Request] = []  # the requests of the rows on the device
        self.pages: list[int] = []  # how many pages of each row are in the table there
        self.changed = self.greedy = True

    def decode(self, rows: list[Request]) -> Callable[[], list[int]]:
        """Enqueue a step; the function that is returned waits for the tokens of the rows."""
        self.keep(rows)
        count = padded(len(rows)) if self.captures else len(rows)
        self._write_rows(count)
        if not self.captures:
            logits = self.model.logits(self._batch(count), self.pool)
        else:
            if count not in self.graphs:
                batch = self._batch(count)
                launches = functools.partial(self.model.logits, batch, self.pool)
                self.graphs[count] = self.device.capture(launches)
            logits = self.graphs[count]()
        return self._sample(logits[: len(rows)], 0, self.greedy)

    def prefill(self, chunks: list[Chunk], rows: list[Request]) -> Callable[[], list[int]]:
        """Enqueue a step over prompts; the tokens are those of the chunks that end a prompt.

        Args:
            rows: those that decode, in front of the new ones.
        """
        self.keep(rows)
        ended = [chunk.request for chunk in chunks if chunk.ends]
        logits = self.model.logits(self._packed(chunks), self.pool)
        if not ended:
            return list
        first = len(self.order)
        self._choose(ended, first)
        self.order, self.changed = self.order + ended, True
        return self._sample(logits, first, _all_greedy(ended))

    def keep(self, rows: list[Request]) -> None:
        """Bring the tokens of these rows into this order, and forget the others."""
        if rows == self.order:
            return
        places = {request: place for place, request in enumerate(self.order)}
        source = [places[request] for request in rows]
        if source != list(range(len(rows))):
            taken, tokens = self.source[: len(rows)], self.state.tokens
            self.device.write(taken, numpy.array(source, "int32"))
            tokens[: len(rows)] = self.device.take(tokens, taken)
        self.order, self.changed = list(rows), True

    def _write_rows(self, count: int) -> None:
        """Write what has changed of the rows, of which some of ``count`` may be padding."""
        rows, pages = self.order, [len(request.pages) for request in self.order]
        if self.changed:
            self.device.write(self.state.positions[:count], numpy.zeros(count, "int32"))
            self._choose(rows, 0)
            self.greedy = _all_greedy(rows)
        if self.changed or pages != self.pages:
            table = numpy.full((count, self.table.shape[1]), PADDING, "int32")
            for row, request in zip(table, rows):
                row[: len(request.pages)] = request.pages
            self.device.write(self.table[:count], table)
        self.changed, self.pages = False, pages

    def _choose(self, requests: list[Request], first: int) -> None:
        """Write the positions of rows from ``first`` on, and how their tokens are chosen."""
        part = slice(first, first + len(requests))
        positions = numpy.array([request.position for request in requests], "int32")
        self.device.write(self.state.positions[part], positions)
        ways = choice_words([x.sampling for x in requests], [x.number for x in requests])
        self.device.write(self.choices[part], ways)

    def _sample(self, logits: Array, first: int, greedy: bool) -> Callable[[], list[int]]:
        count = logits.shape[0]
        part, out = slice(first, first + count), self.out[:count]
        state, choices = DecodeState(*(x[part] for x in self.state)), self.choices[part]
        sample(logits, out=out, state=state, choices=None if greedy else choices)
        return self.device.read(out)

    def _batch(self, count: int) -> Batch:
        tokens, positions, _ = (x[:count] for x in self.state)
        table = self.table[:count]
        return Batch(tokens, positions, positions, table, num_splits=self.num_splits)

    def _packed(self, chunks: list[Chunk]) -> Batch:
        """The batch of a step over prompts, which goes to the device as one copy."""
        counts, starts = zip(*((len(chunk.tokens), chunk.start) for chunk in chunks))
        ends = numpy.cumsum([0, *counts])
        longest = max(map(operator.add, starts, counts))
        width = power_of_2(self.pool.count(longest))  # few widths have few plans
        table = numpy.full((len(chunks), min(width, self.table.shape[1])), PADDING)
        for row, (request, *_) in zip(table, chunks):
            row[: len(request.pages)] = request.pages[: table.shape[1]]
        wanted = [end - 1 for chunk, end in zip(chunks, ends[1:]) if chunk.ends]
        parts = [
            numpy.concatenate([chunk.tokens for chunk in chunks]),
            numpy.concatenate([start + numpy.arange(n) for start, n in zip(starts, counts)]),
            numpy.array(starts),
            table,
            ends,
            numpy.array(wanted or ends[-1:] - 1),
        ]
        if not any(starts):
            parts.append(numpy.repeat(numpy.arange(len(chunks)), counts))
        *arrays, last, sequences = [*self._upload(parts), None][:7]
        most = min(int(ends[-1]), power_of_2(max(counts)))
        return Batch(*arrays, most, last, self.num_splits, sequences)

    def _upload(self, parts: list[numpy.ndarray]) -> list[Array]:
        """The parts as arrays on the device, which the next call overwrites."""
        starts = numpy.cumsum([0, *(-(-x.size // ALIGNMENT) * ALIGNMENT for x in parts)]).tolist()
        values = numpy.zeros(starts[-1], "int32")
        for part, start in zip(parts, starts):
            values[start : start + part.size] = part.ravel()
        self.device.write(self.prompts[: values.size], values)
        places = [self.prompts[start : start + x.size] for x, start in zip(parts, starts)]
        return [place.reshape(part.shape) for place, part in zip(places, parts)]


def _all_greedy(requests: list[Request]) -> bool:
    return all(request.sampling.temperature == 0 for request in requests)
