"""The cases of attention: dtypes, shapes, memory layouts and all options of a score."""

import dataclasses
from typing import Any

import numpy
from matrix import covering
from targets import Target

from cupyflash.testing import STORAGES, Inputs, make_alibi_slopes

CPU_LENGTHS = [(1, 1), (1, 113), (31, 31), (20, 50), (50, 20), (10, 300)]
GPU_LENGTHS = [(1, 1), (113, 113), (1, 4097), (113, 1023), (1023, 113), (1023, 1023), (4097, 4097)]
BIASES = {  # axes that are not broadcast, dtype; None is that of q
    "mask": ("bqk", "bool"),
    "full": ("bhqk", None),
    "position": ("hqk", "float32"),
}
HEAD_DIMS = [8, 32, 40, 64, 96, 128, 160, 192, 256]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; ``alibi`` is the rank of the slopes, ``bias`` a key of `BIASES`."""

    dtype: str
    head_dim: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    causal: bool | str
    window: tuple[int | None, int | None] | None
    softcap: float
    alibi: int
    layout: str
    storage: str
    bias: str
    sinks: bool
    dropout: float

    def problem(self, target: Target) -> tuple[Inputs, dict[str, Any]]:
        """The inputs and the options of ``cupyflash.attention`` without the layout."""
        # The yardstick keeps all scores: one long sequence is enough for several processes.
        batch = 1 if self.lengths[0] * self.lengths[1] > 2**22 else 2
        inputs = target.inputs(
            self.dtype,
            batch=batch,
            seqlen_q=self.lengths[0],
            seqlen_k=self.lengths[1],
            heads_q=self.heads[0],
            heads_kv=self.heads[1],
            head_dim=self.head_dim,
            layout=self.layout,
            storage=self.storage,
        )
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        if self.alibi:
            options["alibi_slopes"] = make_alibi_slopes(
                self.heads[0],
                target.library,
                batch=batch if self.alibi == 2 else None,
                device=target.device,
            )
        rng = numpy.random.default_rng(4)
        if self.bias:
            axes, dtype = BIASES[self.bias]
            whole = (batch, self.heads[0], *self.lengths)
            shape = [size if axis in axes else 1 for axis, size in zip("bhqk", whole)]
            values = rng.standard_normal(shape, dtype="float32")
            if dtype == "bool":
                options["bias"] = target.array(values > -0.5)
            else:
                options["bias"] = target.array(values, dtype or self.dtype)
        if self.sinks:
            options["sinks"] = target.array(rng.standard_normal(self.heads[0], dtype="float32"))
        if self.dropout:
            options |= {"dropout_p": self.dropout, "dropout_seed": 2**45 + 17}
        return inputs, options


def cases(target: Target) -> list[Case]:
    values = {
        "dtype": list(target.dtypes),
        "head_dim": HEAD_DIMS if target.full else [64, 128, 40],
        "lengths": GPU_LENGTHS if target.gpu and target.full else CPU_LENGTHS,
        "heads": [(2, 2), (4, 2), (3, 1)],
        "causal": [False, True, "top-left"],
        "window": [None, (37, 5), (None, 3), (0, 0), (16, None)],
        "softcap": [0.0, 5.0],
        "alibi": [0, 1, 2],
        "layout": ["bshd", "bhsd"],
        "bias": ["", *BIASES],
        "sinks": [False, True],
        "dropout": [0.0, 0.2],
        "storage": [x for x in STORAGES if x != "unaligned" or not target.aligned_only],
    }
    return covering(Case, values)
