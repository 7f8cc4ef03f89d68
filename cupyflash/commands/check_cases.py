"""The attention problems of ``cupyflash check``."""

import dataclasses

from ..testing import Inputs, make_inputs, make_varlen_inputs


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem, causal with the diagonal bottom-right.

    Attributes:
        heads: query heads and key heads.
        lengths: of the queries and keys of each sequence; they differ only in packed sequences.
    """

    name: str
    dtype: str
    heads: tuple[int, int]
    head_dim: int
    lengths: tuple[tuple[int, int], ...]
    softcap: float = 0.0
    packed: bool = False

    @property
    def shape(self) -> str:
        """Sequences, heads and head dim in a few characters: ``8 × 1024, 32/8×128``."""
        (seqlen_q, seqlen_k), (heads_q, heads_kv) = self.lengths[0], self.heads
        if self.packed:
            tokens = f"{sum(length for length, _ in self.lengths)} in {len(self.lengths)}"
        else:
            length = f"{seqlen_q}" if seqlen_q == seqlen_k else f"{seqlen_q}:{seqlen_k}"
            tokens = f"{len(self.lengths)} × {length}"
        heads = f"{heads_q}" if heads_q == heads_kv else f"{heads_q}/{heads_kv}"
        return f"{tokens}, {heads}×{self.head_dim}"

    def inputs(self, library: str) -> Inputs:
        """Random inputs of this problem."""
        heads = {"heads_q": self.heads[0], "heads_kv": self.heads[1], "head_dim": self.head_dim}
        if self.packed:
            return make_varlen_inputs(library, self.dtype, *zip(*self.lengths), **heads)
        seqlen_q, seqlen_k = self.lengths[0]
        return make_inputs(
            library,
            self.dtype,
            batch=len(self.lengths),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            **heads,
        )


def cases(gpu: bool, dtypes: tuple[str, ...]) -> list[Case]:
    """The problems; float16 stands in for bfloat16 where that is not among ``dtypes``."""
    bfloat16 = "bfloat16" if "bfloat16" in dtypes else "float16"
    scale = 1 if gpu else 16
    packed = tuple((n, n) for n in (1, 113, 2048 // scale, 1023 // scale, 911 // scale))

    def square(batch: int, seqlen: int) -> tuple[tuple[int, int], ...]:
        return ((seqlen // scale, seqlen // scale),) * batch

    return [
        Case("GPT-2", "float16", (12, 12), 64, square(8 if gpu else 2, 1024)),
        Case("Llama 3 8B", bfloat16, (32, 8), 128, square(1, 4096)),
        Case("Gemma 2 9B", bfloat16, (16, 8), 256, square(1, 4096), softcap=50.0),
        Case("GPT-2", "float32", (12, 12), 64, square(1, 1024)),
        Case("odd lengths", "float16", (3, 1), 40, ((113, 1023),) * 2),
        Case("packed lengths", bfloat16, (32, 8), 128, packed, packed=True),
    ]
