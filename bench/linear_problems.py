"""What bench.linear times: projections of real models; `linear_impls` has who does them."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from bench import problem as attention_problem

OPS = ("qkv_projection", "mlp")
HEAD_DIM = {768: 64, 4096: 128}

# d_in, hidden, gated, activation, many rows.
GPT2 = (768, 3072, False, "gelu_tanh", 4096)
LLAMA = (4096, 14336, True, "silu", 8192)
MODELS = (GPT2, LLAMA)
FEW_ROWS = (1, 4, 16, 32)


@dataclasses.dataclass(frozen=True)
class LinearProblem:
    """One operation on so many rows; GPT-2's have biases, the others a gate and key groups.

    With ``block`` the projection is what stands in a block: GPT-2's after a LayerNorm, Llama's
    after an RMSNorm and with q and k turned.
    """

    op: str
    dtype: str
    rows: int
    depth: int
    hidden: int
    gated: bool
    activation: str
    block: bool = False

    def __str__(self) -> str:
        sizes = f"{self.depth}/{self.hidden}" if self.op == "mlp" else str(self.depth)
        extra = " gated" if self.gated and self.op == "mlp" else ""
        if self.block:
            extra = " RMSNorm, rotary" if self.gated else " LayerNorm"
        return f"{self.op} {self.dtype} {self.rows}x{sizes}{extra}"

    @property
    def head_dim(self) -> int:
        """Of q, k and v."""
        return HEAD_DIM.get(self.depth, 8)

    @property
    def heads(self) -> tuple[int, int]:
        """Of q, and of k."""
        heads_q = self.depth // self.head_dim
        return heads_q, max(1, heads_q // 4) if self.gated else heads_q

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Shapes of the weights: of q, k and v together, or up, down and perhaps gate."""
        if self.op == "mlp":
            up = (self.hidden, self.depth)
            return [up, (self.depth, self.hidden), *([up] if self.gated else [])]
        heads_q, heads_kv = self.heads
        return [((heads_q + 2 * heads_kv) * self.head_dim, self.depth)]

    @property
    def numbers(self) -> int:
        """Of all weights."""
        return sum(rows * columns for rows, columns in self.weights)

    @property
    def bytes(self) -> int:
        """Of all weights, which must be read once."""
        return self.numbers * (4 if self.dtype == "float32" else 2)

    @property
    def flops(self) -> int:
        """Of the products."""
        return 2 * self.rows * self.numbers

    def row(self, **fields: Any) -> dict[str, Any]:
        """A row of a results file."""
        return {"problem": str(self), **dataclasses.asdict(self), **fields}

    def tensors(self) -> dict[str, Any]:
        """The arguments by name: weights of variance 1 / columns, everything else standard normal.

        Biases and the residual are in GPT-2's, a residual in all MLPs.
        """
        random, weights = self._random, self.weights
        tensors = {"x": random((self.rows, self.depth), 0)}
        for number, shape in enumerate(weights):
            tensors[f"weight{number}"] = random(shape, 1 + number) * shape[1] ** -0.5
            bias = None if self.gated else random(shape[:1], 10 + number)
            tensors[f"bias{number}"] = bias
        tensors["residual"] = random((self.rows, self.depth), 20) if self.op == "mlp" else None
        if self.block:
            tensors["norm_weight"] = random((self.depth,), 30)
            tensors["norm_bias"] = None if self.gated else random((self.depth,), 31)
            if self.gated:
                angles = random((self.rows, self.head_dim // 2), 32)
                tensors["cos"], tensors["sin"] = angles.cos(), angles.sin()
        return tensors

    def _random(self, shape: tuple[int, ...], seed: int) -> Any:
        import torch

        device = attention_problem.DEVICE
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(
            shape, dtype=getattr(torch, self.dtype), device=device, generator=generator
        )


def problems(
    ops: Sequence[str], dtypes: Sequence[str], rows: Sequence[int] | None = None
) -> Iterator[LinearProblem]:
    """Every op x dtype x model x number of rows, the many of the model first.

    The QKV projection stands alone first, then as in a block.
    """
    for op, dtype in itertools.product(ops, dtypes):
        for block in (False, True) if op == "qkv_projection" else (False,):
            for *sizes, many in MODELS:
                for count in rows or (many, *FEW_ROWS):
                    yield LinearProblem(op, dtype, count, *sizes, block)
