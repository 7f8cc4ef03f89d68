"""The problems of bench parallel, which each rank makes for itself."""

import dataclasses
from typing import Any

from cupyflash.testing.problem import BACKWARD_WORK

WINDOWED, MILLION = 2**19, 2**20  # tokens of all GPUs together
# Documents of a packed batch, as shares of its tokens: none is longer than a quarter.
DOCUMENTS = (1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 16, 1 / 16, 1 / 32, 1 / 32, *[1 / 64] * 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """Causal attention over ``tokens`` tokens of each GPU.

    Attributes:
        window: keys left of a query, or None.
        packed: of `DOCUMENTS`, else one sequence.
    """

    tokens: int
    heads: int
    heads_kv: int
    head_dim: int = 128
    window: int | None = None
    packed: bool = False

    @property
    def kind(self) -> str:
        return "packed" if self.packed else f"window {self.window}" if self.window else "causal"

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens} a GPU, {self.heads}/{self.heads_kv} heads"

    @property
    def options(self) -> dict[str, Any]:
        """Of `cupyflash.attention`."""
        options: dict[str, Any] = {"causal": True}
        return options | ({"window": (self.window, 0)} if self.window else {})

    def lengths(self, ranks: int) -> list[int]:
        """The sequences of all ranks."""
        total = self.tokens * ranks
        return [int(total * share) for share in DOCUMENTS] if self.packed else [total]

    def share_of_one(self, ranks: int) -> tuple["Case", float]:
        """The case of as much work on one GPU, all tokens and some of the heads, and how many times
        it must be done.
        """
        kv = max(1, self.heads_kv // ranks)
        heads = kv * (self.heads // self.heads_kv)
        one = dataclasses.replace(self, tokens=self.tokens * ranks, heads=heads, heads_kv=kv)
        return one, self.heads / ranks / heads

    def flops(self, ranks: int, direction: str) -> float:
        """Operations of all ranks together, forward ("fwd") or both passes ("fwd+bwd")."""
        if self.window:
            pairs = sum(n * min(n, self.window) for n in self.lengths(ranks))
        else:
            pairs = sum(n * n / 2 for n in self.lengths(ranks))
        forward = 4.0 * self.heads * self.head_dim * pairs
        return forward * (1 + BACKWARD_WORK if direction == "fwd+bwd" else 1)

    def row(self, ranks: int, **fields: Any) -> dict[str, Any]:
        """A row of the results file."""
        return {"gpus": ranks, **dataclasses.asdict(self), "problem": str(self), **fields}


def cases(ranks: int) -> tuple[Case, ...]:
    """The most important ones first, so that a run that is cut off is a table, too."""
    found = (
        Case(8192, 32, 8),
        Case(32768, 32, 8),
        Case(8192, 32, 8, packed=True),
        Case(WINDOWED // ranks, 32, 8, window=4096),
        Case(MILLION // ranks, 32, 8),
        Case(8192, 64, 8),
        Case(32768, 64, 8),
        Case(8192, 32, 32),
        Case(131072, 32, 8),
        Case(131072, 64, 8),
        Case(32768, 32, 8, packed=True),
        Case(65536, 32, 32),
    )
    return tuple(dict.fromkeys(found))
