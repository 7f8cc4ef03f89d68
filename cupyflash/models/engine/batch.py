"""One step of a model over the new tokens of several sequences: what the model is given."""

import dataclasses

from ...runtime.array import Array


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of one step, on the device of the model, int32 all of them.

    A step of decoding has one row for each sequence. A step over prompts is packed: the rows of the
    sequences follow each other, and ``cu_seqlens`` says where each one begins.

    Attributes:
        tokens: (rows,).
        row_positions: (rows,), where each row stands in its sequence.
        positions: (batch,), the tokens of each sequence that are in the cache before the step.
        page_table: (batch, max_pages), the pages of each sequence, as `attention_with_cache` takes
            them. Rows of padding have positions 0 and tables of page 0, which is nobody's.
        cu_seqlens: (batch + 1,), or None where each sequence has one row.
        max_new: the most rows of a sequence.
        last: (wanted,), the rows whose logits are wanted; None: all.
        num_splits: as `attention_with_cache` takes it.
        sequences: (rows,), the sequence of each row, where all sequences begin with this step, so
            that attention needs no page; None where one has keys in the cache.
    """

    tokens: Array
    row_positions: Array
    positions: Array
    page_table: Array
    cu_seqlens: Array | None = None
    max_new: int = 1
    last: Array | None = None
    num_splits: int = 0
    sequences: Array | None = None
