"""Steps of a Llama as the engine makes them: some new tokens of each sequence, keys in pages."""

import numpy

from cupyflash.models.engine import Batch


class Pages:
    """Keys and values of all layers; NaN where nobody has written."""

    def __init__(self, model, pages, page_size):
        config = model.config
        shape = (2, config.layers, pages, page_size, config.heads_kv, config.head_dim)
        self.both = model.library.zeros(shape, config.dtype)
        self.both[...] = numpy.nan
        self.pages, self.page_size = pages, page_size

    def layer(self, index):
        return self.both[0][index], self.both[1][index]


class Sequences:
    """Sequences whose tokens come in any parts; the pages of each are anywhere in the pool."""

    def __init__(self, model, sequences, page_size=8, room=0, seed=0):
        """There is room for as many tokens more as ``room``."""
        self.model, self.sequences = model, sequences
        self.done = [0] * len(sequences)
        width = max(-(-(len(x) + room) // page_size) for x in sequences)
        count = len(sequences) * width
        self.pool = Pages(model, count + 1, page_size)
        order = numpy.random.default_rng(seed).permutation(count) + 1
        self.table = order.reshape(-1, width).astype("int32")

    def arrays(self, counts, every=True):
        """The next ``counts`` tokens of the sequences; ``every`` row has logits, or the last ones.

        A step in which each sequence has one token is one of decoding.
        """
        put = lambda x: self.model.library.put(numpy.asarray(x, "int32"))
        parts = [range(n, n + count) for n, count in zip(self.done, counts)]
        ends = numpy.cumsum([0, *counts])
        packed = set(counts) != {1}
        tokens = [x[i] for x, part in zip(self.sequences, parts) for i in part]
        rows = None
        if packed and not any(self.done):
            rows = put(numpy.repeat(numpy.arange(len(counts)), counts))
        return Batch(
            tokens=put(tokens),
            row_positions=put([i for part in parts for i in part]),
            positions=put(self.done),
            page_table=put(self.table),
            cu_seqlens=put(ends) if packed else None,
            max_new=max(counts),
            last=None if every else put(ends[1:] - 1),
            sequences=rows,
        )

    def advance(self, counts):
        """Count tokens as done."""
        self.done = [n + count for n, count in zip(self.done, counts)]

    def step(self, counts, every=True):
        """Logits of a step, float32 (wanted, vocab_size)."""
        found = self.model.logits(self.arrays(counts, every), self.pool)
        self.advance(counts)
        return found
