"""What bench.linear times: projections of real models, and each in plain torch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
    """One operation on so many rows; GPT-2's have biases, the others a gate and key groups."""

    op: str
    dtype: str
    rows: int
    depth: int
    hidden: int
    gated: bool
    activation: str

    def __str__(self) -> str:
        sizes = f"{self.depth}/{self.hidden}" if self.op == "mlp" else str(self.depth)
        gate = " gated" if self.gated and self.op == "mlp" else ""
        return f"{self.op} {self.dtype} {self.rows}x{sizes}{gate}"

    @property
    def heads(self) -> tuple[int, int]:
        """Of q, and of k."""
        heads_q = self.depth // HEAD_DIM.get(self.depth, 8)
        return heads_q, max(1, heads_q // 4) if self.gated else heads_q

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Shapes of the weights: of q, k and v together, or up, down and perhaps gate."""
        if self.op == "mlp":
            up = (self.hidden, self.depth)
            return [up, (self.depth, self.hidden), *([up] if self.gated else [])]
        heads_q, heads_kv = self.heads
        return [((heads_q + 2 * heads_kv) * (self.depth // heads_q), self.depth)]

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
        return tensors

    def _random(self, shape: tuple[int, ...], seed: int) -> Any:
        import torch

        device = attention_problem.DEVICE
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(
            shape, dtype=getattr(torch, self.dtype), device=device, generator=generator
        )

    def function(self, impl: str) -> Callable[..., Any]:
        """The operation on `tensors`, one array."""
        if impl == "cupyflash":
            return self._ours
        if impl == "cublaslt":
            return self._cublaslt
        if impl == "torch-compile":
            import torch

            return torch.compile(self._torch, dynamic=False)
        return self._torch

    def _ours(self, x: Any, weight0: Any, bias0: Any, residual: Any, **others: Any) -> Any:
        import cupyflash

        if self.op == "mlp":
            return cupyflash.mlp(
                x,
                weight0,
                others["weight1"],
                bias0,
                others["bias1"],
                gate_weight=others.get("weight2"),
                activation=self.activation,
                residual=residual,
            )
        heads_q, heads_kv = self.heads
        q, _, _ = cupyflash.qkv_projection(x, weight0, bias0, heads_q=heads_q, heads_kv=heads_kv)
        return _whole(q, weight0.shape[0])

    def _torch(self, x: Any, weight0: Any, bias0: Any, residual: Any, **others: Any) -> Any:
        """One operation after the other."""
        from torch.nn import functional

        out = functional.linear(x, weight0, bias0)
        if self.op == "mlp":
            if self.gated:
                out = self._activate(functional.linear(x, others["weight2"])) * out
            else:
                out = self._activate(out)
            out = functional.linear(out, others["weight1"], others["bias1"]) + residual
        return out

    def _cublaslt(self, x: Any, weight0: Any, bias0: Any, residual: Any, **others: Any) -> Any:
        """With the epilogues of cuBLASLt that torch reaches: bias, bias + GELU, residual.

        There is none for a gate, whose two products are one here.
        """
        import torch

        if self.op == "qkv_projection":
            return x @ weight0.t() if bias0 is None else torch.addmm(bias0, x, weight0.t())
        if self.gated:
            out = self._activate(x @ others["weight2"].t()) * (x @ weight0.t())
        else:
            out = torch._addmm_activation(bias0, x, weight0.t(), use_gelu=True)
        out = torch.addmm(residual, out, others["weight1"].t())
        return out if others["bias1"] is None else out + others["bias1"]

    def _activate(self, x: Any) -> Any:
        from torch.nn import functional

        if self.activation == "silu":
            return functional.silu(x)
        return functional.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


def _whole(q: Any, columns: int) -> Any:
    """The array (rows, columns) that q, k and v are views of."""
    return q.as_strided((q.shape[0], columns), (columns, 1))


def problems(
    ops: Sequence[str], dtypes: Sequence[str], rows: Sequence[int] | None = None
) -> Iterator[LinearProblem]:
    """Every op x dtype x model x number of rows, the many of the model first."""
    for op in ops:
        for dtype in dtypes:
            for depth, hidden, gated, activation, many in MODELS:
                for count in rows or (many, *FEW_ROWS):
                    yield LinearProblem(op, dtype, count, depth, hidden, gated, activation)
