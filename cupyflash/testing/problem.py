"""One attention problem that is timed: its shape and its work."""

import dataclasses
from typing import Any

# The backward does five matrix products of the forward's size, the forward two.
BACKWARD_WORK = 2.5


def attention_flops(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, head_dim: float, causal: bool
) -> float:
    """Floating-point operations of a forward: two matrix products, causal counts half."""
    return 4.0 * batch * heads * seqlen_q * seqlen_k * head_dim * (0.5 if causal else 1.0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention of ``batch`` sequences of ``seqlen`` queries.

    Attributes:
        seqlen_k: keys of a sequence, by default as many as queries.
        head_dim_v: of the values, by default that of queries and keys.
    """

    dtype: str
    head_dim: int
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    causal: bool
    seqlen_k: int | None = None
    head_dim_v: int | None = None
    softcap: float = 0.0

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        """The options that `cupyflash.attention` gets."""
        return {"causal": self.causal, "softcap": self.softcap}

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """The shapes of q, k, v and dout: (batch, seqlen, heads, head_dim)."""
        return (
            (self.batch, self.seqlen, self.heads, self.head_dim),
            (self.batch, self.keys, self.heads_kv, self.head_dim),
            (self.batch, self.keys, self.heads_kv, self.dim_v),
            (self.batch, self.seqlen, self.heads, self.dim_v),
        )

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        shape = f"{self.dtype} D={self.head_dim} B={self.batch} S={self.seqlen} H={heads}"
        return f"{shape} {'causal' if self.causal else 'full'}"

    def flops(self, direction: str) -> float:
        """Operations of the "fwd" or the "bwd" pass."""
        shape = self.batch, self.heads, self.seqlen, self.keys
        forward = attention_flops(*shape, (self.head_dim + self.dim_v) / 2, self.causal)
        return forward * (BACKWARD_WORK if direction == "bwd" else 1.0)

    def row(self, **fields: Any) -> dict[str, Any]:
        """A row of a results file."""
        return {
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "batch": self.batch,
            "seqlen_q": self.seqlen,
            "seqlen_k": self.keys,
            "heads": self.heads,
            "heads_kv": self.heads_kv,
            "causal": self.causal,
            **fields,
        }
