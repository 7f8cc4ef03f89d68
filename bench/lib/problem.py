"""One attention problem of a benchmark: its shape, its work, its tensors."""

import dataclasses
from typing import Any

# The backward does five matrix products of the forward's size, the forward two.
BACKWARD_WORK = 2.5
DTYPES = ("bfloat16", "float16", "float32")
DEVICE = "cuda"


def attention_flops(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, head_dim: float, causal: bool
) -> float:
    """Floating-point operations of a forward: two matrix products, causal counts half."""
    return 4.0 * batch * heads * seqlen_q * seqlen_k * head_dim * (0.5 if causal else 1.0)


def generator(seed: int) -> Any:
    """Returns a tensor of random numbers of torch on `DEVICE`."""
    import torch

    return torch.Generator(DEVICE).manual_seed(seed)


def random(shape: tuple[int, ...], dtype: str, source: Any) -> Any:
    """A torch tensor on `DEVICE`, standard normal, by a `generator` or a seed."""
    import torch

    source = generator(source) if isinstance(source, int) else source
    dtype = getattr(torch, dtype)
    return torch.randn(shape, dtype=dtype, device=DEVICE, generator=source)


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

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

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

    def tensors(self, seed: int = 0) -> tuple[Any, Any, Any, Any]:
        """q, k, v, dout (batch, seqlen, heads, head_dim): torch tensors, standard normal."""
        source = generator(seed)
        shapes = (
            (self.seqlen, self.heads, self.head_dim),
            (self.keys, self.heads_kv, self.head_dim),
            (self.keys, self.heads_kv, self.dim_v),
            (self.seqlen, self.heads, self.dim_v),
        )
        return tuple(random((self.batch, *shape), self.dtype, source) for shape in shapes)
